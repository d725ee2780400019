"""Checkpoints for another number of ranks, or another ZeRO stage."""

from lightppo.plugin import CHECKPOINT_LOADERS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    CHECKPOINT_LOADERS.register("reshape", Entry("lightppo.checkpoint.reshape:load_reshaped"))
