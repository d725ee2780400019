"""Sources of reward: models, HTTP servers, Python functions. Names are resolved on first use, as some load torch."""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "AsyncScorer": "lightppo.rewards.source",
    "CombinedReward": "lightppo.rewards.source",
    "RoutedReward": "lightppo.rewards.source",
    "RewardError": "lightppo.errors",
    "RewardOutput": "lightppo.rewards.source",
    "RewardSource": "lightppo.rewards.source",
    "check_output": "lightppo.rewards.source",
    "score_rollouts": "lightppo.rewards.source",
    "FunctionReward": "lightppo.rewards.function",
    "load_python_function": "lightppo.user_code",
    "RemoteReward": "lightppo.plugins.http.remote",
    "read_token": "lightppo.plugins.http.client",
    "RewardModelSource": "lightppo.rewards.model",
    "build_reward_source": "lightppo.rewards.registry",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lightppo.rewards' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
