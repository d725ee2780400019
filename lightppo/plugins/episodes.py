"""Episodes: environments and tools over several turns."""

from lightppo.plugin import (
    PUBLIC,
    REWARD_WRAPPERS,
    REWARDS,
    RewardEntry,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    REWARDS.register("environment", RewardEntry("lightppo.episodes.rewards:environment_reward"))
    REWARD_WRAPPERS.register("failed_episodes", Entry("lightppo.episodes.rewards:unless_failed"))
    for name in ("EnvFailure", "Reply", "Step", "ToolError"):
        PUBLIC[name] = "lightppo.episodes.env_failures"
    PUBLIC["run_program"] = "lightppo.episodes.agents"
