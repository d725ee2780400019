"""Rewards over HTTP: the client, remote rewards, and a server of rewards."""

from lightppo.option import register_section
from lightppo.plugin import COMMANDS, Command


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "serve-reward",
        Command("lightppo.cli.serve_reward:main", about="serve rewards over HTTP"),
    )
    register_section(
        "reward_server", "lightppo.config.http_options:RewardServerConfig", adds_to="reward"
    )
