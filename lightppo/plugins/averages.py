"""A moving average of the actor, and a reference that follows it."""

from lightppo.option import register_section
from lightppo.plugin import FOLLOWERS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    FOLLOWERS.register("ema", Entry("lightppo.config.averages_options:has_average"))
    FOLLOWERS.register("reference", Entry("lightppo.config.averages_options:moves_reference"))
    register_section(
        "averages", "lightppo.config.averages_options:AverageConfig", adds_to="algorithm"
    )
