"""The names that other trainers have for options, and their commands in ours."""

from lightppo.plugin import COMMANDS, HINTS, Command
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    HINTS.register("other_trainers", Entry("lightppo.cli.other_trainers:hint"))
    COMMANDS.register(
        "translate",
        Command(
            "lightppo.cli.translate:main",
            about="write a command of another trainer as one of ours",
        ),
    )
