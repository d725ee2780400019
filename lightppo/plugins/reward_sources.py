"""Several sources of rewards with weights and routes; reward functions of other conventions, in threads and with tries
again; several reward models, other tokenizers."""

from dataclasses import dataclass
from typing import Literal

from lightppo import rewards
from lightppo.plugin import REWARD_SUMS, REWARDS, RewardEntry
from lightppo.table import Entry, Table


@dataclass(frozen=True)
class RewardManager(Entry):
    """A name of ``--reward_manager``: its function makes a ``Runner`` of a ``RunnerRequest``, see lightppo.rewards."""

    calls: Literal["sample", "batch", "either"] = "either"  # what a reward function must take


REWARD_MANAGERS: Table[RewardManager] = Table(
    "--reward_manager",
    {
        name: RewardManager("lightppo.rewards.runners:runner_of", calls=calls)
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
    "--reward_fn_style", {"queries": Entry("lightppo.rewards.function_styles:QUERIES")}
)
"""Conventions of reward functions: an entry names a :class:`lightppo.rewards.function_styles.Style`."""


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    REWARD_SUMS.register("weighted", Entry("lightppo.rewards.weighted_sums:sum_of"))
    REWARDS["function"] = RewardEntry(
        "lightppo.rewards.function_calls:function_reward", flag="reward_fn", outside="perhaps"
    )
    REWARDS["model"] = RewardEntry(
        "lightppo.rewards.reward_models:model_reward", flag="reward_pretrain"
    )
    rewards.PUBLIC.update(
        FunctionReward="lightppo.rewards.function_calls",
        RewardModelSource="lightppo.rewards.reward_models",
        CombinedReward="lightppo.rewards.weighted_sums",
        RoutedReward="lightppo.rewards.weighted_sums",
        build_reward_source="lightppo.rewards.script_sources",
        Runner="lightppo.rewards.reward_calls",
        RunnerRequest="lightppo.rewards.reward_calls",
        Call="lightppo.rewards.reward_calls",
        Outcome="lightppo.rewards.reward_calls",
    )
