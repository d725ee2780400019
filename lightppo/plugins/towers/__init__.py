"""Text training of checkpoints with image or audio towers, which stay as they came."""

from lightppo.plugin import CHECKS, LANGUAGE_MODELS, UNTRAINABLE, Check
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.towers.recognised"
    LANGUAGE_MODELS.register("towers", Entry(f"{here}:language_model"))
    UNTRAINABLE.register("towers", Entry(f"{here}:untrainable"))
    CHECKS.register(
        "towers", Check("lightppo.plugins.towers.trained:check_trained_models", when="tokenizer")
    )
