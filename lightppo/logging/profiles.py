"""``--profile_steps``: traces of steps, by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from lightppo.callbacks import Callback
from lightppo.errors import ConfigError
from lightppo.files import local_folder
from lightppo.logging.step_metrics import Phases


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


def profiles(run: Any) -> Profiles | None:
    """Where steps are to be traced."""
    steps = run.config.logging.profile_steps
    return Profiles(steps) if steps else None


@contextmanager
def profile(path: Path, timer: Phases) -> Iterator[None]:
    """A context whose operators torch's profiler writes to ``path``, a trace for chrome://tracing or Perfetto."""
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
