"""What happens after a step beside training: logs, evaluations, checkpoints, each at its time."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightppo.config import PPOConfig
from lightppo.config.options import LoggingConfig
from lightppo.errors import ConfigError
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.trainer.checkpointing import RunCheckpointer
from lightppo.trainer.evaluator import Evaluator
from lightppo.trainer.metrics import with_namespace

logger = logging.getLogger(__name__)


@dataclass
class Cadence:
    """Due at multiples of ``steps``, at the end of every ``epochs``-th episode, and ``seconds`` after the last time.

    Attributes:
        steps: PPO steps; below 1: never by steps.
        epochs: episodes; ``None``: never by episodes.
        seconds: wall clock; ``None``: never by time.
        agree: makes rank 0's clock decide for all: ``agree(value)`` returns rank 0's value on every rank.
    """

    steps: int = -1
    epochs: int | None = None
    seconds: float | None = None
    agree: Callable[[bool], bool] = bool
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.last = self.clock()

    @property
    def active(self) -> bool:
        """Whether it can ever be due."""
        return self.steps > 0 or self.epochs is not None or self.seconds is not None

    def due(self, step: int, finished_episodes: int | None = None) -> bool:
        """Whether it is due after ``step``.

        Args:
            step: PPO step just finished, from 1.
            finished_episodes: episodes finished, if this step was the last of one, else ``None``.
        """
        due = self.steps > 0 and step % self.steps == 0
        due |= self.epochs is not None and finished_episodes is not None and finished_episodes % self.epochs == 0
        if self.seconds is not None:
            due |= self.agree(self.clock() - self.last >= self.seconds)
        if due:
            self.last = self.clock()
        return due


class Sink(Protocol):
    """Somewhere metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object per line: step, time (Unix seconds) and the metrics. NaN becomes null.

    Args:
        path: the file. A new run (``start_step`` 0) puts an older file aside; a resumed one keeps the rows up to
            ``start_step`` and drops rows of steps that will be done again.
        start_step: step that the run starts from.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and start_step == 0:
            path.rename(next(p for i in itertools.count(1) if not (p := path.with_suffix(f".{i}.jsonl")).exists()))
        elif path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= start_step]
            rewritten = path.with_suffix(".tmp")
            rewritten.write_text("".join(line + "\n" for line in kept))
            os.replace(rewritten, path)
        self.file = path.open("a", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, "time": time.time(), **row}) + "\n")

    def close(self) -> None:
        self.file.close()


def _step_of(line: str) -> float:
    """Step of a row; infinity for a row that a crash cut off."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


class TensorBoardSink:
    """TensorBoard event files in ``folder``; after a resume, points of steps done again are purged."""

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir=str(folder), purge_step=start_step + 1 if start_step else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # its own thread writes every two minutes, and what it holds dies with the process

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """A Weights & Biases run; goes on with the run of ``run_id`` after a resume. WANDB_MODE=offline works."""

    def __init__(self, config: LoggingConfig, run_name: str, run_config: Mapping[str, Any], run_id: str | None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("--use_wandb needs wandb: pip install 'lightppo[wandb]'") from error
        self.run = wandb.init(
            entity=config.wandb_org,
            project=config.wandb_project,
            group=config.wandb_group,
            name=run_name,
            id=run_id,
            resume="allow",
            config=dict(run_config),
        )
        self.run.define_metric("global_step")
        for namespace in ("rollout", "train", "eval", "perf", "reward"):
            self.run.define_metric(f"{namespace}/*", step_metric="global_step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"global_step": step, **metrics})

    def close(self) -> None:
        self.run.finish()


class MetricLogger:
    """All sinks of a run.

    Args:
        config: which sinks.
        folder: the run's folder; metrics.jsonl goes there.
        run_config: options of the run, shown by Weights & Biases. Holds no secrets: tokens come from the environment.
        is_rank_0: other ranks log nothing.
        start_step: step that the run starts or resumes from.
        run_id: of the Weights & Biases run to go on with.

    Raises:
        ImportError: if a sink's package is not installed; names the extra.
    """

    def __init__(
        self,
        config: LoggingConfig,
        folder: str | Path,
        run_config: Mapping[str, Any],
        *,
        is_rank_0: bool = True,
        start_step: int = 0,
        run_id: str | None = None,
    ) -> None:
        self.sinks: list[Sink] = []
        self.run_id = run_id
        if not is_rank_0:
            return
        name = config.wandb_run_name or Path(folder).resolve().name
        if config.use_tensorboard:
            self.sinks.append(TensorBoardSink(Path(config.use_tensorboard) / name, start_step))
        if config.use_wandb:
            wandb = WandbSink(config, name, run_config, run_id)
            self.run_id = wandb.run.id
            self.sinks.append(wandb)
        # Last: it puts the file of an older run aside, which a missing package above should not.
        self.sinks.append(JsonlSink(Path(folder) / "metrics.jsonl", start_step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of one PPO step everywhere."""
        for sink in self.sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        """Flush and close; idempotent."""
        for sink in self.sinks:
            sink.close()
        self.sinks = []


class Recorder:
    """Logs, evaluates and saves. All ranks call every method; rank 0's clock decides what is due by time.

    Args:
        config: paths, sinks and the times of each.
        strategy: rank and agreement.
        checkpointer: writes checkpoints.
        evaluator: ``None``: no evaluation.
        options: of the run, shown by Weights & Biases.
        start_step: step the run starts or resumes at; logs of later steps, of a run that was cut off, are dropped.
        run_id: Weights & Biases run to go on with.
    """

    def __init__(
        self,
        config: PPOConfig,
        strategy: DeepspeedStrategy,
        checkpointer: RunCheckpointer,
        evaluator: Evaluator | None,
        *,
        options: Mapping[str, Any],
        start_step: int = 0,
        run_id: str | None = None,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.checkpointer = checkpointer
        self.evaluator = evaluator
        c, e = config.checkpoint, config.evaluation
        agree = strategy.broadcast_object
        self.checkpoint_cadence = Cadence(c.save_steps, c.save_epochs, c.save_seconds, agree=agree)
        self.export_cadence = Cadence(c.hf_save_steps, c.hf_save_epochs, c.hf_save_seconds, agree=agree)
        per_episode = 1 if e.eval_steps == -1 and e.eval_seconds is None else None
        self.eval_cadence = Cadence(e.eval_steps, e.eval_epochs or per_episode, e.eval_seconds, agree=agree)
        self.best: float | None = None
        if e.best_metric is not None and start_step > 0:
            self.best = checkpointer.best_value(c.ckpt_path, e.best_metric)
        self.last_evaluated: int | None = None
        self.last_saved: int | None = start_step or None
        self.metric_logger = MetricLogger(
            config.logging,
            c.save_path,
            options,
            is_rank_0=strategy.is_rank_0(),
            start_step=start_step,
            run_id=run_id,
        )

    @property
    def run_id(self) -> str | None:
        """Of the Weights & Biases run."""
        return self.metric_logger.run_id

    def log(self, step: int, status: Mapping[str, float], perf: Mapping[str, float]) -> None:
        """Log one step, if it is due."""
        if step % self.config.logging.logging_steps == 0:
            self.metric_logger.log(step, with_namespace({**status, **perf}))

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the current weights, once per step at most; empty without an evaluator. Collective."""
        if self.evaluator is None or self.last_evaluated == step:
            return {}
        results = self.evaluator.evaluate(step)
        self.last_evaluated = step
        self.metric_logger.log(step, results)
        self.strategy.print(f"[step {step}] evaluation: accuracy {results['eval/accuracy']:.3f}, "
                            f"reward {results['eval/reward']:.3f}")  # fmt: skip
        if self.config.evaluation.best_metric is not None:
            self._keep_best(step, results, self.config.evaluation.best_metric)
        return results

    def _keep_best(self, step: int, results: Mapping[str, float], metric: str) -> None:
        if metric not in results:
            known = ", ".join(sorted(results))
            raise ConfigError(f"--best_metric {metric} is not among the evaluation's metrics: {known}")
        if self.best is not None and results[metric] <= self.best:
            return
        self.best = results[metric]
        if step > 0:  # the start is the bar to pass, not a result
            self.checkpointer.save_best(self.config.checkpoint.ckpt_path, step, metric, self.best)

    def after_step(self, step: int, finished_episodes: int | None, ckpt_path: str, save: Callable[[], None]) -> None:
        """Evaluate, checkpoint (by ``save``) and export what is due. Collective."""
        if self.evaluator is not None and self.eval_cadence.due(step, finished_episodes):
            self.evaluate(step)
        if self.checkpoint_cadence.due(step, finished_episodes):
            self._checkpoint(step, save)
        if self.export_cadence.due(step, finished_episodes):
            self.checkpointer.save_hf(ckpt_path, step)

    def finish(self, step: int, save: Callable[[], None]) -> None:
        """The last evaluation and, where checkpoints are kept, the last checkpoint. Collective."""
        self.evaluate(step)
        if self.checkpoint_cadence.active:
            self._checkpoint(step, save)

    def _checkpoint(self, step: int, save: Callable[[], None]) -> None:
        """Once per step at most."""
        if self.last_saved != step:
            save()
            self.last_saved = step
            logger.info("checkpoint global_step%d written", step)

    @property
    def tensorboard_writer(self) -> Any | None:
        return next((s.writer for s in self.metric_logger.sinks if isinstance(s, TensorBoardSink)), None)

    @property
    def wandb_run(self) -> Any | None:
        return next((s.run for s in self.metric_logger.sinks if isinstance(s, WandbSink)), None)

    def close(self) -> None:
        """Close the logs; nothing is logged after it."""
        self.metric_logger.close()
