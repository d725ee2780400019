"""Episodes: environments and tools over several turns."""

from lightppo.option import register_section
from lightppo.plugin import METRICS, PUBLIC


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    register_section("episodes", "lightppo.config.episodes_options:EpisodesConfig")
    METRICS.register(
        "episode",
        "lightppo.episodes.episode_metrics:names",
        about="the episodes of this step (`--env`, `--tools`), all that were played; "
        "those of an evaluation are in `eval/episode/`",
    )
    METRICS.register("perf", "lightppo.episodes.episode_metrics:clocked_names")
    for name in ("EnvFailure", "Reply", "Step", "ToolError"):
        PUBLIC[name] = "lightppo.episodes.env_failures"
    PUBLIC["run_program"] = "lightppo.episodes.agents"
