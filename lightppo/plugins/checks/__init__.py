"""What can be known before a run: options, files, memory, a rehearsal."""

from lightppo.plugin import COMMANDS, Command


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "memory",
        Command(
            "lightppo.plugins.checks.memory:main", about="what a run needs of GPUs and hosts, before anything loads"
        ),
    )
