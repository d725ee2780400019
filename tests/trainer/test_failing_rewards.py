"""A reward function of which three calls in ten fail: the run finishes, and no failure is ever a score."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import pytest
from support.http_server import JsonServer, ok
from support.tiny import read_jsonl, write_jsonl

from lightppo import PPOTrainer
from lightppo.errors import ConfigError, RewardError

pytestmark = pytest.mark.usefixtures("world")

# verl's signature. Which calls fail follows from the answer alone; every score is 1 or more.
FAILING = """
import math, time, zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    fate = zlib.crc32(solution_str.encode()) % 10
    if fate == 0:
        raise ConnectionResetError("reset by peer")
    if fate == 1:
        time.sleep(3600)
    if fate == 2:
        return [math.nan, "<html>500</html>", {}][len(solution_str) % 3]
    return 1.0 + solution_str.count("1")
"""


@pytest.fixture
def failing(tmp_path) -> dict:
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    return {"reward_fn": str(path), "reward_timeout": 0.5, "n_samples_per_prompt": 4, "init_kl_coef": 0.0,
            "advantage_estimator": "rloo", "rollout_data_dir": str(tmp_path / "samples")}  # fmt: skip


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_the_run_finishes_and_failures_are_counted(make_config, failing, manager):
    config = make_config(
        **failing, reward_manager=manager, on_reward_failure="unscored", reward_workers=4
    )
    PPOTrainer.from_config(config).fit()
    metrics = read_jsonl(Path(config.checkpoint.save_path, "metrics.jsonl"))
    rows = [row for row in metrics if "rollout/reward" in row]
    assert len(rows) == 3
    for row in rows:
        assert row["rollout/reward_min"] >= 1  # no failure became a 0
        assert row["rollout/samples"] == 16 - row["rollout/unscored"] - row["rollout/small_group"]
        assert row["reward/failures"] >= row["reward/timeouts"]
    assert sum(row["rollout/unscored"] for row in rows) > 0
    assert (
        sum(row["reward/failures"] for row in rows)
        > sum(row["reward/timeouts"] for row in rows)
        > 0
    )
    samples = [
        json.loads(line)
        for path in Path(failing["rollout_data_dir"]).rglob("*.jsonl")
        for line in path.open()
    ]
    assert samples
    assert all(sample["score"] is None or sample["score"] >= 1 for sample in samples)


@pytest.mark.parametrize("manager", ["naive", "prime"])
@pytest.mark.parametrize("labelled", [True, False])
def test_the_error_shows_the_users_line_and_that_there_are_no_labels(
    make_config, tmp_path, manager, labelled
):
    source = "def compute_score(data_source, solution_str, ground_truth):\n    return float(ground_truth) / 0\n"
    (tmp_path / "mine.py").write_text(source)
    rows = [{"input": f"{i}+1="} | ({"label": "1"} if labelled else {}) for i in range(4)]
    options = {
        "reward_fn": str(tmp_path / "mine.py"),
        "reward_manager": manager,
        "reward_timeout": 60,
    }
    with pytest.raises(RewardError) as error:
        PPOTrainer.from_config(
            make_config(**options, prompt_data=write_jsonl(tmp_path / "rows.jsonl", rows))
        ).fit()
    place = f"({tmp_path}/mine.py:2 in compute_score: return float(ground_truth) / 0)"
    assert (f"ZeroDivisionError: float division by zero {place}" in str(error.value)) is labelled
    assert str(error.value).endswith(
        place if labelled else f"{place}. rows have no label: set --label_key"
    )
    # for --debug
    assert 'mine.py", line 2, in compute_score' in "".join(traceback.format_exception(error.value))


def test_by_default_the_first_failure_ends_the_run(make_config, failing):
    with pytest.raises(
        RewardError, match=r"reward function failing.py:compute_score .* on sample \d+ \(prompt row"
    ):
        PPOTrainer.from_config(make_config(**failing, reward_manager="naive")).fit()


@pytest.fixture
def server():
    server = JsonServer()
    yield server
    server.close()


@pytest.mark.parametrize("where", ["rollout", "evaluation"])
@pytest.mark.parametrize("status", [401, 404, 302])
def test_a_reward_server_that_refuses_ends_the_run_at_once(
    make_config, server, tmp_path, status, where
):
    """The first step is good. The second step, or the evaluation after the first one, is refused."""
    evaluated = write_jsonl(tmp_path / "eval.jsonl", [{"input": "9+9=", "label": "18"}])
    server.location = f"{server.url}/elsewhere"

    def reply(path, body, n):
        refused = n > 1 if where == "rollout" else body["prompts"] == ["9+9="]
        return (status, b"no") if refused else ok(rewards=[1.0] * len(body["query"]))

    server.reply = reply
    asked = {
        "reward_fn": None,
        "remote_rm_url": [f"{server.url}/score"],
        "on_reward_failure": "unscored",
    }
    options = (
        {"eval_data": evaluated, "eval_steps": 1, "val_before_train": False}
        if where == "evaluation"
        else {}
    )
    config = make_config(**asked, **options, save_steps=1)
    with pytest.raises(RewardError, match=f"{server.url}/score: HTTP {status}"):
        PPOTrainer.from_config(config).fit()
    assert len(server.requests) == 2
    saved = [folder.name for folder in Path(config.checkpoint.ckpt_path).rglob("global_step*")]
    assert not any("2" in name for name in saved)


WORST = """
def reward_func(queries, prompts, labels):
    return [0.0] * len(queries)
"""


def test_scores_that_are_all_at_the_minimum_end_the_run(make_config, tmp_path):
    (tmp_path / "worst.py").write_text(WORST)
    options = {"reward_fn": str(tmp_path / "worst.py"), "check_verifier_status": True}
    with pytest.raises(RewardError, match="--check_verifier_status"):
        PPOTrainer.from_config(make_config(**options, reward_minimum=0.0)).fit()
    with pytest.raises(ConfigError, match=r"worst.py:reward_func .*--reward_minimum"):
        PPOTrainer.from_config(make_config(**options, save_path=str(tmp_path / "other")))
