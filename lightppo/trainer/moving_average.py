"""Models that follow the actor: a moving average of it, which is saved in its place, and a reference that moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightppo.callbacks import Callback


class Followers(Callback):
    """Moves the average after each optimizer step of the actor, and the reference after each PPO step."""

    def __init__(self, run: Any) -> None:
        self.average = run.followers.get("ema")
        self.beta = run.config.algorithm.ema_beta
        if self.average is not None:
            run.exported = self.average

    def on_optimizer_step(self, run: Any, model: str) -> None:
        if model == "actor" and self.average is not None:
            run.strategy.moving_average(run.actor, self.average, self.beta)

    @contextmanager
    def around_step(self, run: Any, step: int) -> Iterator[None]:
        yield
        move_reference(run, step)


def followers(run: Any) -> Followers | None:
    """Make the callback of a PPO run."""
    if not hasattr(run, "followers"):
        return None
    run.moving_average = Followers(run)
    return run.moving_average


def move_reference(run: Any, step: int) -> None:
    """Let the reference follow the actor (``--ref_ema_eta``), or become a copy of it (``--ref_reset_steps``)."""
    algorithm = run.config.algorithm
    if algorithm.ref_ema_eta is not None:
        run.strategy.moving_average(run.actor, run.initial_model, 1 - algorithm.ref_ema_eta)
    elif algorithm.ref_reset_steps is not None and step % algorithm.ref_reset_steps == 0:
        run.strategy.moving_average(run.actor, run.initial_model, 0.0)
