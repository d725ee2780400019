"""Episodes: environments and tools over several turns."""

from lightppo.plugin import PUBLIC


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    for name in ("EnvFailure", "Reply", "Step", "ToolError"):
        PUBLIC[name] = "lightppo.episodes.env_failures"
    PUBLIC["run_program"] = "lightppo.episodes.agents"
