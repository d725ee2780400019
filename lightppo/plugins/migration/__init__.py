"""The names that other trainers have for options."""

from lightppo.plugin import HINTS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    HINTS.register("other_trainers", Entry("lightppo.plugins.migration.names:hint"))
