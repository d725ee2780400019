"""Rewards over HTTP: the client, remote rewards, and a server of rewards."""

from lightppo.plugin import COMMANDS, Command


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "serve-reward", Command("lightppo.plugins.http.serve_reward:main", about="serve rewards over HTTP")
    )
