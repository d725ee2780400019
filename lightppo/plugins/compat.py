"""The constructor, arguments and call forms of the seed, and reward functions of other trainers."""

from lightppo.plugins.reward_sources import REWARD_STYLES
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    for name in ("verl", "verl_batch", "trl", "areal"):
        REWARD_STYLES.register(name, Entry(f"lightppo.rewards.reward_styles:{name.upper()}"))
