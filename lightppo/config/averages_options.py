"""Options of models that follow the actor; docs/algorithms.md."""

from functools import partial
from typing import Any

from lightppo.option import Section, option

kl = partial(option, needs="init_kl_coef>0")


class AverageConfig(Section, adds_to="algorithm"):
    """A moving average of the actor, and a reference that moves."""

    ref_ema_eta: float | None = kl(
        None,
        "After each step set the reference to (1 - η)·reference + η·actor.",
        gt=0,
        le=1,
        off=(0,),
    )
    ref_reset_steps: int | None = kl(
        None, "Copy the actor to the reference every N steps.", "PPO steps", ge=1
    )
    enable_ema: bool = option(
        False, "Keep an exponential moving average of the actor and save it at the end."
    )
    ema_beta: float = option(0.992, "Decay of the moving average.", ge=0, lt=1, needs="enable_ema")

    exclusive = (("ref_ema_eta", "ref_reset_steps", "both move the reference"),)


def has_average(config: Any) -> bool:
    """``--enable_ema``."""
    return config.algorithm.enable_ema


def moves_reference(config: Any) -> bool:
    """Whether the reference changes during the run."""
    return config.algorithm.ref_ema_eta is not None or config.algorithm.ref_reset_steps is not None
