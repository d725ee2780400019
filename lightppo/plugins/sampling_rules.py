"""What may be sampled, and what ends a response: penalties, words that are never sampled, stop strings."""

from lightppo.option import register_section


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section(
        "sampling_rules",
        "lightppo.config.sampling_rules_options:SamplingRulesConfig",
        adds_to="rollout",
    )
