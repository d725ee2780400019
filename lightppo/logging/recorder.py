"""What a run writes while it goes on: its start, rows of metrics.jsonl, points of trackers."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightppo.callbacks import Callback
from lightppo.config.options import LoggingConfig, OptionSet, public_options
from lightppo.files import explained, is_at, local_folder
from lightppo.logging.metrics_page import renamed
from lightppo.logging.run_folder import (
    RunFileSums,
    cut_samples,
    held_locks,
    lock_again,
    locks_of,
    record_start,
    release,
    run_name,
    save_run_config,
    set_aside,
    set_run_files_aside,
    upload_run_files,
)
from lightppo.logging.trackers import TensorBoardSink, Tracker, WandbSink, open_trackers

logger = logging.getLogger(__name__)

_NAMED_FILES = 5  # files that are named in one line


# -- where metrics go ------------------------------------------------------------------------------------------------


class JsonlSink:
    """One JSON object per line: step, time (Unix seconds) and the metrics. NaN becomes null.

    A new run (``start_step`` 0) puts an older file aside; a resumed one keeps the rows up to ``start_step`` and cuts
    off those of steps that will be done again. A file that vanishes is made again.
    """

    def __init__(self, metrics_path: Path, start_step: int = 0) -> None:
        metrics_path.parent.mkdir(parents=True, exist_ok=True)
        if start_step == 0:
            set_aside(metrics_path)
        elif metrics_path.exists():
            _cut(metrics_path, start_step)
        self.path = metrics_path
        self.file = metrics_path.open("a", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {
            metric: number if math.isfinite(number) else None for metric, number in metrics.items()
        }
        with explained(self.path):
            if not is_at(self.path, self.file):
                self._make_again()
            self.file.write(json.dumps({"step": step, "time": time.time(), **numbers}) + "\n")

    def _make_again(self) -> None:
        logger.warning("%s was removed: it is made again, without its earlier rows", self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a", buffering=1)

    def sync(self) -> None:
        """Put all rows on disk: a checkpoint will say that their steps are done."""
        with explained(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def _cut(metrics_path: Path, last_step: int) -> None:
    """Keep the rows up to ``last_step``, in place: what another process has open stays the file."""
    with metrics_path.open("r+b") as file:
        remaining_rows = [
            json_row.rstrip(b"\n") + b"\n" for json_row in file if _step_of(json_row) <= last_step
        ]
        file.seek(0)
        file.writelines(remaining_rows)
        file.truncate()


def _step_of(json_row: bytes) -> float:
    """Return the step of a row; infinity for a row that a crash tore, or that was altered."""
    try:
        step = json.loads(json_row)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf
    return step if isinstance(step, int | float) else math.inf


Sink = JsonlSink | Tracker


def open_sinks(
    config: LoggingConfig,
    folder: str | Path,
    options: Mapping[str, Any],
    start_step: int = 0,
    run_ids: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> list[Sink]:
    """Open all sinks of a run: metrics.jsonl in its folder, and what the options name."""
    trackers = open_trackers(config, run_name(config, folder), options, start_step, run_ids or {})
    # Last: it puts the file of an older run aside, which a missing package above should not.
    return [*trackers, JsonlSink(path or local_folder(folder) / "metrics.jsonl", start_step)]


def metrics_file(config: OptionSet) -> Path:
    """Return where the rows of a run are: ``metrics.jsonl`` in its folder, or ``--log_file``, which PPO has not."""
    log_file = config.flat().get("log_file")
    if log_file is None:
        return local_folder(config.checkpoint.save_path) / "metrics.jsonl"
    return Path(log_file)


# -- the callback ------------------------------------------------------------------------------------------------------


class Trackers:
    """The runs to go on with, by tracker, as a checkpoint keeps them."""

    def __init__(self) -> None:
        self.run_ids: dict[str, str] = {}

    def state_dict(self) -> dict[str, str]:
        return dict(self.run_ids)

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        self.run_ids = dict(state)


class Recorder(Callback):
    """Writes what a run did into its folder and into trackers. Rank 0 writes."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.trackers = Trackers()
        run.register_state("trackers", self.trackers)
        run.register_state("recorded", self)
        self.sinks: list[Sink] = []
        self.locks: dict[Path, str] = {}  # of the folders of the run
        self.path = metrics_file(run.config)
        self.records = RunFileSums(run.config.checkpoint.save_path, self.path)
        self.sums: dict[str, tuple[int, str]] = {}  # what is recorded until the last checkpoint

    def state_dict(self) -> dict[str, tuple[int, str]]:
        """Return sizes and sums of what is recorded; metrics.jsonl is on disk then. Collective."""

        def take() -> None:
            for sink in self.sinks:
                if isinstance(sink, JsonlSink):
                    sink.sync()
            self.sums = self.records.take()

        self.run.strategy.on_rank_0(take, "put metrics.jsonl on disk")
        return self.sums

    def load_state_dict(self, state: Mapping[str, tuple[int, str]]) -> None:
        self.sums = dict(state)

    def on_start(self, run: Any) -> None:
        config = run.config
        strategy = run.strategy
        step = run.state.global_step
        folder = config.checkpoint.save_path
        self.locks = locks_of([folder, config.checkpoint.ckpt_path])
        if step == 0:
            strategy.on_rank_0(
                lambda: set_run_files_aside(config), f"keep apart what is in {folder}"
            )
        if run.owns_parts:
            save_run_config(run.options if run.keeps_files else config, strategy, config)
            total_steps = None if run.only_evaluates else run.count_steps()
            record_start(config, strategy, step, run.content, total_steps)
        if strategy.is_rank_0():
            # Only where the run goes on in its own folder: another one's records are elsewhere.
            if step > 0 and config.checkpoint.resume == "auto" and not run.only_evaluates:
                self._warn_of_lost(step)
            if step > 0:
                cut_samples(folder, step)
            self.sinks = open_sinks(
                config.logging,
                folder,
                public_options(config),
                start_step=step,
                run_ids=self.trackers.run_ids,
                path=self.path,
            )
        self.trackers.run_ids |= {
            sink.name: sink.run_id for sink in self.sinks if hasattr(sink, "run_id")
        }

    def _warn_of_lost(self, step: int) -> None:
        """Warn of records that the checkpoint of this step knows and the folder has no longer."""
        messages = self.records.lost(self.sums)
        if len(messages) > _NAMED_FILES:
            messages[_NAMED_FILES:] = [f"{len(messages) - _NAMED_FILES} more files"]
        if messages:
            logger.warning(
                "%s: of what was recorded until step %d, %s. The run goes on without it; to have it back, stop, "
                "restore the files from a copy, and start again",
                self.run.config.checkpoint.save_path,
                step,
                "; ".join(messages),
            )

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        for lock_path, folder in self.locks.items() if self.sinks else ():
            if lock_path in held_locks and not is_at(lock_path, held_locks[lock_path]):
                lock_again(lock_path, folder)
        if step % run.config.logging.logging_steps == 0 or step == run.total_steps:
            self.write(step, metrics)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row to the file, and a point to the trackers."""
        for sink in self.sinks:
            if isinstance(sink, JsonlSink):
                sink.log(step, metrics)
            else:
                sink.log(step, renamed(metrics, self.run.config.logging.metric_names))

    def on_evaluation(self, run: Any, step: int, result: Mapping[str, float]) -> None:
        self.write(step, result)
        self.upload()

    def on_save(self, run: Any, step: int) -> None:
        self.upload()
        logger.info("checkpoint global_step%d written", step)

    def on_end(self, run: Any, error: BaseException | None) -> None:
        # After an error, a tracker sees by itself that the process failed.
        if error is None or isinstance(error, SystemExit):
            self.close()
        checkpoint = run.config.checkpoint
        if run.owns_parts:
            release([checkpoint.save_path, checkpoint.ckpt_path])

    def upload(self) -> None:
        if self.run.strategy.is_rank_0():
            upload_run_files(self.run.config.checkpoint.save_path)

    @property
    def tensorboard_writer(self) -> Any | None:
        return next((sink.writer for sink in self.sinks if isinstance(sink, TensorBoardSink)), None)

    @property
    def wandb_run(self) -> Any | None:
        return next((sink.run for sink in self.sinks if isinstance(sink, WandbSink)), None)

    def close(self) -> None:
        """Close the logs; nothing is logged after it."""
        for sink in self.sinks:
            sink.close()
        if self.sinks:
            self.upload()
        self.sinks = []
