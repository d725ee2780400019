"""What can be known before a run: options, files, memory, a rehearsal."""

from lightppo.option import register_section
from lightppo.plugin import (
    BEFORE_IMPORTS,
    COMMANDS,
    MICRO_BATCHES,
    Command,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "memory",
        Command(
            "lightppo.cli.memory_command:main",
            about="what a run needs of GPUs and hosts, before anything loads",
        ),
    )
    register_section(
        "micro_batches", "lightppo.config.micro_batch_specs:MicroBatchConfig", adds_to="training"
    )
    MICRO_BATCHES.register("specs", Entry("lightppo.config.micro_batch_specs:spec_of"))
    BEFORE_IMPORTS.register("files", Entry("lightppo.preflight.before_imports:look"))
