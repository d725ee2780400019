"""A moving average of the actor, and a reference that follows it."""

from lightppo.plugin import STRATEGY_METHODS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    STRATEGY_METHODS.register(
        "moving_average", Entry("lightppo.trainer.moving_average:moving_average")
    )
