"""Rewards over HTTP: the client, remote rewards, and a server of rewards."""

from lightppo.plugin import CHECKS, COMMANDS, Check, Command


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "serve-reward", Command("lightppo.plugins.http.serve_reward:main", about="serve rewards over HTTP")
    )
    CHECKS.register("tokens", Check("lightppo.plugins.http.client:check_tokens"))
