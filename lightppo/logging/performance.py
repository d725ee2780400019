"""What a step takes: seconds of its phases, speeds, memory of GPUs, and traces of torch's profiler."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightppo.callbacks import Callback
from lightppo.errors import ConfigError
from lightppo.files import local_folder
from lightppo.metric_names import TIMED
from lightppo.ranks import heartbeat
from lightppo.zero3 import parameter_count


@dataclass
class PhaseTimer:
    """Seconds per phase of a step; on a GPU between two marks in its stream, so that no phase waits for it."""

    passed: list[tuple[str, Any, Any]] = field(default_factory=list)  # phase, start and end

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        # CUDA marks take memory of the GPU, so a run on the CPU of a GPU machine uses the clock.
        now = _mark if torch.cuda.is_initialized() else time.perf_counter
        start = now()
        with torch.profiler.record_function(phase), heartbeat.during(phase):  # its name in a trace
            yield
        self.passed.append((phase, start, now()))

    def reset(self) -> dict[str, float]:
        """Return the seconds since the last reset, as ``time_<phase>``. Waits for a GPU."""
        passed = self.passed
        self.passed = []
        seconds = Counter()
        for phase, start, end in passed:
            if not isinstance(end, float):
                end.synchronize()
            seconds[f"time_{phase}"] += (
                end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
            )
        return dict(seconds)


def _mark() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


class Speeds(Callback):
    """Adds the speeds of a step whose samples come from rollouts."""

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        epochs = {
            "actor_update": run.max_epochs,
            "critic_update": run.critic_max_epochs,
        }
        models = {"actor_update": run.actor, "critic_update": run.critic}
        passes = sum(
            epochs[part] * parameter_count(model)
            for part, model in models.items()
            if model is not None
        )

        def of(namespace: str) -> dict[str, float]:
            names = [name for name in metrics if name.startswith(f"{namespace}/")]
            return {name.removeprefix(f"{namespace}/"): metrics[name] for name in names}

        speeds = perf_metrics(
            of("perf"),
            of("rollout"),
            epochs=epochs,
            world_size=run.strategy.world_size,
            parameters=passes / max(epochs.values()),
            peak_tflops=run.config.logging.peak_tflops,
        )
        return {f"perf/{name}": value for name, value in speeds.items()}


def perf_metrics(
    seconds: Mapping[str, float],
    status: Mapping[str, float],
    *,
    epochs: Mapping[str, int],
    world_size: int,
    parameters: float,
    peak_tflops: float | None,
) -> dict[str, float]:
    """Return the speed of one step, from its ``time_<phase>``.

    ``status`` is of the rollout (samples, generated_tokens, total_length), ``parameters`` of all models that an epoch
    trains, ``peak_tflops`` of one device; ``epochs`` by the part in ``TIMED``.
    """
    perf: dict[str, float] = {}
    generated = status.get("generated_tokens", 0.0)
    tokens = status.get("samples", 0.0) * status.get("total_length", 0.0)
    trained = tokens * max(epochs.values())
    if generated and seconds.get("time_rollout"):
        perf["rollout_tokens_per_second"] = generated / seconds["time_rollout"]
        perf["rollout_ms_per_token"] = 1000 * seconds["time_rollout"] / generated
    for part in TIMED:
        if tokens and f"time_{part}" in seconds:
            passed = tokens * epochs.get(part, 1)
            perf[f"{part}_ms_per_token"] = 1000 * seconds[f"time_{part}"] / passed
    if trained and (train := seconds.get("time_train")):
        perf["train_tokens_per_second"] = trained / train
        perf["train_ms_per_token"] = 1000 * train / trained
        perf["train_tflops"] = 6 * parameters * trained / train / world_size / 1e12
        if peak_tflops is not None:
            perf["mfu"] = perf["train_tflops"] / peak_tflops
    return perf


class GPUMemory(Callback):
    """The most memory that a rank's tensors had in the step, and the most that torch held for them."""

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        peaks = {
            "perf/gpu_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
            "perf/gpu_memory_reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        }
        torch.cuda.reset_peak_memory_stats()
        return run.strategy.all_reduce(peaks, op="max")


class Profiles(Callback):
    """Writes a trace of each step of ``--profile_steps``."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps

    def on_start(self, run: Any) -> None:
        total = None if run.only_evaluates else run.count_steps()
        if late := [step for step in self.steps if total is not None and step > total]:
            raise ConfigError(f"--profile_steps {late[0]}: the run has {total} steps")

    def around_step(self, run: Any, step: int) -> AbstractContextManager:
        if step not in self.steps:
            return nullcontext()
        folder = Path(local_folder(run.config.checkpoint.save_path)) / "profile"
        return profile(folder / f"step{step}_rank{run.strategy.get_rank()}.json.gz", run.timer)


@contextmanager
def profile(path: Path, timer: PhaseTimer) -> Iterator[None]:
    """Let torch's profiler write the operators of a context to ``path``, a trace for chrome://tracing or Perfetto."""
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler = torch.profiler.profile(
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        acc_events=True,  # else it warns that a next cycle would lose them
    )
    with timer("start_profile"):
        profiler.start()
    try:
        yield
    finally:
        with timer("stop_profile"):
            profiler.stop()
