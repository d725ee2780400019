"""A moving average of the actor, and a reference that follows it."""

from lightppo.option import register_section
from lightppo.plugin import CALLBACKS, FOLLOWERS, STRATEGY_METHODS, CallbackEntry
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.averages"
    FOLLOWERS.register("ema", Entry(f"{here}.sections:has_average"))
    FOLLOWERS.register("reference", Entry(f"{here}.sections:moves_reference"))
    CALLBACKS.register("followers", CallbackEntry(f"{here}.moving:followers"))
    STRATEGY_METHODS.register("moving_average", Entry(f"{here}.moving:moving_average"))
    register_section("averages", f"{here}.sections:AverageConfig", adds_to="algorithm")
