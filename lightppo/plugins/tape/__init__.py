"""The tape: every reply from outside is written down, and answers a resume or a replay; docs/environments.md."""

from lightppo.option import register_section
from lightppo.plugin import BEFORE_IMPORTS, CALLBACKS, CHECKS, OUTSIDE, CallbackEntry, Check
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.tape"
    register_section("tape", f"{here}.sections:TapeConfig")
    OUTSIDE.register("tape", Entry(f"{here}.taped_rewards:taped"))
    BEFORE_IMPORTS.register("tape", Entry(f"{here}.before_playing:look"))
    CHECKS.register("tape", Check(f"{here}.before_playing:check_played"))
    CALLBACKS.register("tape", CallbackEntry(f"{here}.keeping:keeper"))
