"""``--help``, options without effect, and what a mistyped or unknown name may have meant."""

from lightppo.plugin import HELP, NOTES, RULES
from lightppo.suggestions import ASKED
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``, and let the core ask it what names mean."""
    for function in ("nearest", "wrong_value"):
        ASKED[function] = f"lightppo.plugins.hints.mistakes:{function}"
    HELP.register("screen", Entry("lightppo.plugins.hints.help_page:help_text"))
    RULES.register("needs", Entry("lightppo.plugins.hints.needs:problems"))
    RULES.register("critic", Entry("lightppo.plugins.hints.needs:of_critic"))
    NOTES.register("needs", Entry("lightppo.plugins.hints.needs:notes"))
