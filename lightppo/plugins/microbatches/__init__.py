"""Micro batches by numbers of tokens, and of sizes of their own for single calls."""

from lightppo.option import register_section
from lightppo.plugin import MICRO_BATCHES
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.microbatches"
    MICRO_BATCHES.register("options", Entry(f"{here}.sections:asked_spec"))
    register_section("micro_batches", f"{here}.sections:MicroBatchesConfig", adds_to="training")
