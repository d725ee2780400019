"""Signals, hanging ranks, files that survive a crash, URLs of storage."""

from lightppo.option import register_section
from lightppo.plugin import (
    AROUND,
    CALLBACKS,
    CHECKPOINT_CHECKS,
    CHECKPOINT_CHOICES,
    FILES,
    RANK_START,
    CallbackEntry,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    CALLBACKS.register(
        "signals", CallbackEntry("lightppo.plugins.ops.ending:StopAtSignal", after_yours=True)
    )
    AROUND.register("guard", Entry("lightppo.plugins.ops.guard:guarded"))
    RANK_START.register("meeting", Entry("lightppo.plugins.ops.meeting:meeting"))
    FILES.register("kept", Entry("lightppo.plugins.ops.kept:KeptFiles"))
    CHECKPOINT_CHECKS.register("plain", Entry("lightppo.plugins.ops.plain_files:require_plain"))
    CHECKPOINT_CHOICES.register("undamaged", Entry("lightppo.plugins.ops.damaged:last_undamaged"))
    register_section("signals", "lightppo.plugins.ops.sections:SignalConfig", adds_to="checkpoint")
