"""Rewards over HTTP: the client, remote rewards, and a server of rewards."""

from lightppo import rewards
from lightppo.option import register_section
from lightppo.plugin import COMMANDS, REWARDS, Command, RewardEntry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "serve-reward",
        Command("lightppo.cli.serve_reward:main", about="serve rewards over HTTP"),
    )
    REWARDS.register(
        "server",
        RewardEntry("lightppo.rewards.remote:server_reward", flag="remote_rm_url", outside="yes"),
    )
    rewards.PUBLIC.update(RemoteReward="lightppo.rewards.remote", read_token="lightppo.http_client")
    register_section(
        "reward_server", "lightppo.config.http_options:RewardServerConfig", adds_to="reward"
    )
