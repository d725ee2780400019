"""Text training of checkpoints with image or audio towers, which stay as they came."""

from lightppo.plugin import CHECKPOINT_CHECKS, CHECKPOINT_NOTES, LANGUAGE_MODELS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    LANGUAGE_MODELS.register("towers", Entry("lightppo.plugins.towers.whole:language_model"))
    CHECKPOINT_NOTES.register("towers", Entry("lightppo.plugins.towers.whole:note"))
    CHECKPOINT_CHECKS.register("towers", Entry("lightppo.plugins.towers.whole:check"))
