"""Metrics to JSONL (always), TensorBoard and Weights & Biases. Only rank 0 writes."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from lightppo.config.sections import LoggingConfig


class Sink(Protocol):
    """Somewhere metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object per line: step, time (Unix seconds) and the metrics. NaN becomes null.

    Args:
        path: the file. A new run (``start_step`` 0) puts an older file aside; a resumed one keeps the rows up to
            ``start_step`` and drops those of steps that will be done again.
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
