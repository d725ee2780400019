"""Text training of checkpoints with image or audio towers, which stay as they came."""

from lightppo.plugin import LANGUAGE_MODELS, UNTRAINABLE
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    LANGUAGE_MODELS.register("towers", Entry("lightppo.models.multimodal.detection:read_part"))
    UNTRAINABLE.register("towers", Entry("lightppo.models.multimodal.detection:untrainable"))
