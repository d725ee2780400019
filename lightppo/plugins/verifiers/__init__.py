"""Rewards that check answers: mathematics, formats, programs; and worker processes for reward functions."""

from lightppo.option import register_section
from lightppo.plugin import REWARD_MANAGERS, REWARD_WRAPPERS, REWARDS, RewardEntry, RewardManager
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.verifiers"
    REWARDS.register("math", RewardEntry(f"{here}.math:math_reward", check_prompt=f"{here}.math:check_prompt"))
    REWARDS.register("format", RewardEntry(f"{here}.formats:format_reward"))
    REWARDS.register("code", RewardEntry(f"{here}.programs:code_reward", check_prompt=f"{here}.code:find_tests"))
    REWARD_WRAPPERS.register("check_xml_format", Entry(f"{here}.formats:with_xml_format"))
    REWARD_MANAGERS.register("prime", RewardManager(f"{here}.processes:runner_of"))
    register_section("built_in", "lightppo.plugins.verifiers.sections:BuiltInConfig", adds_to="verifier")
