"""Models for transformers while a run goes on: at times of their own, with checkpoints, the best one."""

from lightppo.plugin import WITH_CHECKPOINTS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    WITH_CHECKPOINTS.register("save_hf_ckpt", Entry("lightppo.trainer.exports:with_checkpoint"))
