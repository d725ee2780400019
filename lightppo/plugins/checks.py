"""What can be known before a run: options, files, memory, a rehearsal."""

from lightppo.plugin import (
    RANK_START,
    RESUMES,
    STRATEGY_METHODS,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    RESUMES.register("options", Entry("lightppo.preflight.resume_checks:check_same_run"))
    STRATEGY_METHODS.register("report_memory", Entry("lightppo.preflight.run_checks:report_memory"))
    RANK_START.register("type", Entry("lightppo.distributed.device_type:trainable_type"))
