"""Episodes: environments and tools over several turns."""

from lightppo.option import register_section
from lightppo.plugin import (
    CALLBACKS,
    CHECKS,
    ENGINE_WRAPPERS,
    METRICS,
    PUBLIC,
    REWARD_WRAPPERS,
    REWARDS,
    CallbackEntry,
    Check,
    RewardEntry,
)
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    here = "lightppo.plugins.episodes"
    register_section("episodes", f"{here}.sections:EpisodesConfig")
    ENGINE_WRAPPERS.register("episodes", Entry(f"{here}.assembly:around"))
    CHECKS.register("openings", Check(f"{here}.assembly:check_openings", when="engine"))
    REWARDS.register("environment", RewardEntry(f"{here}.rewards:environment_reward"))
    REWARD_WRAPPERS.register("failed_episodes", Entry(f"{here}.rewards:unless_failed"))
    CALLBACKS.register("episode_metrics", CallbackEntry(f"{here}.tally:episode_metrics"))
    METRICS.register(
        "episode",
        f"{here}.tally:names",
        about="the episodes of this step (`--env`, `--tools`), all that were played; "
        "those of an evaluation are in `eval/episode/`",
    )
    METRICS.register("perf", f"{here}.tally:clocked_names")
    for name in ("EnvFailure", "Reply", "Step", "ToolError"):
        PUBLIC[name] = f"{here}.contract"
    PUBLIC["run_program"] = f"{here}.agents"
