"""Rewards that check answers, in the background or not, and processes that call reward functions."""

from lightppo import rewards
from lightppo.option import register_section
from lightppo.plugin import REWARD_WRAPPERS, REWARDS, SCORED, SCORERS, RewardEntry
from lightppo.plugins.reward_sources import REWARD_MANAGERS, RewardManager
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.verifiers"
    REWARDS.register(
        "math", RewardEntry(f"{here}.math:math_reward", check_prompt=f"{here}.math:check_prompt")
    )
    REWARDS.register("format", RewardEntry(f"{here}.formats:format_reward"))
    REWARDS.register(
        "code", RewardEntry(f"{here}.programs:code_reward", check_prompt=f"{here}.code:find_tests")
    )
    REWARD_WRAPPERS.register("check_xml_format", Entry(f"{here}.formats:with_xml_format"))
    SCORERS.register("async_rewards", Entry(f"{here}.background:scorer_of"))
    SCORED.register("check_verifier_status", Entry(f"{here}.status:status_check"))
    rewards.PUBLIC["AsyncScorer"] = f"{here}.background"
    REWARD_MANAGERS.register("prime", RewardManager(f"{here}.processes:runner_of"))
    register_section(
        "built_in", "lightppo.plugins.verifiers.sections:BuiltInConfig", adds_to="verifier"
    )
