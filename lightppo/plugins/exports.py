"""Models for transformers while a run goes on: at times of their own, with checkpoints, the best one."""

from lightppo.option import register_section
from lightppo.plugin import WITH_CHECKPOINTS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    WITH_CHECKPOINTS.register("save_hf_ckpt", Entry("lightppo.trainer.exports:with_checkpoint"))
    register_section(
        "exports", "lightppo.config.exports_options:ExportConfig", adds_to="checkpoint"
    )
    register_section("best", "lightppo.config.exports_options:BestConfig", adds_to="evaluation")
