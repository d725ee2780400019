"""``--help``, options without effect, and what a mistyped or unknown name may have meant."""

from lightppo.plugin import HELP, NOTES, RULES
from lightppo.suggestions import ASKED
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``, and let the core ask it what names mean."""
    for function in ("nearest", "wrong_value"):
        ASKED[function] = f"lightppo.config.option_errors:{function}"
    HELP.register("screen", Entry("lightppo.config.help_page:help_text"))
    RULES.register("needs", Entry("lightppo.config.option_needs:problems"))
    RULES.register("critic", Entry("lightppo.config.option_needs:of_critic"))
    NOTES.register("needs", Entry("lightppo.config.option_needs:notes"))
