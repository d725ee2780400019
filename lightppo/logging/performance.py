"""How far a run is and what its steps take: lines, progress bars, seconds of phases, speeds, memory, profiler traces."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from shutil import get_terminal_size
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from lightppo.callbacks import Callback
from lightppo.errors import ConfigError
from lightppo.experience.experience import Experience
from lightppo.files import local_folder
from lightppo.metric_names import ON_BARS, SHOWN, TIMED
from lightppo.ranks import heartbeat
from lightppo.zero3 import parameter_count

# -- the line of a step, and bars ------------------------------------------------------------------------------------


class Pace:
    """One line per step, with the time that the last steps took and that the others will."""

    def __init__(self, start_step: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.ends = deque([(start_step, clock())], maxlen=21)  # number and end of the last steps

    def line(self, step: int, total: int | None, status: Mapping[str, float]) -> str:
        """Return ``step 12/100 · reward 0.61 · … · 0.9 s · ETA 1:20``; the time left counts evaluations and saving too."""
        current_time = self.clock()
        previous_step, previous_end = self.ends[-1]
        self.ends.append((step, current_time))
        first_step, first_end = self.ends[0]
        seconds = (current_time - previous_end) / max(step - previous_step, 1)
        line_texts = [f"step {step}" if total is None else f"step {step}/{total}"]
        for label, metric in (SHOWN | {"len": "rollout/response_length"}).items():
            if metric in status:
                line_texts.append(f"{label} {round(status[metric], 4) + 0.0:.3g}")
        line_texts.append(f"{status.get('perf/time_step', seconds):.1f} s")
        if total is not None and step > first_step:
            seconds_left = (current_time - first_end) / (step - first_step) * (total - step)
            line_texts.append(f"ETA {tqdm.format_interval(round(seconds_left)).removeprefix('0')}")
        return " · ".join(line_texts)


def progress_bar(items: Iterable | None, desc: str, *, shown: bool = True, **options: Any) -> tqdm:
    """Return a bar as wide as the terminal, with numbers behind it; silent elsewhere."""
    size = get_terminal_size()  # of one that has no rows, as in containers, tqdm would show nothing
    return tqdm(
        items,
        desc=desc,
        ncols=size.columns,
        nrows=size.lines,
        bar_format="{desc} {n_fmt}/{total_fmt} |{bar:10}| {elapsed}<{remaining}{postfix}",
        disable=None if shown else True,
        **options,
    )


def bar_of_steps(numbered_steps: Iterable[tuple[int, Any]], run: Any) -> Iterator[tuple[int, Any]]:
    """Yield the steps of a run, with a bar; how many there are may change with each episode."""
    is_shown = run.strategy.is_rank_0()
    with progress_bar(None, run.unit, shown=is_shown, initial=run.state.global_step) as run.bar:
        for step in numbered_steps:
            run.bar.total = run.total_steps
            yield step
            run.bar.update()


def on_bar(status: Mapping[str, float]) -> dict[str, float]:
    """Return what a progress bar shows of a status, by the names there."""
    return {label: status[metric] for label, metric in ON_BARS.items() if metric in status}


def minibatch_on_bar(
    samples: Sequence[Experience], statuses: Iterable[Mapping[str, float]]
) -> dict[str, float]:
    """Return the same of one optimizer step on this rank alone; a KL is the mean over tokens."""
    numbers: dict[str, list[float]] = defaultdict(list)
    for status in statuses:
        for metric, value in status.items():
            numbers[metric].append(value)
    means = {metric: fmean(values) for metric, values in numbers.items()}
    lengths = torch.cat([experience.response_lengths.double() for experience in samples])
    shared_names = set.intersection(*(set(experience.info) for experience in samples))
    for metric in shared_names & set(ON_BARS.values()):
        values = torch.cat([experience.info[metric].double() for experience in samples])
        weights = lengths if metric == "kl" else torch.ones_like(lengths)
        means[metric] = (values @ weights / weights.sum()).item()
    return on_bar(means)


# -- seconds and speeds ----------------------------------------------------------------------------------------------


class PhaseTimer:
    """Seconds per phase of a step; on a GPU between two marks in its stream, so that no phase waits for it."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, Any, Any]] = []  # name, start and end

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        # CUDA marks take memory of the GPU, so a run on the CPU of a GPU machine uses the clock.
        current_time = _mark if torch.cuda.is_initialized() else time.perf_counter
        start = current_time()
        with torch.profiler.record_function(phase), heartbeat.during(phase):  # its name in a trace
            yield
        self.phases.append((phase, start, current_time()))

    def reset(self) -> dict[str, float]:
        """Return the seconds since the last reset, as ``time_<phase>``. Waits for a GPU."""
        seconds = Counter()
        for phase, start, end in self.phases:
            if isinstance(end, float):
                seconds[f"time_{phase}"] += end - start
            else:
                end.synchronize()
                seconds[f"time_{phase}"] += start.elapsed_time(end) / 1000
        self.phases = []
        return dict(seconds)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Speeds(Callback):
    """Adds the speeds of a step whose samples come from rollouts."""

    def on_start(self, run: Any) -> None:
        """Count the parameters, once."""
        models = {"actor_update": run.actor, "critic_update": run.critic}
        self.parameters = {
            part: parameter_count(model) for part, model in models.items() if model is not None
        }

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        seconds = {metric.removeprefix("perf/"): value for metric, value in metrics.items()}
        if run.config.rollout.max_staleness > 0:  # it is of the wait, not of the generation
            seconds.pop("time_rollout", None)
        speeds = perf_metrics(
            seconds,
            {metric.removeprefix("rollout/"): value for metric, value in metrics.items()},
            epochs=dict.fromkeys(self.parameters, run.max_epochs),
            world_size=run.strategy.world_size,
            parameters=sum(self.parameters.values()),
            peak_tflops=run.config.logging.peak_tflops,
        )
        return {f"perf/{metric}": value for metric, value in speeds.items()}


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
    speeds: dict[str, float] = {}
    generated = status.get("generated_tokens", 0.0)
    tokens = status.get("samples", 0.0) * status.get("total_length", 0.0)
    trained = tokens * max(epochs.values())
    rollout_seconds = seconds.get("time_rollout")
    train_seconds = seconds.get("time_train")
    if generated and rollout_seconds:
        speeds["rollout_tokens_per_second"] = generated / rollout_seconds
        speeds["rollout_ms_per_token"] = 1000 * rollout_seconds / generated
    for training_part in TIMED:
        if tokens and f"time_{training_part}" in seconds:
            tokens_of_part = tokens * epochs.get(training_part, 1)
            seconds_of_part = seconds[f"time_{training_part}"]
            speeds[f"{training_part}_ms_per_token"] = 1000 * seconds_of_part / tokens_of_part
    if trained and train_seconds:
        speeds["train_tokens_per_second"] = trained / train_seconds
        speeds["train_ms_per_token"] = 1000 * train_seconds / trained
        speeds["train_tflops"] = 6 * parameters * trained / train_seconds / world_size / 1e12
        if peak_tflops is not None:
            speeds["mfu"] = speeds["train_tflops"] / peak_tflops
    return speeds


class GPUMemory(Callback):
    """The most memory that a rank's tensors had in the step, and the most that torch held for them."""

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        peak_memory = {
            "perf/gpu_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
            "perf/gpu_memory_reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        }
        torch.cuda.reset_peak_memory_stats()
        return run.strategy.all_reduce(peak_memory, op="max")


class Profiles(Callback):
    """Writes a trace of each step of ``--profile_steps``."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps

    def on_start(self, run: Any) -> None:
        total_steps = None if run.only_evaluates else run.count_steps()
        if late_steps := [
            step for step in self.steps if total_steps is not None and step > total_steps
        ]:
            raise ConfigError(f"--profile_steps {late_steps[0]}: the run has {total_steps} steps")

    def around_step(self, run: Any, step: int) -> AbstractContextManager:
        if step not in self.steps:
            return nullcontext()
        folder = Path(local_folder(run.config.checkpoint.save_path)) / "profile"
        return profile(folder / f"step{step}_rank{run.strategy.get_rank()}.json.gz", run.timer)


@contextmanager
def profile(trace_path: Path, timer: PhaseTimer) -> Iterator[None]:
    """Let torch's profiler write the operators of a context to ``trace_path``, a trace for chrome://tracing or Perfetto."""
    trace_path.parent.mkdir(parents=True, exist_ok=True)
    profiler = torch.profiler.profile(
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace_path)),
        acc_events=True,  # else it warns that a next cycle would lose them
    )
    with timer("start_profile"):
        profiler.start()
    try:
        yield
    finally:
        with timer("stop_profile"):
            profiler.stop()
