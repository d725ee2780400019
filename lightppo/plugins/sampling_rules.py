"""What may be sampled, and what ends a response: penalties, words that are never sampled, stop strings."""

from lightppo.option import register_section
from lightppo.plugin import LOGITS, STOPS
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    LOGITS.register("penalties", Entry("lightppo.rollout.penalties:penalties_of"))
    STOPS.register("strings", Entry("lightppo.rollout.stop_strings:StopStrings"))
    register_section(
        "sampling_rules",
        "lightppo.config.sampling_rules_options:SamplingRulesConfig",
        adds_to="rollout",
    )
