"""Text training of checkpoints with image or audio towers, which stay as they came."""

from lightppo.plugin import (
    CHECKPOINT_CHECKS,
    CHECKPOINT_NOTES,
    CHECKS,
    LANGUAGE_MODELS,
    UNTRAINABLE,
    Check,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.towers.recognised"
    LANGUAGE_MODELS.register("towers", Entry(f"{here}:read_part"))
    UNTRAINABLE.register("towers", Entry(f"{here}:untrainable"))
    CHECKPOINT_NOTES.register("towers", Entry("lightppo.plugins.towers.whole:note"))
    CHECKPOINT_CHECKS.register("towers", Entry("lightppo.plugins.towers.whole:check"))
    CHECKS.register(
        "towers", Check("lightppo.plugins.towers.trained:check_trained_models", when="tokenizer")
    )
