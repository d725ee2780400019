"""When something that recurs is due: every N steps, every N episodes or every N seconds, whichever comes first."""

from __future__ import annotations

import time
from collections.abc import Callable


class Cadence:
    """Due at multiples of ``steps``, at the end of every ``epochs``-th episode, and ``seconds`` after the last time.

    Args:
        steps: PPO steps; below 1: never by steps.
        epochs: episodes; ``None``: never by episodes.
        seconds: wall clock; ``None``: never by time.
        agree: makes rank 0's clock decide for all: ``agree(value)`` returns rank 0's value on every rank.
        clock: seconds.
    """

    def __init__(
        self,
        steps: int = -1,
        epochs: int | None = None,
        seconds: float | None = None,
        *,
        agree: Callable[[bool], bool] = bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = steps
        self.epochs = epochs
        self.seconds = seconds
        self.agree = agree
        self.clock = clock
        self.last = clock()

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
