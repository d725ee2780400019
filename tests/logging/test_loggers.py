"""Sinks of metrics: JSONL rows over new and resumed runs, TensorBoard, Weights & Biases offline, trackio, MLflow."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.http_server import JsonServer, ok
from support.loops import IdleLoop
from support.tiny import read_jsonl

from lightppo.config import LoggingConfig, PPOConfig
from lightppo.errors import ConfigError
from lightppo.logging.recorder import JsonlSink, open_sinks
from lightppo.logging.trackers import (
    MlflowSink,
    WandbSink,
    check_trackers,
    mlflow_name,
    open_trackers,
)


def rows(path: Path) -> list[dict]:
    return read_jsonl(path)


def write(path: Path, steps: range | list[int], start_step: int = 0, tag: float = 0.0) -> None:
    sink = JsonlSink(path, start_step)
    for step in steps:
        sink.log(step, {"run": tag})
    sink.close()


def test_one_row_per_call_with_step_and_time(tmp_path):
    sink = JsonlSink(tmp_path / "new" / "folder" / "metrics.jsonl")
    sink.log(1, {"rollout/reward": 0.5, "rollout/samples": 8})
    sink.log(1, {"eval/accuracy": 1.0})
    # readable before the file is closed
    found = rows(tmp_path / "new" / "folder" / "metrics.jsonl")
    assert [row.pop("time") > 1.6e9 for row in found] == [True, True]
    assert found == [
        {"step": 1, "rollout/reward": 0.5, "rollout/samples": 8},
        {"step": 1, "eval/accuracy": 1.0},
    ]
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
        # the last one lacks its end of line
        file.write('{"step": 2, "ti\n' + '{"step": 2, "run": 7}')
    write(path, [3], start_step=2)
    assert [(row["step"], row["run"]) for row in rows(path)] == [(1, 0), (2, 7), (3, 0)]


def test_a_file_that_was_removed_is_made_again(tmp_path, caplog):
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.log(1, {"run": 0.0})
    shutil.rmtree(tmp_path / "run")
    for step in (2, 3):
        sink.log(step, {"run": 0.0})
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [2, 3]
    assert (
        caplog.text.count("metrics.jsonl was removed: it is made again, without its earlier rows")
        == 1
    )


def test_a_resumed_run_drops_the_rows_of_steps_that_are_done_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [0, 1, 2, 2, 3, 4])
    write(path, [3, 4, 5], start_step=2, tag=1.0)
    assert [(row["step"], row["run"]) for row in rows(path)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 0),
        (3, 1),
        (4, 1),
        (5, 1),
    ]
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
    """All sinks of a run; ``options`` are of the logging section, but for ``start_step`` and ``run_ids``."""

    def __init__(self, folder: Path, **options) -> None:
        own = {name: options.pop(name) for name in ("start_step", "run_ids") if name in options}
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
    assert [(row["step"], row["a"]) for row in rows(tmp_path / "run" / "metrics.jsonl")] == [
        (3, 1.0)
    ]


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: sorted((e.step, e.value) for e in accumulator.Scalars(tag))
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_what_was_logged(tmp_path):
    sinks = Sinks(tmp_path / "my_run", use_tensorboard=str(tmp_path / "tb"))
    sinks.log(1, {"train/kl": 0.5, "eval/accuracy": 0.25})
    sinks.log(2, {"train/kl": 1.5})
    sinks.close()
    expected = {"train/kl": [(1, 0.5), (2, 1.5)], "eval/accuracy": [(1, 0.25)]}
    # the name of the run is that of its folder
    assert points(tmp_path / "tb" / "my_run") == expected
    assert len(rows(tmp_path / "my_run" / "metrics.jsonl")) == 2  # both at once


def test_tensorboard_has_every_step_of_a_run_that_dies(tmp_path):
    sinks = Sinks(tmp_path / "my_run", use_tensorboard=str(tmp_path / "tb"))
    sinks.log(1, {"train/loss": 2.0})
    # before anything is closed
    assert points(tmp_path / "tb" / "my_run")["train/loss"] == [(1, 2.0)]
    sinks.close()


def test_tensorboard_drops_points_of_steps_done_again(tmp_path):
    options = {"use_tensorboard": str(tmp_path / "tb"), "wandb_run_name": "named"}
    for start, steps, value in ((0, (1, 2, 3, 4), 0.0), (2, (3, 4), 1.0)):
        sinks = Sinks(tmp_path / "x", start_step=start, **options)
        for step in steps:
            sinks.log(step, {"train/kl": value})
        sinks.close()
    assert points(tmp_path / "tb" / "named") == {
        "train/kl": [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]
    }


@pytest.mark.parametrize(
    ("package", "value"), [("wandb", True), ("trackio", "mine"), ("mlflow", "runs")]
)
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, package, value):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"--use_{package}.*lightppo\[{package}\]"):
        Sinks(tmp_path, **{f"use_{package}": value})
    assert not (tmp_path / "metrics.jsonl").exists()


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
    sinks = Sinks(
        tmp_path / "my_run", use_wandb=True, wandb_project="project-x", wandb_group="group-y"
    )
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

    resumed = Sinks(tmp_path / "my_run", use_wandb=True, start_step=2, run_ids={"wandb": run.id})
    assert resumed.sinks[0].run.id == run.id
    resumed.close()


class FakeRun:
    """What the sink calls, and with what."""

    id = "abc"

    def __init__(self) -> None:
        self.axes, self.rows = {}, []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict) -> None:
        self.rows.append(row)


@pytest.mark.parametrize(
    ("names", "axes", "row"),
    [
        ("lightppo", {"rollout/*": "global_step"}, {"rollout/reward": 1.0}),
        (
            "verl",
            {"critic/*": "global_step", "timing_s/*": "global_step"},
            {"training/global_step": 3.0},
        ),
        (
            "openrlhf",
            {
                "rollout/*": "rollout/global_step",
                "train/*": "train/global_step",
                "rollout/global_step": None,
            },
            {"rollout/global_step": 3.0},
        ),
        (
            "lightrft",
            {
                "rollout/*": "rollout/global_step",
                "train/*": "train/global_step",
                "eval/*": "global_step",
            },
            {"rollout/global_step": 3.0},
        ),
    ],
)
def test_wandbs_axes_are_those_of_the_other_trainer(monkeypatch, names, axes, row):
    run = FakeRun()
    monkeypatch.setattr(
        "lightppo.logging.trackers._package",
        lambda name: SimpleNamespace(init=lambda **_: run),
    )
    sink = WandbSink(LoggingConfig(use_wandb=True, metric_names=names), "run", {}, None)
    sink.log(3, {"rollout/reward": 1.0})
    assert axes.items() <= run.axes.items()
    assert run.rows == [{"global_step": 3, "rollout/reward": 1.0} | row]


def test_trackers_have_the_names_of_another_trainer_and_the_file_has_ours(tmp_path):
    options = {
        "use_tensorboard": str(tmp_path / "tb"),
        "wandb_run_name": "x",
        "metric_names": "verl",
    }
    config = PPOConfig.from_flat(save_path=str(tmp_path / "run"), **options)
    loop = IdleLoop(config)
    loop.step({"reward": 0.5, "my_own": 2.0})
    loop.end()
    (row,) = rows(tmp_path / "run" / "metrics.jsonl")
    assert (row["rollout/reward"], row["train/my_own"]) == (0.5, 2.0)
    assert "critic/score/mean" not in row
    found = points(tmp_path / "tb" / "x")
    assert {"critic/score/mean": [(1, 0.5)], "train/my_own": [(1, 2.0)]}.items() <= found.items()
    assert "rollout/reward" not in found


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    module = pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for place in (utils, sqlite_storage):  # which read the variable when they are imported
        monkeypatch.setattr(place, "TRACKIO_DIR", tmp_path / "trackio")
    return module


@pytest.fixture
def mlflow(monkeypatch):
    for name in (
        "MLFLOW_ALLOW_FILE_STORE",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
        "MLFLOW_HTTP_REQUEST_TIMEOUT",
    ):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "x")  # what the sink sets is removed again
        monkeypatch.delenv(name)
    return pytest.importorskip("mlflow")


def trackio_points(project: str, name: str, metric: str) -> list[tuple[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(project, name)
    return sorted((row["step"], row[metric]) for row in rows if metric in row)


def mlflow_points(client, run_id: str, metric: str) -> list[tuple[int, float]]:
    found = client.get_metric_history(run_id, metric)
    return sorted((point.step, point.value) for point in found)


def test_several_trackers_at_once_and_each_goes_on_after_a_resume(
    tmp_path, monkeypatch, trackio, mlflow
):
    """With real files of the three; a run that another one of the same name has overtaken keeps its own."""
    options = {
        "use_tensorboard": str(tmp_path / "tb"),
        "use_trackio": "maths",
        "use_mlflow": str(tmp_path / "mlruns"),
    }
    options |= {"wandb_group": "sweep"}
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "maths")
    ids: dict[str, str] = {}
    for start, value in ((0, 0.5), (2, 0.25)):
        sinks = Sinks(tmp_path / "my_run", start_step=start, run_ids=ids, **options)
        ids = {sink.name: sink.run_id for sink in sinks.sinks if hasattr(sink, "run_id")}
        for step in (start + 1, start + 2):
            sinks.log(step, {"train/loss": value, "eval/pass@4": 1.0})
        sinks.close()
        # between the two
        other = Sinks(tmp_path / "elsewhere" / "my_run", **options | {"use_tensorboard": None})
        other.log(9, {"train/loss": 9.0})
        other.close()
    expected = [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25)]
    assert points(tmp_path / "tb" / "my_run")["train/loss"] == expected
    assert sorted(ids) == ["mlflow", "trackio"]
    assert trackio_points("maths", ids["trackio"], "train/loss") == expected
    client = mlflow.MlflowClient(str(tmp_path / "mlruns"))
    assert mlflow_points(client, ids["mlflow"], "train/loss") == expected
    assert mlflow_points(client, ids["mlflow"], "eval/pass_4") == [
        (step, 1.0) for step in (1, 2, 3, 4)
    ]
    run = client.get_run(ids["mlflow"])
    assert (run.info.run_name, run.info.status, run.data.params["seed"]) == (
        "my_run",
        "FINISHED",
        "42",
    )
    assert run.data.tags["group"] == "sweep"
    (found,) = [run for run in trackio.Api().runs("maths") if run.name == ids["trackio"]]
    assert (found.config["seed"], found.config["_Group"]) == (42, "sweep")
    assert len(rows(tmp_path / "my_run" / "metrics.jsonl")) == 4


def test_a_name_of_ones_own_is_the_name_everywhere(tmp_path, trackio, mlflow):
    options = {
        "wandb_run_name": "mine",
        "use_trackio": "names",
        "use_mlflow": str(tmp_path / "mlruns"),
    }
    sinks = Sinks(tmp_path / "run", **options)
    kept = {sink.name: sink for sink in sinks.sinks if hasattr(sink, "run_id")}
    assert kept["trackio"].run.name == "mine"
    assert kept["mlflow"].client.get_run(kept["mlflow"].run_id).info.run_name == "mine"
    sinks.close()


def test_what_mlflow_does_not_take_waits_and_is_not_sent_again_at_once(
    tmp_path, mlflow, caplog, monkeypatch
):
    sinks = Sinks(tmp_path / "run", use_mlflow=str(tmp_path / "mlruns"))
    sink, calls = sinks.sinks[0], []
    taken = sink.client.log_batch

    def refuse(*args, **more):
        calls.append(args)
        raise mlflow.MlflowException("the server is away")

    monkeypatch.setattr(sink.client, "log_batch", refuse)
    sinks.log(1, {"train/loss": 0.5})
    assert (
        "step 1: MLflow did not take the metrics, which wait; next try in 60 s: the server is away"
        in caplog.text
    )
    sinks.log(2, {"train/loss": 0.25})
    assert len(calls) == 1
    monkeypatch.setattr(sink.client, "log_batch", taken)
    monkeypatch.setattr("time.monotonic", lambda now=time.monotonic: now() + 61)
    sinks.log(3, {"train/loss": 0.125})
    assert mlflow_points(sink.client, sink.run_id, "train/loss") == [
        (1, 0.5),
        (2, 0.25),
        (3, 0.125),
    ]
    monkeypatch.setattr(sink.client, "log_batch", refuse)
    sinks.log(4, {"train/loss": 0.0})
    sinks.close()  # tries once more
    assert len(calls) == 3
    assert "MLflow did not take 1 numbers; metrics.jsonl has them" in caplog.text
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("eval/pass@4", "eval/pass_4"),
        ("reward/[x]", "reward/_x_"),
        ("reward/a//b", "reward/a/_/b"),
        ("/reward/", "_/reward/_"),
        ("reward/../x", "reward/_./x"),
        ("reward/.", "reward/_"),
        ("reward/a.b", "reward/a.b"),
        ("", "_"),
        ("ä" * 250, "ä" * 250),
        ("ä" * 251, "ä" * 241 + "_e2667593"),
    ],
)
def test_names_as_mlflow_can_hold_them(mlflow, metric, name):
    from mlflow.utils.validation import _validate_metric

    assert mlflow_name(metric) == name
    _validate_metric(name, 1.0, 0, 0)


def test_a_metric_that_mlflow_cannot_hold_does_not_keep_the_others_out(tmp_path, mlflow, caplog):
    sinks = Sinks(tmp_path / "run", use_mlflow=str(tmp_path / "mlruns"))
    sink = next(one for one in sinks.sinks if isinstance(one, MlflowSink))
    # A folder of MLflow's own kind keeps reward/a as a file, and so has no reward/a/b.
    for step in (1, 2):
        sink.log(step, {"reward/a": 1.0 * step, "reward/a/b": 5.0, "train/loss": 2.0 * step})
    sink.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "MLflow cannot hold the metric reward/a/b, metrics.jsonl has it: " in told[0]
    points = mlflow_points(sink.client, sink.run_id, "train/loss")
    assert points == [(1, 2.0), (2, 4.0)]


def test_mlflow_over_http_until_the_server_takes_nothing(mlflow, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    experiment = {"experiment": {"experiment_id": "7", "name": "mine", "lifecycle_stage": "active"}}
    run = {
        "run": {
            "info": {"run_id": "r1", "run_uuid": "r1", "experiment_id": "7", "status": "RUNNING"},
            "data": {},
        }
    }
    server = JsonServer()
    server.reply = lambda path, body, n: ok(
        **(experiment if "experiments" in path else run if "runs/create" in path else {})
    )
    config = LoggingConfig(use_mlflow=server.url)
    check_trackers(config)
    (sink,) = open_trackers(config, "one", {"seed": 1}, 0, {})
    sink.log(1, {"train/loss": 0.5, "eval/pass@4": 1.0})
    params, metrics = [body for path, body in server.requests if "log-batch" in path]
    assert params["params"] == [{"key": "seed", "value": "1"}]
    assert {m["key"]: (m["value"], m["step"]) for m in metrics["metrics"]} == {
        "train/loss": (0.5, 1), "eval/pass_4": (1.0, 1),
    }  # fmt: skip
    assert mlflow.environment_variables.MLFLOW_HTTP_REQUEST_TIMEOUT.get() == 10
    server.reply = lambda path, body, n: (503, b"{}")
    sink.log(2, {"train/loss": 0.25})
    server.close()
    assert "step 2: MLflow did not take the metrics, which wait; next try in 60 s" in caplog.text


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "sqlite:///mlflow.db"])
def test_an_mlflow_store_that_is_not_there_is_told_at_the_start(mlflow, uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=rf"--use_mlflow {uri}: .*a database needs a server"):
        check_trackers(LoggingConfig(use_mlflow=uri))


def test_a_login_in_the_address_of_mlflow_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as error:
        PPOConfig.from_flat(use_mlflow="https://me:SECRET@host").validate()
    assert "SECRET" not in str(error.value)
