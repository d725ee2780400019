"""What may be sampled, and what ends a response: penalties, words that are never sampled, stop strings."""

from lightppo.option import register_section
from lightppo.plugin import CHECKS, LOGITS, STOPS, Check
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.sampling_rules"
    LOGITS.register("penalties", Entry(f"{here}.penalties:penalties_of"))
    CHECKS.register(
        "sampled_tokens", Check(f"{here}.penalties:check_sampled_tokens", when="tokenizer")
    )
    STOPS.register("strings", Entry(f"{here}.stop_strings:StopStrings"))
    register_section("sampling_rules", f"{here}.sections:SamplingRulesConfig", adds_to="rollout")
