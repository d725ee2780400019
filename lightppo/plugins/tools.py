"""Small commands: data, chat, convert, merge, tiny models."""

from lightppo.plugin import COMMANDS, Command


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "data",
        Command(
            "lightppo.cli.data:main",
            about="look at rows as a model will see them; convert data sets",
        ),
    )
    COMMANDS.register(
        "chat",
        Command(
            "lightppo.cli.chat:main",
            about="talk to a model, in a terminal or through a pipe",
        ),
    )
    COMMANDS.register(
        "convert",
        Command(
            "lightppo.cli.convert:convert",
            about="write a training checkpoint as a Hugging Face folder",
        ),
    )
    COMMANDS.register(
        "merge",
        Command(
            "lightppo.cli.convert:merge",
            about="write a LoRA adapter and its base as one model",
        ),
    )
    COMMANDS.register(
        "tiny-model",
        Command(
            "lightppo.cli.tiny_model:main",
            about="make a small random model to try things with",
        ),
    )
