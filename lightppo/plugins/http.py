"""Rewards over HTTP: the client, remote rewards, and a server of rewards."""

from lightppo import rewards
from lightppo.plugin import REWARDS, RewardEntry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    REWARDS.register(
        "server",
        RewardEntry("lightppo.rewards.remote:server_reward", flag="remote_rm_url", outside="yes"),
    )
    rewards.PUBLIC.update(RemoteReward="lightppo.rewards.remote", read_token="lightppo.http_client")
