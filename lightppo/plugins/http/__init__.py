"""Rewards over HTTP: the client, remote rewards, and a server of rewards."""

from lightppo import rewards
from lightppo.option import register_section
from lightppo.plugin import CHECKS, COMMANDS, REWARDS, Check, Command, RewardEntry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "serve-reward",
        Command("lightppo.plugins.http.serve_reward:main", about="serve rewards over HTTP"),
    )
    CHECKS.register("tokens", Check("lightppo.plugins.http.client:check_tokens"))
    REWARDS.register(
        "server",
        RewardEntry(
            "lightppo.plugins.http.remote:server_reward", flag="remote_rm_url", outside="yes"
        ),
    )
    rewards.PUBLIC.update(
        RemoteReward="lightppo.plugins.http.remote", read_token="lightppo.plugins.http.client"
    )
    register_section(
        "reward_server", "lightppo.plugins.http.sections:RewardServerConfig", adds_to="reward"
    )
