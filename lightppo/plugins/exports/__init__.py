"""Models for transformers while a run goes on: at times of their own, with checkpoints, the best one."""

from lightppo.option import register_section
from lightppo.plugin import CALLBACKS, WITH_CHECKPOINTS, CallbackEntry
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.exports"
    CALLBACKS.register("exports", CallbackEntry(f"{here}.periodic:Exports"))
    WITH_CHECKPOINTS.register("save_hf_ckpt", Entry(f"{here}.periodic:with_checkpoint"))
    register_section("exports", f"{here}.sections:ExportConfig", adds_to="checkpoint")
    register_section("best", f"{here}.sections:BestConfig", adds_to="evaluation")
