"""--max_staleness 1 on two ranks over fake vLLM servers: late answers, dead servers, kills and resumes change nothing."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from faults.small_run import flags, metric_rows, outcome, write_inputs
from support.fake_vllm import TrainedVLLM, trained_servers
from support.killer import Killer
from support.ranks import WITH_SUPPORT, RanksResult, run_ranks
from support.runs import forget_checkpoints
from support.tiny import read_jsonl, sums, write_jsonl
from transformers import AutoConfig

from lightppo.rollout.vllm.weights import architecture

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "ranks" / "ahead.py"
ROWS = 14  # the last step of an episode has half as many
REWARD = """
import json, os, random, signal, time

answers = 0
fault = json.loads(os.environ.get("FAULT", "{}"))  # how, on which rank, at which answer

def reward_func(queries, prompts, labels):
    global answers
    before, answers = answers, answers + len(queries)
    time.sleep(random.SystemRandom().uniform(0, 0.02))
    if fault and before < fault["at"] <= answers and os.environ.get("RANK", "0") == fault["rank"]:
        if fault["how"] == "raise":
            raise KeyError("no such answer")
        if fault["how"] == "nan":
            return [float("nan")] * len(queries)
        os.kill(os.getpid(), getattr(signal, fault["how"]))
    return [float(random.Random(query).random() < 0.7) for query in queries]
"""
WORLD = """
import random, time
from lightppo import Step

class World:
    def reset(self, **row):
        time.sleep(random.SystemRandom().uniform(0, 0.02))
        self.turns = 0

    def step(self, text):
        time.sleep(random.SystemRandom().uniform(0, 0.02))
        self.turns += 1
        luck = random.Random(text + str(self.turns))
        return Step(f" {luck.randrange(10, 99)} ", reward=luck.random(), done=luck.random() < 0.4)
"""
AHEAD = {
    "zero_stage": 0,
    "rollout_engine": "vllm_server",
    "max_staleness": 1,
    "advantage_estimator": "grpo",
    "n_samples_per_prompt": 2,
    "train_batch_size": 8,
    "critic_learning_rate": None,
    "init_kl_coef": 0.01,
    "num_episodes": 2,
    "max_ckpt_num": 20,
    "vllm_server_sync": "disk",
    "vllm_server_retries": 0,
    "rollout_check": "off",
}
EPISODES = {
    "reward_fn": None,
    "label_key": "label",
    "reward_source": "environment",
    "max_turn_tokens": 4,
    "generate_max_len": 30,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rejections": {"dynamic_sampling": True, "gen_batch_size": 2},
    "surplus": {"dynamic_sampling": True, "gen_batch_size": 8},
    "episodes": EPISODES,
}
KILLS = int(os.environ.get("KILLS", 100))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("ahead")
    inputs = write_inputs(folder)
    (folder / "reward.py").write_text(REWARD)
    (folder / "world.py").write_text(WORLD)
    return inputs | {"prompt_data": write_jsonl(folder / "rows.jsonl", sums(ROWS))}


@pytest.fixture(scope="module")
def servers(inputs):
    with trained_servers(architecture(AutoConfig.from_pretrained(inputs["pretrain"]))) as servers:
        yield servers


@pytest.fixture
def start(inputs, servers, tmp_path):
    """``start(folder, spec, **options)``: a run of two ranks."""

    def start(
        folder: str, spec: Any = None, *, world_size=2, check=True, fault=None, **options
    ) -> RanksResult:
        options = AHEAD | {"vllm_server_sync_dir": tmp_path} | options
        if "reward_source" in options:
            options["env"] = f"{Path(inputs['reward_fn']).with_name('world.py')}:World"
        words = [
            *flags(inputs, tmp_path / folder, **options),
            "--vllm_server_url",
            *[server.url for server in servers],
        ]
        environment = WITH_SUPPORT | ({"FAULT": json.dumps(fault)} if fault else {})
        how = {"timeout": 200, "env": environment, "world_size": world_size, "check": check}
        return run_ranks(SCRIPT, json.dumps(spec or {}), *words, **how)

    return start


def differences(first: Path, second: Path) -> list[Any]:
    """The numbers of the steps that differ, and the weights."""
    weights, rows = outcome(first)
    other_weights, other_rows = outcome(second)
    return [
        *[
            (row["step"], name, row.get(name), other.get(name))
            for row, other in zip(rows, other_rows, strict=True)
            for name in row.keys() | other.keys()
            if row.get(name) != other.get(name) and not name.endswith("_seconds")
        ],
        *["weights"] * (weights != other_weights),
    ]


@pytest.mark.parametrize(
    "variant",
    ["plain", *[pytest.param(name, marks=pytest.mark.long) for name in list(VARIANTS)[1:]]],
)
def test_a_run_is_the_one_that_samples_before_it_trains(start, tmp_path, variant):
    start("at_once", {"at_once": True}, **VARIANTS[variant])
    start("ahead", **VARIANTS[variant])
    assert differences(tmp_path / "at_once", tmp_path / "ahead") == []
    rows = [row for row in metric_rows(tmp_path / "ahead") if "rollout/staleness" in row]
    assert len(rows) >= 3
    assert 0 < max(row["rollout/staleness"] for row in rows) <= 1


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_goes_on_from_every_step(start, tmp_path, variant):
    start("straight", **VARIANTS[variant])
    start("resumed", **VARIANTS[variant])
    steps = len(metric_rows(tmp_path / "resumed"))
    for step in range(steps - 1, 0, -1):
        forget_checkpoints(tmp_path / "resumed" / "ckpt", after=step)
        assert "resumed from" in start("resumed", **VARIANTS[variant]).output
        assert differences(tmp_path / "straight", tmp_path / "resumed") == [], step


def samples(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """What each step trained on: prompts and responses."""
    return {
        path.name: sorted((row["index"], row["output"]) for row in read_jsonl(path))
        for path in (folder / "data").iterdir()
    }


@pytest.mark.long
@pytest.mark.parametrize("variant", ["plain", "rejections", "surplus"])
@pytest.mark.parametrize("world_sizes", [(1, 2), (2, 1)])
def test_it_goes_on_with_another_number_of_ranks(
    start, servers, tmp_path, monkeypatch, variant, world_sizes
):
    """The samples are the same; sums over ranks are not, so the servers do not look at the weights."""
    for server in servers:
        monkeypatch.setattr(server, "sees_weights", False)
    before, after = world_sizes
    start(
        "straight",
        world_size=after,
        rollout_data_dir=tmp_path / "straight/data",
        **VARIANTS[variant],
    )
    options = VARIANTS[variant] | {"rollout_data_dir": tmp_path / "resumed" / "data"}
    start("resumed", world_size=before, benchmark_steps=2, **options)
    result = start("resumed", world_size=after, reshape_ckpt=True, **options)
    assert "resumed from" in result.output
    assert samples(tmp_path / "straight") == samples(tmp_path / "resumed")


# -- failures and signals in flight ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant",
    ["plain", *[pytest.param(name, marks=pytest.mark.long) for name in ("rejections", "surplus")]],
)
def test_a_reward_function_that_fails_ends_the_run_on_all_ranks(start, variant):
    fault = {"how": "raise", "rank": "1", "at": 6}
    result = start("failed", check=False, fault=fault, **VARIANTS[variant])
    assert result.returncode == 1
    assert "no such answer" in result.output


@pytest.mark.long
@pytest.mark.parametrize("variant", ["plain", "rejections", "surplus"])
def test_a_score_that_is_not_finite_leaves_out_a_step_on_all_ranks(start, tmp_path, variant):
    fault = {"how": "nan", "rank": "1", "at": 6}
    for folder, spec in (("at_once", {"at_once": True}), ("ahead", {})):
        start(folder, spec, fault=fault, **VARIANTS[variant])
    assert differences(tmp_path / "at_once", tmp_path / "ahead") == []
    rows = metric_rows(tmp_path / "ahead")
    assert [row["train/actor_skipped"] for row in rows].count(1) == 1


@pytest.mark.long
def test_a_server_that_refuses_ends_the_run_on_all_ranks(start, servers, tmp_path, monkeypatch):
    route = "/inference/v1/generate"
    before = sum(len(server.bodies(route)) for server in servers)

    def refuse(body, n):
        asked = sum(len(server.bodies(route)) for server in servers)
        return (400, b"too long") if asked > before + 12 else None

    for server in servers:
        monkeypatch.setitem(server.replies, route, refuse)
    result = start("refused", check=False)
    assert result.returncode == 1
    assert "too long" in result.output
    assert metric_rows(tmp_path / "refused") == []


@pytest.mark.parametrize(
    ("name", "code"), [("SIGTERM", 143), pytest.param("SIGINT", 130, marks=pytest.mark.long)]
)
def test_a_signal_in_flight_saves_and_the_run_goes_on(start, tmp_path, name, code):
    start("straight", save_steps=-1)
    fault = {"how": name, "rank": "0", "at": 10}  # of 8 in the first step, 4 of them on this rank
    result = start("stopped", check=False, fault=fault, save_steps=-1)
    assert result.returncode == code
    assert f"stopped by {name} after step 2 of" in result.output
    start("stopped", save_steps=-1)
    assert differences(tmp_path / "straight", tmp_path / "stopped") == []


# -- kills -----------------------------------------------------------------------------------------------------------


def killed(start: Any, folder: Path, dice: random.Random, seconds: Any, **options: Any) -> int:
    """How many kills came until the run was complete; ``seconds``: of its start, and of each step."""
    pids = folder.with_name(f"{folder.name}_pids")
    pids.mkdir()
    mark, kills = folder / "ckpt" / "latest", 0
    of_start, of_step, steps = seconds
    for tries in range(100):
        for file in pids.iterdir():
            file.unlink()
        done = int(mark.read_text().removeprefix("global_step")) if mark.exists() else 0
        left = of_start + of_step * (steps - done)
        latest = left * 1.05**tries  # a machine that is busy now gets there, too
        ranks = [[0]] if options.get("world_size") == 1 else [[0], [1], [0, 1]]
        killer = Killer(pids, dice.choice(ranks), dice.uniform(0.8 * of_start, latest))
        killer.start()
        result = start(folder.name, {"pids": str(pids)}, check=False, **options)
        killer.over.set()
        killer.join()
        kills += killer.came
        if result.returncode == 0:
            return kills
        assert killer.came, f"after {kills} kills:\n{result.output[-4000:]}"
    raise AssertionError(f"{folder} does not get to its end")


def check_kills(
    start: Any,
    servers: list[TrainedVLLM],
    tmp_path: Path,
    variant: str,
    count: float,
    **options: Any,
) -> tuple[int, int, int]:
    """Kills of trainers and of servers, and how many runs they took; none of them may change a number."""
    dice = random.Random(variant)
    options = VARIANTS[variant] | options
    pids = tmp_path / "pids"
    pids.mkdir()
    start("undisturbed", {"pids": str(pids)}, **options)
    rows = read_jsonl(tmp_path / "undisturbed" / "run" / "metrics.jsonl")
    times = [row["time"] for row in rows]
    of_step = (times[-1] - times[0]) / (len(times) - 1)
    seconds = (times[0] - of_step - (pids / "0").stat().st_mtime, of_step, len(times))
    kills = runs = deaths = 0
    try:
        while kills < count:
            for server in servers:
                server.deaths = 0.02
                server.died = 0
            kills += killed(start, tmp_path / f"run{runs}", dice, seconds, **options)
            deaths += sum(server.died for server in servers)
            assert differences(tmp_path / "undisturbed", tmp_path / f"run{runs}") == []
            runs += 1
    finally:
        for server in servers:
            server.deaths = 0.0
    return kills, deaths, runs


def test_ten_kills_change_nothing(start, servers, tmp_path):
    check_kills(start, servers, tmp_path, "plain", 10, world_size=1, num_episodes=1)


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("variant", VARIANTS)
def test_kills_of_the_trainer_and_of_servers_change_nothing(
    start, servers: list[TrainedVLLM], tmp_path, variant, capsys
):
    kills, deaths, runs = check_kills(start, servers, tmp_path, variant, KILLS / len(VARIANTS))
    with capsys.disabled():
        print(f"\n{variant}: {kills} kills of trainers and {deaths} of servers in {runs} runs")
