"""Signals, hanging ranks, files that survive a crash, URLs of storage."""

from lightppo.option import register_section
from lightppo.plugin import (
    AROUND,
    CHECKPOINT_CHECKS,
    CHECKPOINT_CHOICES,
    FILES,
    RANK_START,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    AROUND.register("guard", Entry("lightppo.distributed.rank_guard:guarded"))
    RANK_START.register("meeting", Entry("lightppo.distributed.rendezvous:meeting"))
    FILES.register("kept", Entry("lightppo.checkpoint.run_files:KeptFiles"))
    CHECKPOINT_CHECKS.register("plain", Entry("lightppo.checkpoint.plain_files:require_plain"))
    CHECKPOINT_CHOICES.register(
        "undamaged", Entry("lightppo.checkpoint.damaged_checkpoints:last_undamaged")
    )
    register_section("signals", "lightppo.config.ops_options:SignalConfig", adds_to="checkpoint")
