"""What can be known before a run: options, files, memory, a rehearsal."""

from lightppo.plugin import COMMANDS, FITTED, Command
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "memory",
        Command(
            "lightppo.plugins.checks.memory:main", about="what a run needs of GPUs and hosts, before anything loads"
        ),
    )
    FITTED.register("micro_rollout_batch_size", Entry("lightppo.plugins.checks.budget:rows_that_fit"))
