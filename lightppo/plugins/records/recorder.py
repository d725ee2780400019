"""What happens after a step beside training: logs, evaluations, checkpoints, each at its time."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightppo.config.options import LoggingConfig, OptionSet
from lightppo.errors import ConfigError, NonFiniteError
from lightppo.plugins.ops import durable
from lightppo.plugins.ops.storage import local_folder
from lightppo.plugins.records.alarms import Alarms
from lightppo.plugins.records.metric_names import renamed
from lightppo.plugins.records.run_folder import (
    RecordSums,
    cut_samples,
    hold,
    is_at,
    run_name,
    set_aside,
    upload_records,
)
from lightppo.plugins.records.trackers import TensorBoardSink, Tracker, WandbSink, open_trackers
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.trainer.checkpointing import RunCheckpointer
from lightppo.trainer.metrics import Pace, PhaseTimer, with_namespace

logger = logging.getLogger(__name__)

_TOLD = 5  # files that are named in one line


@dataclass
class Cadence:
    """Due at multiples of ``steps``, at the end of every ``epochs``-th episode, and ``seconds`` after the last time."""

    steps: int = -1  # below 1: never by steps
    epochs: int | None = None
    seconds: float | None = None
    agree: Callable[[bool], bool] = bool  # rank 0's value on every rank: its clock decides for all
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.last = self.clock()

    @property
    def active(self) -> bool:
        """Whether it can ever be due."""
        return self.steps > 0 or self.epochs is not None or self.seconds is not None

    def due(self, step: int, finished_episodes: int | None = None) -> bool:
        """Whether it is due after ``step``; ``finished_episodes``: of the run, if this step was the last of one."""
        due = self.steps > 0 and step % self.steps == 0
        due |= self.epochs is not None and finished_episodes is not None and finished_episodes % self.epochs == 0
        if self.seconds is not None:
            due |= self.agree(self.clock() - self.last >= self.seconds)
        if due:
            self.last = self.clock()
        return due


# -- where metrics go ------------------------------------------------------------------------------------------------


class JsonlSink:
    """One JSON object per line: step, time (Unix seconds) and the metrics. NaN becomes null.

    A new run (``start_step`` 0) puts an older file aside; a resumed one keeps the rows up to ``start_step`` and cuts
    off those of steps that will be done again. A file that vanishes is made again.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if start_step == 0:
            set_aside(path)
        elif path.exists():
            _cut(path, start_step)
        self.path, self.file = path, path.open("a", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with durable.explained(self.path):
            if not is_at(self.path, self.file):
                logger.warning("%s was removed: it is made again, without its earlier rows", self.path)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = self.path.open("a", buffering=1)
            self.file.write(json.dumps({"step": step, "time": time.time(), **row}) + "\n")

    def sync(self) -> None:
        """All rows are on disk: a checkpoint will say that their steps are done."""
        with durable.explained(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def _cut(path: Path, last: int) -> None:
    """Keep the rows up to step ``last``, in place: what another process has open stays the file."""
    with path.open("r+b") as file:
        rows = file.read().splitlines(keepends=True)
        kept = [row.rstrip(b"\n") + b"\n" for row in rows if _step_of(row) <= last]
        same = next((i for i, (old, new) in enumerate(zip(rows, kept)) if old != new), min(len(rows), len(kept)))
        file.seek(sum(map(len, rows[:same])))
        file.writelines(kept[same:])
        file.truncate()


def _step_of(row: bytes) -> float:
    """Step of a row; infinity for a row that a crash tore, or that was altered."""
    try:
        step = json.loads(row)["step"]
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
    """All sinks of a run: metrics.jsonl in its folder, and what the options name. Arguments as of :class:`Recorder`."""
    trackers = open_trackers(config, run_name(config, folder), options, start_step, run_ids or {})
    # Last: it puts the file of an older run aside, which a missing package above should not.
    return [*trackers, JsonlSink(path or local_folder(folder) / "metrics.jsonl", start_step)]


# --------------------------------------------------------------------------------------------------------------------


class Recorder:
    """Logs, evaluates and saves. All ranks call every method; rank 0's clock decides what is due by time.

    Args:
        config: its sections ``checkpoint``, ``evaluation`` and ``logging`` are read.
        evaluator: with ``evaluate(step)``, which returns metrics ``eval/<name>``; ``None``: no evaluation.
        options: of the run, shown by trackers. Without secrets: tokens come from the environment.
        start_step: step the run starts or resumes at; logs of later steps, of a run that was cut off, are dropped.
        run_ids: runs to go on with, by tracker.
        alarms: look at each step that is logged; ``None``: new ones.
    """

    def __init__(
        self,
        config: OptionSet,
        strategy: DeepspeedStrategy,
        checkpointer: RunCheckpointer,
        evaluator: Any | None,
        *,
        options: Mapping[str, Any],
        start_step: int = 0,
        run_ids: Mapping[str, str] | None = None,
        alarms: Alarms | None = None,
    ) -> None:
        self.config, self.strategy, self.checkpointer, self.evaluator = config, strategy, checkpointer, evaluator
        c, e, agree = config.checkpoint, config.evaluation, strategy.broadcast_object
        self.checkpoint_cadence = Cadence(c.save_steps, c.save_epochs, c.save_seconds, agree=agree)
        self.export_cadence = Cadence(c.hf_save_steps, c.hf_save_epochs, c.hf_save_seconds, agree=agree)
        per_episode = 1 if e.eval_steps == -1 and e.eval_seconds is None else None
        self.eval_cadence = Cadence(e.eval_steps, e.eval_epochs or per_episode, e.eval_seconds, agree=agree)
        self.best: float | None = None
        if e.best_metric is not None and start_step > 0:
            self.best = checkpointer.best_value(c.ckpt_path, e.best_metric)
        log_file = getattr(config.logging, "log_file", None)  # PPO has none
        self.path = local_folder(c.save_path) / "metrics.jsonl" if log_file is None else Path(log_file)
        self.records = RecordSums(c.save_path, self.path)
        # Only where the run goes on in its own folder: another one's records are elsewhere.
        if start_step > 0 and strategy.is_rank_0() and c.resume == "auto" and not getattr(e, "val_only", False):
            self._tell_lost(start_step)
        self.alarms, self.timer, self.pace = alarms or Alarms(), PhaseTimer(), Pace(start_step)
        self.evaluation = self._evaluated_before(start_step)  # of the start
        self.last_evaluated = start_step if self.evaluation else None
        self.last_saved: int | None = start_step or None
        if start_step > 0 and strategy.is_rank_0():
            cut_samples(c.save_path, start_step)
        run = {"start_step": start_step, "run_ids": run_ids, "path": self.path}
        self.sinks = open_sinks(config.logging, c.save_path, options, **run) if strategy.is_rank_0() else []
        self.run_ids = dict(run_ids or {}) | {s.name: s.run_id for s in self.sinks if hasattr(s, "run_id")}

    def _tell_lost(self, step: int) -> None:
        """Of the records, what the checkpoint of this step knows and the folder has no longer."""
        if lost := self.records.lost(self.checkpointer.records):
            more = f"; {len(lost) - _TOLD} more files" if len(lost) > _TOLD else ""
            logger.warning(
                "%s: of what was recorded until step %d, %s%s. The run goes on without it; to have it back, stop, "
                "restore the files from a copy, and start again",
                *(self.config.checkpoint.save_path, step, "; ".join(lost[:_TOLD]), more),
            )

    def _evaluated_before(self, step: int) -> dict[str, float]:
        """The evaluation in the metrics of the step that the run goes on from; empty if there is none. Collective."""
        path, found = self.path, {}
        if step == 0 or self.evaluator is None:
            return found
        if self.strategy.is_rank_0() and path.is_file():
            rows = [json.loads(row) for row in path.read_bytes().splitlines() if _step_of(row) == step]
            found = {name: value for row in rows for name, value in row.items() if name.startswith("eval/")}
        return self.strategy.broadcast_object(found)

    def catch_up(self, step: int, finished_episodes: int | None, ckpt_path: str) -> None:
        """After a resume: the evaluation and the export that were due at this step, if they lack. Collective."""
        c, metric = self.config.checkpoint, self.config.evaluation.best_metric
        if self.evaluation and metric is not None:
            self._keep_best(step, self.evaluation, metric)
        elif self.eval_cadence.due(step, finished_episodes):
            self.evaluate(step)
        due = c.save_hf_ckpt or self.export_cadence.due(step, finished_episodes)
        self.checkpointer.catch_up(ckpt_path, step, due and c.resume == "auto")

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        named = renamed(metrics, self.config.logging.metric_names)
        for sink in self.sinks:
            sink.log(step, metrics if isinstance(sink, JsonlSink) else named)

    def log(self, step: int, status: Mapping[str, float], total_steps: int | None = None, due: bool = False) -> None:
        """Log one step, if it is ``due`` or its turn, as a row and as a line; alarms are told when they begin."""
        status = with_namespace(status)
        alarms, told = self.alarms.look(status)
        if self.sinks:
            hold([self.config.checkpoint.save_path, self.config.checkpoint.ckpt_path])
        if due or step % self.config.logging.logging_steps == 0:
            # What saving took before: a row of its own, written after a save, could be lost while the save is not.
            self._write(step, status | alarms | with_namespace(self.timer.reset()))
            self.strategy.print(self.pace.line(step, total_steps, status))
        for line in told:
            self.strategy.print(f"[step {step}] {line}")

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the current weights, once per step at most; empty without an evaluator. Collective."""
        if self.evaluator is None or self.last_evaluated == step:
            return {}
        self.last_evaluated = step
        try:
            with (timer := PhaseTimer())("eval"):
                results = self.evaluator.evaluate(step)
        except NonFiniteError as error:
            if getattr(self.config.evaluation, "val_only", False):
                raise
            if self.sinks:
                logger.warning("the evaluation after step %d is left out: %s", step, error)
            return {}
        self._write(step, results | with_namespace(timer.reset()))
        told = [name for name in ("loss", "accuracy", "reward", "margin") if f"eval/{name}" in results]
        told = ", ".join(f"{name} {results[f'eval/{name}']:.3f}" for name in told)
        self.strategy.print(f"[step {step}] evaluation: {told}")
        self._upload()
        if self.config.evaluation.best_metric is not None:
            self._keep_best(step, results, self.config.evaluation.best_metric)
        return results

    def _keep_best(self, step: int, results: Mapping[str, float], metric: str) -> None:
        if metric not in results:
            known = ", ".join(sorted(results))
            raise ConfigError(f"--best_metric {metric} is not among the evaluation's metrics: {known}")
        sign = -1 if metric.endswith("loss") else 1
        if self.best is not None and sign * results[metric] <= sign * self.best:
            return
        self.best = results[metric]
        if step > 0:  # the start is the bar to pass, not a result
            with self.timer("save"):
                self.checkpointer.save_best(self.config.checkpoint.ckpt_path, step, metric, self.best)

    def after_step(
        self, step: int, finished_episodes: int | None, ckpt_path: str, save: Callable[[], None], stops: bool = False
    ) -> None:
        """Evaluate, checkpoint (by ``save``) and export what is due. Collective.

        A run that ``stops`` is saved at once; the next start evaluates and exports in :meth:`catch_up`.
        """
        if stops:
            return self.checkpoint(step, save)
        if self.evaluator is not None and self.eval_cadence.due(step, finished_episodes):
            self.evaluate(step)
        if self.checkpoint_cadence.due(step, finished_episodes):
            self.checkpoint(step, save)
        if self.export_cadence.due(step, finished_episodes):
            with self.timer("save"):
                self.checkpointer.save_hf(ckpt_path, step)

    def finish(self, step: int, save: Callable[[], None]) -> None:
        """The last evaluation and, where checkpoints are kept, the last checkpoint. Collective."""
        self.evaluate(step)
        if self.checkpoint_cadence.active or self.last_saved is not None:
            self.checkpoint(step, save)

    def checkpoint(self, step: int, save: Callable[[], None]) -> None:
        """Save, once per step at most. Collective."""
        if self.last_saved != step:
            self.strategy.on_rank_0(self._sync, "put metrics.jsonl on disk")
            with self.timer("save"):
                save()
            self._upload()
            self.last_saved = step
            logger.info("checkpoint global_step%d written", step)

    def _sync(self) -> None:
        for sink in self.sinks:
            if isinstance(sink, JsonlSink):
                sink.sync()
        self.checkpointer.records = self.records.take()

    def _upload(self) -> None:
        if self.strategy.is_rank_0():
            upload_records(self.config.checkpoint.save_path)

    @property
    def tensorboard_writer(self) -> Any | None:
        return next((s.writer for s in self.sinks if isinstance(s, TensorBoardSink)), None)

    @property
    def wandb_run(self) -> Any | None:
        return next((s.run for s in self.sinks if isinstance(s, WandbSink)), None)

    def close(self) -> None:
        """Close the logs; nothing is logged after it."""
        for sink in self.sinks:
            sink.close()
        if self.sinks:
            self._upload()
        self.sinks = []
