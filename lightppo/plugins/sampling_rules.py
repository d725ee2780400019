"""What may be sampled, and what ends a response: penalties, words that are never sampled, stop strings."""

from lightppo.option import register_section
from lightppo.plugin import CHECKS, Check


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    CHECKS.register(
        "sampled_tokens", Check("lightppo.rollout.penalties:check_sampled_tokens", when="tokenizer")
    )
    register_section(
        "sampling_rules",
        "lightppo.config.sampling_rules_options:SamplingRulesConfig",
        adds_to="rollout",
    )
