"""Several sources of rewards with weights and routes; reward functions of other conventions, in threads and with tries
again; several reward models, other tokenizers."""

from dataclasses import dataclass
from typing import Literal

from lightppo import rewards
from lightppo.option import register_section
from lightppo.plugin import CHECKS, REWARD_NAMES, REWARD_SUMS, REWARDS, RULES, Check, RewardEntry
from lightppo.table import Entry, Table

_HERE = "lightppo.plugins.reward_sources"


@dataclass(frozen=True)
class RewardManager(Entry):
    """A name of ``--reward_manager``: its function makes a ``Runner`` of a ``RunnerRequest``, see lightppo.rewards."""

    calls: Literal["sample", "batch", "either"] = "either"  # what a reward function must take


REWARD_MANAGERS: Table[RewardManager] = Table(
    "--reward_manager",
    {
        name: RewardManager(f"{_HERE}.runners:runner_of", calls=calls)
        for name, calls in {
            "auto": "either",
            "naive": "sample",
            "batch": "batch",
            "dapo": "either",
        }.items()
    },
    kind=RewardManager,
)
"""How a reward function is called. A plugin may put another entry in the place of ``auto``."""

REWARD_STYLES: Table = Table(
    "--reward_fn_style", {"queries": Entry(f"{_HERE}.conventions:QUERIES")}
)
"""Conventions of reward functions: an entry names a :class:`lightppo.plugins.reward_sources.conventions.Style`."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    REWARD_NAMES.register("plan", Entry(f"{_HERE}.plan:named_sources"))
    REWARD_SUMS.register("weighted", Entry(f"{_HERE}.sums:sum_of"))
    RULES.register("sources", Entry(f"{_HERE}.plan:source_problems"))
    CHECKS.register("routes", Check(f"{_HERE}.sums:check_routes", when="data"))
    REWARDS["function"] = RewardEntry(
        f"{_HERE}.function_calls:function_reward", flag="reward_fn", outside="perhaps"
    )
    REWARDS["model"] = RewardEntry(f"{_HERE}.reward_models:model_reward", flag="reward_pretrain")
    CHECKS.register(
        "reward_tokenizers",
        Check(f"{_HERE}.reward_inputs:check_reward_tokenizers", when="tokenizer"),
    )
    rewards.PUBLIC.update(
        FunctionReward=f"{_HERE}.function_calls",
        RewardModelSource=f"{_HERE}.reward_models",
        CombinedReward=f"{_HERE}.sums",
        RoutedReward=f"{_HERE}.sums",
        build_reward_source=f"{_HERE}.script_sources",
        Runner=f"{_HERE}.tries",
        RunnerRequest=f"{_HERE}.tries",
        Call=f"{_HERE}.tries",
        Outcome=f"{_HERE}.tries",
    )
    register_section("reward_plan", f"{_HERE}.sections:PlanConfig", adds_to="verifier")
    register_section("functions", f"{_HERE}.sections:FunctionConfig", adds_to="verifier")
    register_section("reward_inputs", f"{_HERE}.sections:InputConfig", adds_to="reward")
