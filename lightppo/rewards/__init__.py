"""Sources of reward: models, HTTP servers, Python functions. Names are resolved on first use, as some load torch."""

from importlib import import_module
from typing import Any

PUBLIC = {
    "RewardError": "lightppo.errors",
    "RewardOutput": "lightppo.rewards.reward_source",
    "RewardSource": "lightppo.rewards.reward_source",
    "RewardRequest": "lightppo.rewards.reward_source",
    "check_output": "lightppo.rewards.reward_source",
    "score_rollouts": "lightppo.rewards.reward_source",
    "FunctionReward": "lightppo.rewards.function",
    "load_python_function": "lightppo.user_code",
    "RewardModelSource": "lightppo.rewards.reward_model",
    "RemoteReward": "lightppo.rewards.remote",
    "read_token": "lightppo.http_client",
    "CombinedReward": "lightppo.rewards.registry",
    "RoutedReward": "lightppo.rewards.registry",
    "build_reward_source": "lightppo.rewards.registry",
    "AsyncScorer": "lightppo.rewards.reward_source",
}
"""What ``from lightppo.rewards import NAME`` imports, by name: the module."""


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'lightppo.rewards' has no attribute {name!r}")
    value = getattr(import_module(PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(PUBLIC)
