"""Text training of checkpoints with image or audio towers, which stay as they came."""

from lightppo.plugin import CHECKS, LANGUAGE_MODELS, UNTRAINABLE, Check
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    LANGUAGE_MODELS.register("towers", Entry("lightppo.models.multimodal.detection:read_part"))
    UNTRAINABLE.register("towers", Entry("lightppo.models.multimodal.detection:untrainable"))
    CHECKS.register(
        "towers",
        Check("lightppo.models.multimodal.trained_parts:check_trained_models", when="tokenizer"),
    )
