"""``lightppo sweep``: real runs of a tiny task, in this process; files that are refused; the table by hand."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.runs import trained_rows

from lightppo.experiments import sweep as command
from lightppo.experiments.sweep import main
from lightppo.experiments.sweep_file import read_sweep, score_name, score_of
from lightppo.experiments.sweep_page import rows_of
from lightppo.files import MANIFEST

pytestmark = pytest.mark.usefixtures("world")

SETTINGS = {
    "slow": {"actor_learning_rate": 1e-4},
    "fast": {"actor_learning_rate": 1e-2},
}


@pytest.fixture
def file(assets, tmp_path) -> Path:
    """A sweep of two settings and two seeds, two steps each; common options are in a file beside it."""
    options = {
        "prompt_max_len": 12,
        "generate_max_len": 5,
        "rollout_batch_size": 4,
        "train_batch_size": 4,
        "micro_train_batch_size": 4,
        "advantage_estimator": "reinforce",
        "init_kl_coef": 0.0,
        "zero_stage": 0,
        "num_examine": 0,
    }
    (tmp_path / "common.yaml").write_text(yaml.safe_dump(assets | options))
    return write(tmp_path, {})


def write(folder: Path, changes: dict[str, Any]) -> Path:
    values = {
        "settings": SETTINGS,
        "seeds": [1, 2],
        "config": "common.yaml",
        "options": {"total_training_steps": 2},
        "save_path": str(folder / "out"),
    }
    path = folder / "sweep.yaml"
    kept = {key: value for key, value in (values | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(kept, sort_keys=False))
    return path


def test_a_sweep_and_its_report(file, started, capsys, tmp_path):
    main([str(file), "--picture", str(tmp_path / "curves.png")])
    # a seed of each setting, then the next one
    assert started == ["slow, seed 1", "fast, seed 1", "slow, seed 2", "fast, seed 2"]
    out = capsys.readouterr().out
    assert "4 runs, 0 of them done" in out
    assert "rollout/reward, the mean of the last tenth of each run" in out
    assert "P(better than slow)" in out
    assert out.count("2 of 2") == 2
    assert "<svg" in (tmp_path / "out" / "sweep.html").read_text()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    options = yaml.safe_load((tmp_path / "out" / "fast" / "seed2.yaml").read_text())
    assert (options["actor_learning_rate"], options["seed"]) == (1e-2, 2)

    main([str(file)])
    assert len(started) == 4
    assert "4 runs, 4 of them done" in capsys.readouterr().out
    write(tmp_path, {"seeds": [1, 2, 3], "options": {"total_training_steps": 2}})
    main([str(file)])
    assert started[4:] == ["slow, seed 3", "fast, seed 3"]
    # a folder that was moved, and is named from here
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    write(tmp_path, {"save_path": os.path.relpath(moved)})
    main([str(file), "--report"])
    assert capsys.readouterr().out.count("2 of 2") == 2


def test_runs_of_other_options_are_neither_compared_nor_done(file, started, capsys, tmp_path):
    """Also after their new options were written for Slurm, or the sweep was stopped before it began them."""
    main([str(file)])
    write(tmp_path, {"options": {"total_training_steps": 2, "temperature": 0.5}, "seeds": [1]})
    for _ in range(2):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(file), "--report"])
        assert end.value.code == 1
        main([str(file), "--slurm", str(tmp_path / "job.sh")])
        assert "2 runs: sbatch" in capsys.readouterr().out
    write(tmp_path, {"settings": SETTINGS | {"fast": {"actor_learning_rate": 2e-2}}})
    main([str(file), "--report"])
    out = capsys.readouterr().out
    assert "of other options, not compared: fast, seed 1\n" in out
    assert "fast  0 of 2" in out
    main([str(file)])
    assert started[4:] == ["fast, seed 1", "fast, seed 2"]
    assert "not compared" not in capsys.readouterr().out


def test_results_of_files_that_were_edited_are_not_mixed(file, assets, started, capsys, tmp_path):
    """A file, and a folder that an option names; once they are set back, the sweep goes on."""
    reward = Path(shutil.copy(assets["reward_fn"], tmp_path))
    model = Path(shutil.copytree(assets["pretrain"], tmp_path / "model"))
    options = {"total_training_steps": 2, "reward_fn": str(reward), "pretrain": str(model)}
    write(tmp_path, {"options": options, "seeds": [1]})
    main([str(file)])
    write(tmp_path, {"options": options, "seeds": [1, 2]})
    for named, edited in (
        (f"--reward_fn {reward}", reward),
        (f"--pretrain {model}", model / "tokenizer_config.json"),
    ):
        text = edited.read_text()
        edited.write_text(f"{text}\n")
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(file)])
        edited.write_text(text)
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert f"error: slow, seed 1: {named} was edited since this run began: set it back" in error
        assert len(error.splitlines()) == 1
    assert started == ["slow, seed 1", "fast, seed 1"]
    main([str(file)])
    assert started[2:] == ["slow, seed 2", "fast, seed 2"]


def test_a_stopped_run_does_not_go_on_with_a_file_that_was_edited(file, assets, capsys, started):
    rows = Path(shutil.copy(assets["prompt_data"], file.parent))
    options = {"total_training_steps": 2, "prompt_data": str(rows), "save_steps": 1}
    write(file.parent, {"options": options, "seeds": [1], "settings": {"a": {}}})
    main([str(file)])
    (file.parent / "out" / "a" / "seed1" / MANIFEST).unlink()  # as if it had not ended
    rows.write_text(f"{rows.read_text()}\n")
    with pytest.raises(SystemExit) as end:
        main([str(file)])
    assert end.value.code == 2
    assert f"a, seed 1: --prompt_data {rows} was edited since" in capsys.readouterr().err
    assert started == ["a, seed 1"]


def test_a_file_that_is_edited_while_the_runs_go_on(file, assets, started, capsys, monkeypatch):
    rows = Path(shutil.copy(assets["prompt_data"], file.parent))
    write(file.parent, {"options": {"total_training_steps": 2, "prompt_data": str(rows)}})
    run_here = command.run_members

    def edited_in_between(members: Any, *places: Any) -> dict[str, int]:
        codes = run_here(members[:3], *places)
        rows.write_text(f"{rows.read_text()}\n")
        return codes | run_here(members[3:], *places)

    monkeypatch.setattr(command, "run_members", edited_in_between)
    with pytest.raises(SystemExit) as end:
        main([str(file)])
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert f"--prompt_data {rows} was edited between slow, seed 1 and fast, seed 2: remove" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "option", ["reward_fn", "prompt_data", "pretrain", "callback", "tape_from"]
)
def test_a_file_that_is_not_there_is_said_before_anything_runs(file, started, capsys, option):
    settings = SETTINGS | {"fast": {option: "gone.py"}}
    write(file.parent, {"settings": settings, "options": {"total_training_steps": 2}})
    with pytest.raises(SystemExit) as end:
        main([str(file)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"error: {file}: settings: fast: --{option}" in error
    assert "gone.py" in error
    assert len(error.splitlines()) == 1
    assert started == []


def test_a_second_sweep_waits_for_its_turn(file, started, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as end:
            main([str(file)])
        assert end.value.code == 2
        main([str(file), "--slurm", str(tmp_path / "job.sh")])  # which runs nothing
    error = capsys.readouterr().err
    assert "out is in use by another process: wait for it, or choose another save_path" in error
    assert started == []


@pytest.mark.parametrize("flag", ["--picture", "--slurm"])
def test_a_file_that_could_not_be_written_is_said_before_anything_runs(
    file, capsys, tmp_path, flag
):
    for path, message in (("gone/x", "there is no folder"), ("", "is a folder")):
        with pytest.raises(SystemExit) as end:
            main([str(file), flag, str(tmp_path / path)])
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_a_failed_member_is_named_and_the_others_are_compared(file, started, capsys, monkeypatch):
    run_here = command.run_members

    def run_all_but_one(members: Any, *places: Any) -> dict[str, int]:
        failed, *others = members
        failed.log.touch()
        return run_here(others, *places) | {failed.name: 1}

    monkeypatch.setattr(command, "run_members", run_all_but_one)
    with pytest.raises(SystemExit) as end:
        main([str(file)])
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert "not there: slow, seed 1 (its log: " in out
    assert "1 of 2" in out
    main([str(file), "--report"])
    assert "not there: slow, seed 1" in capsys.readouterr().out
    assert len(started) == 3


def test_without_a_finished_run_there_is_no_report(file, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(file), "--report"])
    assert end.value.code == 1
    assert "no run of these options has ended: see the logs there" in capsys.readouterr().err


def test_a_score_that_no_run_has(file, started, capsys):
    write(file.parent, {"seeds": [1], "score": "rollout/rewrd"})
    with pytest.raises(SystemExit) as end:
        main([str(file)])
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert "no run has the metric rollout/rewrd (did you mean 'rollout/reward'?): name one" in error
    assert len(error.splitlines()) == 1


def test_runs_of_other_options_are_repeated_also_if_they_have_checkpoints(file, started, capsys):
    """Which would be refused on resume; they are kept apart."""
    for rate in (1e-3, 2e-3):
        settings = {"a": {"actor_learning_rate": rate, "save_steps": 1}}
        write(file.parent, {"settings": settings, "seeds": [1]})
        main([str(file)])
    assert started == ["a, seed 1"] * 2
    run = file.parent / "out" / "a" / "seed1"
    assert [row["step"] for row in trained_rows(run)] == [1, 2]
    assert yaml.safe_load((run / "run_config.yaml").read_text())["actor_learning_rate"] == 2e-3
    assert {path.name for path in run.glob("checkpoints*")} == {
        "checkpoints_ppo",
        "checkpoints_ppo.1",
    }


def test_a_slurm_array_has_a_task_for_each_run(file, capsys, tmp_path):
    """Run as Slurm would run the third task, with a stand-in for Python."""
    script = tmp_path / "job.sh"
    main([str(file), "--slurm", str(script), "--jobs", "3"])
    text = script.read_text()
    assert "#SBATCH --array=0-3%3\n" in text
    assert f"4 runs: sbatch {script}" in capsys.readouterr().out
    text = text.replace(sys.executable, "echo")
    script.write_text(text)
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": "2"}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert done.stdout == f"-m lightppo ppo --config {tmp_path}/out/slow/seed2.yaml\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [1]}, "unknown key 'sedes' (did you mean 'seeds'?)"),
        ({"seeds": None}, "the key 'seeds' is missing"),
        ({"seeds": [1, 1]}, "seeds: must be a list of different whole numbers from 0, not [1, 1]"),
        ({"seeds": [-1]}, "seeds: must be a list of different whole numbers from 0, not [-1]"),
        ({"seeds": 3}, "seeds: must be a list of different whole numbers from 0, not 3"),
        ({"settings": ["a"]}, "settings: must be a mapping"),
        ({"settings": {"a": {"gama": 1}}}, "settings: a: unknown option 'gama'"),
        ({"settings": {"a": {"gamma": 2}}}, "settings: a: --gamma must be"),
        ({"settings": {"a": {"seed": 2}}}, "settings: a: seed is the sweep's own"),
        ({"settings": {"a/b": {}}}, "settings: 'a/b' cannot be the name of a folder"),
        ({"settings": {"a" * 256: {}}}, "cannot be the name of a folder"),
        ({"settings": {"a": 0}}, "settings: a: must be a mapping of options to values"),
        ({"options": False}, "options: must be a mapping of options to values"),
        ({"options": {3: 1}}, "options: unknown option '3'"),
        ({"save_path": 5}, "save_path: must be text, not 5"),
        ({"save_path": "s3://bucket/x"}, "save_path: s3://bucket/x is a URL"),
        ({"score": ["a"]}, "score: must be text, not ['a']"),
        ({"config": ["a"]}, "config: must be text, not ['a']"),
        ({"options": {"save_path": "x"}}, "options: save_path is the sweep's own"),
        ({"options": {"lambd": 0.5}}, "settings: slow: --lambd needs"),
        ({"config": "gone.yaml"}, "gone.yaml: cannot be read"),
        ({"ranks": 0}, "ranks: must be a whole number of at least 1, not 0"),
    ],
)
def test_files_that_are_refused(file, tmp_path, capsys, changes, message):
    write(tmp_path, changes)
    with pytest.raises(SystemExit) as end:
        main([str(file)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"{file}: " in error
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_sweep(tmp_path, capsys):
    for text, message in (("a: [", "is not YAML"), ("- 1", "must be a mapping with the keys")):
        (tmp_path / "sweep.yaml").write_text(text)
        with pytest.raises(SystemExit):
            main([str(tmp_path / "sweep.yaml")])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("twice", ["seeds: [3]", "settings: {1: {}, '1': {}}"])
def test_a_key_that_is_given_twice(file, capsys, twice):
    """YAML keeps the last one: the others would not run."""
    text = file.read_text()
    if twice.startswith("settings"):
        text = "\n".join(line for line in text.splitlines() if line.startswith(("config", "save")))
        text += "\nseeds: [1]"
    file.write_text(f"{text}\n{twice}\n")
    with pytest.raises(SystemExit) as end:
        main([str(file)])
    assert end.value.code == 2
    assert "is given twice" in capsys.readouterr().err


def test_a_home_folder_is_the_one_of_the_runs(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sweep = read_sweep(write(tmp_path, {"save_path": "~/below"}))
    assert sweep.save_path == tmp_path / "below"
    assert sweep.members("slow")[0].folder == tmp_path / "below" / "slow" / "seed1"


def test_the_score_is_that_of_evaluations_if_there_are_any(file, tmp_path):
    assert score_name(read_sweep(file)) == "rollout/reward"
    rows = str(tmp_path / "rows.jsonl")
    file = write(tmp_path, {"options": {"eval_data": rows}})
    assert score_name(read_sweep(file)) == "eval/reward"
    assert score_name(read_sweep(write(tmp_path, {"score": "x"}))) == "x"


def test_the_score_of_a_run_is_the_mean_of_its_last_tenth():
    assert score_of({step: float(step) for step in range(1, 21)}) == 19.5
    assert score_of({1: 2.0, 2: 4.0}) == 4.0


def test_the_table_by_hand():
    rows = rows_of({"a": [1.0, 1.0, 1.0, 1.0], "b": [2.0, 2.0, 0.0, 2.0], "c": [3.0], "d": []}, 4)
    assert rows[0] == ["a", "4 of 4", "1", "1 to 1", "-", "-"]
    # the middle half of 0, 2, 2, 2; three of four are better than every run of a
    assert rows[1][:3] == ["b", "4 of 4", "2"]
    assert rows[1][4] == "0.75"
    assert rows[2] == ["c", "1 of 4", "3", "-", "-", "-"]
    assert rows[3] == ["d", "0 of 4", "-", "-", "-", "-"]
