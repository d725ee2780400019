"""What a run did: a page, a view in the terminal, differences between runs, a step again."""

from lightppo.plugin import CALLBACKS, COMMANDS, CallbackEntry, Command


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "report",
        Command(
            "lightppo.plugins.report.page:main",
            about="show what runs did: tables, and a page with curves and samples",
        ),
    )
    COMMANDS.register(
        "watch",
        Command(
            "lightppo.plugins.report.watch:main",
            about="look at a run in the terminal while it goes on",
        ),
    )
    COMMANDS.register(
        "replay",
        Command(
            "lightppo.plugins.report.replay:main",
            about="do a step of a run again, look at it, debug it",
        ),
    )
    COMMANDS.register(
        "diff",
        Command(
            "lightppo.plugins.report.diff:main",
            about="name the first number in which two runs differ",
        ),
    )
    CALLBACKS.register(
        "summary", CallbackEntry("lightppo.plugins.report.page:Summary", after_yours=True)
    )
