"""Sources of reward: models, HTTP servers, Python functions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "RemoteReward": "lightppo.rewards.remote",
    "read_token": "lightppo.http",
    "RewardModelSource": "lightppo.rewards.model",
    "build_reward_source": "lightppo.rewards.registry",
    "check_reward_options": "lightppo.rewards.registry",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lightppo.rewards' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from lightppo.errors import RewardError as RewardError
    from lightppo.http import read_token as read_token
    from lightppo.rewards.function import FunctionReward as FunctionReward
    from lightppo.rewards.model import RewardModelSource as RewardModelSource
    from lightppo.rewards.registry import build_reward_source as build_reward_source
    from lightppo.rewards.registry import check_reward_options as check_reward_options
    from lightppo.rewards.remote import RemoteReward as RemoteReward
    from lightppo.rewards.source import AsyncScorer as AsyncScorer
    from lightppo.rewards.source import CombinedReward as CombinedReward
    from lightppo.rewards.source import RewardOutput as RewardOutput
    from lightppo.rewards.source import RewardSource as RewardSource
    from lightppo.rewards.source import RoutedReward as RoutedReward
    from lightppo.rewards.source import check_output as check_output
    from lightppo.rewards.source import score_rollouts as score_rollouts
    from lightppo.user_code import load_python_function as load_python_function
