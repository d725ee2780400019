"""When something is due that happens every N steps, episodes or seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightppo.callbacks import Callback


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
        due |= (
            self.epochs is not None
            and finished_episodes is not None
            and finished_episodes % self.epochs == 0
        )
        if self.seconds is not None:
            due |= self.agree(self.clock() - self.last >= self.seconds)
        if due:
            self.last = self.clock()
        return due


class TimedSaves(Callback):
    """Checkpoints by ``--save_epochs`` and ``--save_seconds``; one by steps begins the seconds anew."""

    def __init__(self, run: Any) -> None:
        self.cadence: Cadence | None = None  # from the start of the run on

    def on_start(self, run: Any) -> None:
        """Start the clocks."""
        asked = run.config.checkpoint
        self.cadence = Cadence(
            asked.save_steps,
            asked.save_epochs,
            asked.save_seconds,
            agree=run.strategy.broadcast_object,
        )
        run.saves |= self.cadence.active

    def votes(self, run: Any) -> Mapping[str, float]:
        is_due = self.cadence.due(run.state.global_step, run.finished_episodes)
        return {"save": float(is_due)}
