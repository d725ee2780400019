"""Sinks of metrics: JSONL rows over new and resumed runs, TensorBoard events, Weights & Biases offline."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest

from lightppo.config import LoggingConfig
from lightppo.trainer.recorder import JsonlSink, open_sinks


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, steps: range | list[int], start_step: int = 0, tag: float = 0.0) -> None:
    sink = JsonlSink(path, start_step)
    for step in steps:
        sink.log(step, {"run": tag})
    sink.close()


def test_one_row_per_call_with_step_and_time(tmp_path):
    sink = JsonlSink(tmp_path / "new" / "folder" / "metrics.jsonl")
    sink.log(1, {"rollout/reward": 0.5, "rollout/samples": 8})
    sink.log(1, {"eval/accuracy": 1.0})
    found = rows(tmp_path / "new" / "folder" / "metrics.jsonl")  # readable before the file is closed
    assert [row.pop("time") > 1.6e9 for row in found] == [True, True]
    assert found == [{"step": 1, "rollout/reward": 0.5, "rollout/samples": 8}, {"step": 1, "eval/accuracy": 1.0}]
    sink.close()


def test_numbers_that_are_not_finite_become_null(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(1, {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "zero": 0.0})
    sink.close()
    text = (tmp_path / "m.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (row["nan"], row["inf"], row["minus"], row["zero"]) == (None, None, None, 0.0)


def test_a_new_run_puts_the_files_of_older_ones_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for run in range(3):
        write(path, [1, 2], tag=float(run))
    assert [row["run"] for row in rows(path)] == [2, 2]
    assert [row["run"] for row in rows(tmp_path / "metrics.1.jsonl")] == [0, 0]
    assert [row["run"] for row in rows(tmp_path / "metrics.2.jsonl")] == [1, 1]


def test_a_resume_cuts_in_place_and_loses_no_row_of_who_still_writes(tmp_path):
    """Not a new file under the name: rows of a process that has the old one open would be lost."""
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in (1, 2, 3):
        first.log(step, {"run": 0.0})
    write(path, [3], start_step=2, tag=1.0)
    first.log(4, {"run": 0.0})
    first.close()
    assert [(row["step"], row["run"]) for row in rows(path)] == [(1, 0), (2, 0), (3, 1), (4, 0)]


@pytest.mark.parametrize("torn", ['{"step": 2, "ti', '{"st', "\x00\x00\x00", "3", "{}"])
def test_a_row_that_a_crash_tore_is_cut_off(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    with path.open("a") as file:
        file.write(torn)
    write(path, [3], start_step=2)
    assert [row["step"] for row in rows(path)] == [1, 2, 3]


def test_a_torn_row_in_the_middle_takes_no_other_with_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1])
    with path.open("a") as file:
        file.write('{"step": 2, "ti\n' + '{"step": 2, "run": 7}')  # the last one lacks its end of line
    write(path, [3], start_step=2)
    assert [(row["step"], row["run"]) for row in rows(path)] == [(1, 0), (2, 7), (3, 0)]


def test_a_file_that_was_removed_is_made_again(tmp_path, caplog):
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.log(1, {"run": 0.0})
    shutil.rmtree(tmp_path / "run")
    for step in (2, 3):
        sink.log(step, {"run": 0.0})
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [2, 3]
    assert caplog.text.count("metrics.jsonl was removed: it is made again, without its earlier rows") == 1


def test_a_resumed_run_drops_the_rows_of_steps_that_are_done_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [0, 1, 2, 2, 3, 4])
    write(path, [3, 4, 5], start_step=2, tag=1.0)
    assert [(row["step"], row["run"]) for row in rows(path)] == [(0, 0), (1, 0), (2, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", ['{"step": 2, "time": 17', '{"step": 2', "{", "\n", ""])
def test_a_row_that_a_crash_cut_off_is_dropped(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    path.write_text(path.read_text() + cut)
    write(path, [3], start_step=2, tag=1.0)
    assert [(row["step"], row["run"]) for row in rows(path)] == [(1, 0), (2, 0), (3, 1)]


def test_a_resumed_run_whose_file_is_gone_starts_one(tmp_path):
    write(tmp_path / "metrics.jsonl", [6], start_step=5)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [6]


class Sinks:
    """All sinks of a run; ``options`` are of the logging section, but for ``start_step`` and ``run_id``."""

    def __init__(self, folder: Path, **options) -> None:
        own = {name: options.pop(name) for name in ("start_step", "run_id") if name in options}
        self.sinks = open_sinks(LoggingConfig(**options), folder, {"seed": 42}, **own)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for sink in self.sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def test_jsonl_is_always_written(tmp_path):
    sinks = Sinks(tmp_path / "run")
    sinks.log(3, {"a": 1.0})
    sinks.close()
    assert [(row["step"], row["a"]) for row in rows(tmp_path / "run" / "metrics.jsonl")] == [(3, 1.0)]


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_reads_what_was_logged(tmp_path):
    sinks = Sinks(tmp_path / "my_run", use_tensorboard=str(tmp_path / "tb"))
    sinks.log(1, {"train/kl": 0.5, "eval/accuracy": 0.25})
    sinks.log(2, {"train/kl": 1.5})
    sinks.close()
    expected = {"train/kl": [(1, 0.5), (2, 1.5)], "eval/accuracy": [(1, 0.25)]}
    assert points(tmp_path / "tb" / "my_run") == expected  # the name of the run is that of its folder
    assert len(rows(tmp_path / "my_run" / "metrics.jsonl")) == 2  # both at once


def test_tensorboard_has_every_step_of_a_run_that_dies(tmp_path):
    sinks = Sinks(tmp_path / "my_run", use_tensorboard=str(tmp_path / "tb"))
    sinks.log(1, {"train/loss": 2.0})
    assert points(tmp_path / "tb" / "my_run")["train/loss"] == [(1, 2.0)]  # before anything is closed
    sinks.close()


def test_tensorboard_drops_points_of_steps_done_again(tmp_path):
    options = {"use_tensorboard": str(tmp_path / "tb"), "wandb_run_name": "named"}
    for start, steps, value in ((0, (1, 2, 3, 4), 0.0), (2, (3, 4), 1.0)):
        sinks = Sinks(tmp_path / "x", start_step=start, **options)
        for step in steps:
            sinks.log(step, {"train/kl": value})
        sinks.close()
    assert points(tmp_path / "tb" / "named") == {"train/kl": [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]}


def test_missing_wandb_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"--use_wandb.*lightppo\[wandb\]"):
        Sinks(tmp_path, use_wandb=True)


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    module = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    (tmp_path / "wandb").mkdir()
    yield module
    module.teardown()


def test_wandb_offline_records_the_run_and_goes_on_with_it(tmp_path, wandb):
    sinks = Sinks(tmp_path / "my_run", use_wandb=True, wandb_project="project-x", wandb_group="group-y")
    sinks.log(1, {"train/policy_loss": 0.5})
    sinks.log(2, {"train/policy_loss": 0.25, "eval/accuracy": 1.0})
    run = sinks.sinks[0].run
    assert run.id
    assert run.name == "my_run"
    assert run.config["seed"] == 42
    sinks.close()
    wandb.teardown()  # its service writes the file to the end
    (recorded,) = (tmp_path / "wandb").rglob("*.wandb")
    content = recorded.read_bytes()
    expected = (run.id, "project-x", "group-y", "train/policy_loss", "eval/accuracy", "global_step")
    assert [text for text in expected if text.encode() not in content] == []

    resumed = Sinks(tmp_path / "my_run", use_wandb=True, start_step=2, run_id=run.id)
    assert resumed.sinks[0].run.id == run.id
    resumed.close()
