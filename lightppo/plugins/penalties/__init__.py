"""Penalties of tokens that are there already, and words that are never sampled."""

from lightppo.option import register_section
from lightppo.plugin import CHECKS, LOGITS, Check
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.penalties"
    LOGITS.register("penalties", Entry(f"{here}.logits:penalties_of"))
    CHECKS.register(
        "sampled_tokens", Check(f"{here}.logits:check_sampled_tokens", when="tokenizer")
    )
    register_section("penalties", f"{here}.sections:PenaltyConfig", adds_to="rollout")
