"""The tape: every reply from outside is written down, and answers a resume or a replay; docs/environments.md."""

from lightppo.plugin import OUTSIDE
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    OUTSIDE.register("tape", Entry("lightppo.episodes.taped_rewards:taped"))
