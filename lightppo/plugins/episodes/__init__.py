"""Episodes: environments and tools over several turns."""

from lightppo.option import register_section
from lightppo.plugin import ENGINE_WRAPPERS, PUBLIC, REWARD_WRAPPERS, REWARDS, RewardEntry
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.episodes"
    register_section("episodes", f"{here}.sections:EpisodesConfig")
    ENGINE_WRAPPERS.register("episodes", Entry(f"{here}.assembly:around"))
    REWARDS.register("environment", RewardEntry(f"{here}.rewards:environment_reward"))
    REWARD_WRAPPERS.register("failed_episodes", Entry(f"{here}.rewards:unless_failed"))
    for name in ("EnvFailure", "Reply", "Step", "ToolError"):
        PUBLIC[name] = f"{here}.contract"
