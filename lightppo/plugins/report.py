"""What a run did: a page, a view in the terminal, differences between runs, a step again."""

from lightppo.plugin import COMMANDS, Command


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "report",
        Command(
            "lightppo.logging.report_page:main",
            about="show what runs did: tables, and a page with curves and samples",
        ),
    )
    COMMANDS.register(
        "watch",
        Command(
            "lightppo.cli.watch:main",
            about="look at a run in the terminal while it goes on",
        ),
    )
    COMMANDS.register(
        "replay",
        Command(
            "lightppo.cli.replay:main",
            about="do a step of a run again, look at it, debug it",
        ),
    )
    COMMANDS.register(
        "diff",
        Command(
            "lightppo.cli.diff:main",
            about="name the first number in which two runs differ",
        ),
    )
