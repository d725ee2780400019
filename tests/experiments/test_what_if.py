"""``lightppo what-if``: real branches of a tiny run, in this process; what it refuses; the numbers by hand."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.ranks import REPO
from support.runs import fitted, trained_rows

from lightppo.config import PPOConfig, parse_args
from lightppo.experiments import what_if
from lightppo.experiments.fork import Fork, branch_options
from lightppo.experiments.pair_page import compared, equal_share, first_difference, row_of
from lightppo.experiments.what_if import arguments_of, main

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(scope="module")
def finished(world, assets, tmp_path_factory) -> Path:
    """A run of five steps, with checkpoints of the second and the fourth one."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    config = PPOConfig.from_flat(
        assets,
        prompt_max_len=12,
        generate_max_len=5,
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        train_batch_size=8,
        micro_train_batch_size=8,
        num_episodes=2,
        total_training_steps=5,
        advantage_estimator="grpo",
        init_kl_coef=0.0,
        actor_learning_rate=1e-2,
        lr_scheduler="constant",
        lr_warmup_ratio=0.0,
        zero_stage=0,
        num_examine=0,
        save_steps=2,
        save_path=str(folder),
    )
    fitted(config)
    shutil.rmtree(folder / "checkpoints_ppo" / "_actor" / "global_step5")
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of that run, as if it had been made there."""
    shutil.copytree(finished, tmp_path / "run")
    for path in (tmp_path / "run").glob("run_config*.yaml"):
        path.write_text(path.read_text().replace(str(finished), str(tmp_path / "run")))
    return tmp_path / "run"


def words(run: Path, *more: str, step: int = 2, steps: int = 2) -> list[str]:
    change = [] if "--set" in more else ["--set", "actor_learning_rate=0.03"]
    return [str(run), "--step", str(step), "--steps", str(steps), *change, *more]


def test_a_question_and_its_answer(run, started, capsys, tmp_path):
    """The base branch of the run's seed is the run; a second call adds what is missing, and no more."""
    main(words(run))
    out = capsys.readouterr().out
    assert started == ["changed_seed42"]
    assert "the base branch of seed 42 is the run itself" in out
    folder = tmp_path / "run_what_if" / "step2_actor_learning_rate=0.03"
    changed, base = trained_rows(folder / "changed_seed42"), trained_rows(run)[2:4]
    assert [row["step"] for row in changed] == [3, 4]
    assert [row["train/actor_lr"] for row in changed] == pytest.approx([0.03, 0.03])
    # Sampled by the same weights with the same random numbers: equal until the first update.
    assert changed[0]["rollout/reward"] == base[0]["rollout/reward"]
    assert changed[1]["train/entropy"] != base[1]["train/entropy"]
    assert "first token that differs: step 4, prompt " in out
    assert "equal tokens by step: 100% " in out
    assert "needs --pairs" in out
    assert out.splitlines()[-1] == str(folder / "what_if.html")
    assert "<svg" in (folder / "what_if.html").read_text()

    picture = tmp_path / "curves.png"
    main(words(run, "--pairs", "2", "--width", "reward=0.5", "--picture", str(picture)))
    out = capsys.readouterr().out
    assert started == ["changed_seed42", "base_seed43", "changed_seed43"]
    assert "2 of 2 pairs" in out
    assert " for 0.5 " in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    # one file for both: nothing of the run is copied
    assert next((folder / "fork").rglob("*.pt")).stat().st_nlink == 2

    with pytest.raises(SystemExit):
        main(words(run, "--out", str(folder), "--set", "temperature=0.9"))
    assert "holds another what-if" in capsys.readouterr().err

    # both elsewhere: nothing runs again
    moved = tmp_path / "moved"
    for name in ("run", "run_what_if"):
        shutil.copytree(tmp_path / name, moved / name)
    started.clear()
    main(words(moved / "run", "--pairs", "2"))
    assert started == []
    assert "2 of 2 pairs" in capsys.readouterr().out


def test_a_base_branch_is_the_run_to_the_last_bit(run, started, tmp_path, monkeypatch):
    """So the run's own records may stand for it; with other versions they may not."""
    monkeypatch.setattr("lightppo.logging.run_folder.versions", lambda: {"lightppo": "another"})
    main(words(run, "--out", str(tmp_path / "out")))
    assert started == ["base_seed42", "changed_seed42"]
    assert trained_rows(tmp_path / "out" / "base_seed42") == trained_rows(run)[2:4]


def test_a_run_that_ended_at_the_step_has_both_branches_run(run, started, tmp_path, capsys):
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [row for row in rows if json.loads(row)["step"] <= 2]
    (run / "metrics.jsonl").write_text("".join(kept))
    main(words(run, "--out", str(tmp_path / "out"), "--set", "policy_loss=gspo", "temperature=0.7"))
    assert started == ["base_seed42", "changed_seed42"]
    changed = parse_args(["--config", str(tmp_path / "out" / "changed_seed42.yaml")])
    assert changed.loss.policy_loss == "gspo"
    assert changed.rollout.temperature == 0.7
    # another temperature samples other tokens at once
    assert "first token that differs: step 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "step", "steps", "message"),
    [
        ((), 3, 2, "--step 3: {run} has no checkpoint of this step; there are those of 2, 4"),
        ((), 4, 2, "--steps 2: {run} has 5 steps in all, so at most 1 are left after step 4"),
        (("--set", "actor_learnin_rate=1"), 2, 2, "unknown flag --actor_learnin_rate"),
        (("--set", "gamma=2"), 2, 2, "--gamma must be a number"),
        (("--set", "gamma"), 2, 2, "--set gamma: write NAME=VALUE"),
        (("--set", "lora_rank=4"), 2, 2, "--set lora_rank: the checkpoint's weights depend on it"),
        (("--set", "seed=3"), 2, 2, "--set seed: --pairs takes other seeds"),
        (("--set", "save_path=x"), 2, 2, "--set save_path: branches have their own"),
        (("--set", "actor_learning_rate=1e-2"), 2, 2, "had this value: nothing changes"),
        (("--set", "policy_loss=ppo"), 2, 2, "had this value: nothing changes"),
        (("--set", "reward_fn='x"), 2, 2, "no closing quotation: close the quotation mark"),
        (("--set", "gamma=0.9", "gamma=0.8"), 2, 2, "--set gamma=0.8: gamma is given twice"),
        (("--out", "{run}"), 2, 2, "--out {run} is also RUN {run}"),
        (("--out", "{run}/below"), 2, 2, "--out {run}/below is inside RUN {run}"),
        (("--out", "{run}/README.md"), 2, 2, "--out {run}/README.md is inside RUN {run}"),
        (("--out", "{run}.txt"), 2, 2, "--out {run}.txt: {run}.txt is a file, not a folder"),
        (("--picture", "gone/x.png"), 2, 2, "--picture gone/x.png: there is no folder gone"),
        (("--pairs", "0"), 2, 2, "--pairs 0: must be at least 1"),
        (("--width", "score=1"), 2, 2, "--width score=1: give one of reward, KL, length"),
    ],
)
def test_what_cannot_be_asked(run, capsys, more, step, steps, message):
    Path(f"{run}.txt").touch()
    with pytest.raises(SystemExit) as end:
        main(words(run, *(word.format(run=run) for word in more), step=step, steps=steps))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message.format(run=run) in error
    assert len(error.splitlines()) == 1
    assert not Path(f"{run}_what_if").exists()


def test_runs_that_cannot_be_forked(run, tmp_path, capsys):
    shutil.rmtree(run / "checkpoints_ppo")
    (tmp_path / "empty").mkdir()
    for folder, message in ((run, "has no checkpoints: run it with --save_steps"),
                            (tmp_path / "empty", "has no run_config.yaml")):  # fmt: skip
        with pytest.raises(SystemExit):
            main(words(folder))
        assert message in capsys.readouterr().err


def test_a_failed_branch_is_said(run, monkeypatch, capsys):
    monkeypatch.setattr(what_if, "run_members", lambda members, *_: {members[0].name: 1})
    with pytest.raises(SystemExit) as end:
        main(words(run))
    assert end.value.code == 1
    assert "no pair of branches has all steps yet: their logs are in" in capsys.readouterr().err


def test_branches_of_a_file_that_was_edited_are_not_mixed(run, started, tmp_path, capsys):
    """A resume allows every change of the changed options, and finished branches stay: the numbers would be of both."""
    reward = tmp_path / "longer.py"
    reward.write_text(
        "def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n"
    )
    change = ("--set", f"reward_fn={reward}", "--out", str(tmp_path / "out"))
    with pytest.MonkeyPatch.context() as patch:  # one that failed at its start may be mended
        patch.setattr(what_if, "run_members", lambda members, *_: {members[0].name: 1})
        with pytest.raises(SystemExit):
            main(words(run, *change))
    reward.write_text(reward.read_text().replace("1.0", "2.0"))
    main(words(run, *change))
    main(words(run, *change))
    assert started == ["changed_seed42"]
    reward.write_text(reward.read_text().replace("2.0", "3.0"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(words(run, *change, "--pairs", "2"))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"changed_seed42: --reward_fn {reward} was edited since this run began" in error
    assert len(error.splitlines()) == 1
    reward.write_text(reward.read_text().replace("3.0", "2.0"))
    main(words(run, *change, "--pairs", "2"))
    assert started[1:] == ["base_seed43", "changed_seed43"]


def test_another_zero_stage_may_be_what_is_changed(run, started, tmp_path):
    """The checkpoint is reshaped for it."""
    main(words(run, "--set", "zero_stage=1", "packing_samples=true"))
    folder = tmp_path / "run_what_if" / "step2_zero_stage=1,packing_samples=true"
    changed, base = trained_rows(folder / "changed_seed42"), trained_rows(run)[2:4]
    rewards = [[row["rollout/reward"] for row in branch] for branch in (changed, base)]
    assert rewards[0] == rewards[1]
    config = parse_args(["--config", str(folder / "changed_seed42.yaml")])
    assert config.strategy.zero_stage == 1


@pytest.mark.parametrize(
    "change", ["reward_fn=gone.py", "callback=gone.py", "ref_pretrain=gone init_kl_coef=0.1"]
)
def test_a_file_that_is_not_there_is_said_before_any_branch_runs(run, started, capsys, change):
    with pytest.raises(SystemExit) as end:
        main(words(run, "--set", *change.split()))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "error: changed branch: --" in error
    assert "gone" in error
    assert len(error.splitlines()) == 1
    assert started == []
    assert not Path(f"{run}_what_if").exists()


def test_a_second_command_waits_for_its_turn(run, started, tmp_path, capsys):
    """Both would copy the checkpoint to the same place, and run the same branches."""
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as file:
        file.write("process 7 on host")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as end:
            main(words(run, "--out", str(tmp_path / "out")))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "out is in use by process 7 on host: wait for it, or choose another --out\n" in error
    assert len(error.splitlines()) == 1
    assert started == []


def test_a_stopped_branch_goes_on_from_its_own_checkpoint(run, started, tmp_path):
    request = arguments_of(words(run, "--out", str(tmp_path / "out")), "what-if")
    fork = Fork(request)
    branch = fork.branch(0, "changed")
    assert fork.options(branch).checkpoint.resume == str(tmp_path / "out" / "fork")
    main(words(run, "--out", str(tmp_path / "out"), steps=1))
    assert fork.options(branch).checkpoint.resume == "auto"
    main(words(run, "--out", str(tmp_path / "out")))
    assert started == ["changed_seed42"] * 2
    assert [row["step"] for row in trained_rows(branch.run)] == [3, 4]


def test_branches_have_no_evaluations_logs_or_checkpoints_of_the_run(make_config):
    config = make_config(use_tensorboard="tb", save_steps=1, eval_steps=3, logging_steps=2)
    options = branch_options(config)
    kept = {"use_tensorboard": None, "save_steps": -1, "eval_data": None, "logging_steps": 1}
    assert {name: options[name] for name in kept} == kept


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_the_share_of_equal_tokens():
    first = {(0, 0): ["1", "2", "3"], (0, 1): ["4"], (1, 0): ["9"]}
    second = {(0, 0): ["1", "5"], (0, 1): ["4"], (2, 0): ["9"]}
    assert equal_share(first, second) == 2 / 4
    assert equal_share(first, {}) is None


def test_runs_without_samples_have_no_first_token(tmp_path):
    assert first_difference(tmp_path, tmp_path, [1]).startswith("not known")


def rows(reward: Sequence[float], **more: Any) -> dict[int, dict[str, Any]]:
    return {step: {"rollout/reward": value, **more} for step, value in enumerate(reward, start=1)}


def test_differences_of_pairs_by_hand():
    base, changed = [rows([1.0, 2.0]), rows([3.0, 4.0])], [rows([2.0, 3.0]), rows([4.0, 8.0])]
    (reward,) = compared(list(zip(base, changed)), [1, 2])
    assert reward.differences == [1.0, 2.5]
    assert reward.paired_deviation == pytest.approx(1.5 / 2**0.5)
    # means 1.5 and 3.5 of the base, 2.5 and 6 of the changed branch: variances 2 and 6.125
    assert reward.unpaired_deviation == pytest.approx(8.125**0.5)
    assert reward.at_step(1).value == (1.0 + 4.0) / 2
    assert row_of(reward, {})[:4] == ["reward, rollout/reward", "2.5", "4.25", "+1.75"]


def test_a_measure_is_of_the_first_metric_that_all_branches_have():
    pairs = [(rows([1.0], **{"rollout/kl": None, "train/approx_kl": 2.0}),) * 2]
    assert [one.metric for one in compared(pairs, [1])] == ["rollout/reward", "train/approx_kl"]


@pytest.mark.long
def test_branches_are_processes(run):
    argv = [sys.executable, "-m", "lightppo", "what-if", *words(run, "--pairs", "2")]
    # not the ranks of this process
    environment = {name: value for name, value in os.environ.items() if name not in RANK_NAMES}
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=300, cwd=REPO, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "[3/3] changed_seed43: done" in done.stdout
