"""Rewards that check answers, in the background or not, and processes that call reward functions."""

from lightppo import rewards
from lightppo.plugin import REWARD_WRAPPERS, REWARDS, SCORED, SCORERS, RewardEntry
from lightppo.plugins.reward_sources import REWARD_MANAGERS, RewardManager
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    REWARDS.register(
        "math",
        RewardEntry(
            "lightppo.verifiers.math:math_reward",
            check_prompt="lightppo.verifiers.math:check_prompt",
        ),
    )
    REWARDS.register("format", RewardEntry("lightppo.verifiers.formats:format_reward"))
    REWARDS.register(
        "code",
        RewardEntry(
            "lightppo.verifiers.programs:code_reward",
            check_prompt="lightppo.verifiers.code:find_tests",
        ),
    )
    REWARD_WRAPPERS.register(
        "check_xml_format", Entry("lightppo.verifiers.formats:with_xml_format")
    )
    SCORERS.register("async_rewards", Entry("lightppo.rollout.async_scorer:scorer_of"))
    SCORED.register("check_verifier_status", Entry("lightppo.verifiers.status:status_check"))
    rewards.PUBLIC["AsyncScorer"] = "lightppo.rollout.async_scorer"
    REWARD_MANAGERS.register("prime", RewardManager("lightppo.verifiers.processes:runner_of"))
