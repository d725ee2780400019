"""When something is due that happens every N steps, episodes or seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightppo.callbacks import Callback


@dataclass
class DueTimes:
    """Due at multiples of ``steps``, at the end of every ``epochs``-th episode, and ``seconds`` after the last time."""

    steps: int = -1  # below 1: never by steps
    epochs: int | None = None
    seconds: float | None = None
    agree: Callable[[bool], bool] = bool  # rank 0's value on every rank: its clock decides for all
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.last = self.clock()

    def due(self, step: int, finished_episodes: int | None = None) -> bool:
        """Tell whether it is due after ``step``; ``finished_episodes``: of the run, if this step was the last of one."""
        is_due = self.steps > 0 and step % self.steps == 0
        if self.epochs is not None and finished_episodes is not None:
            is_due |= finished_episodes % self.epochs == 0
        if self.seconds is not None:
            is_due |= self.agree(self.clock() - self.last >= self.seconds)
        if is_due:
            self.last = self.clock()
        return is_due


class TimedSaves(Callback):
    """Checkpoints by ``--save_steps``, ``--save_epochs`` and ``--save_seconds``; each begins the seconds anew."""

    due_times: DueTimes  # from the start of the run on

    def on_start(self, run: Any) -> None:
        """Start the clocks."""
        options = run.config.checkpoint
        self.due_times = DueTimes(
            options.save_steps,
            options.save_epochs,
            options.save_seconds,
            agree=run.strategy.broadcast_object,
        )
        run.saves = True

    def votes(self, run: Any) -> Mapping[str, float]:
        is_due = self.due_times.due(run.state.global_step, run.finished_episodes)
        return {"save": float(is_due)}
