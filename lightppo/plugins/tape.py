"""The tape: every reply from outside is written down, and answers a resume or a replay; docs/environments.md."""

from lightppo.option import register_section
from lightppo.plugin import BEFORE_IMPORTS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section("tape", "lightppo.config.tape_options:TapeConfig")
    BEFORE_IMPORTS.register("tape", Entry("lightppo.episodes.tape_files:look"))
