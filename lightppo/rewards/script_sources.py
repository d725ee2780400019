"""The reward source of a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightppo import rewards
from lightppo.config.reward_plan import is_file_alone
from lightppo.plugin import REWARDS
from lightppo.rewards.function_calls import function_source
from lightppo.rewards.reward_source import RewardSource


def build_reward_source(
    *,
    remote_rm_url: Sequence[str] | str | None = None,
    reward_fn: str | Callable[..., Any] | RewardSource | None = None,
    reward_models: Sequence[Callable[..., Any]] = (),
    remote_options: Mapping[str, Any] | None = None,
    function_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
) -> RewardSource:
    """Makes a reward source of servers, of a function, or of models.

    Args:
        remote_rm_url: servers, or one ``path.py[:name]``, by default its ``reward_func`` or ``compute_score``.
        reward_fn: a function, a :class:`RewardSource` or a file with either; with reward models, the function that
            combines their tensors, in a file by default ``reward_fn``.
        remote_options, function_options, model_options: further arguments of
            ``lightppo.rewards.RemoteReward``, :class:`~lightppo.rewards.function.FunctionReward` and
            :class:`~lightppo.rewards.model.RewardModelSource`.
    """
    urls = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or ())
    if urls and (reward_models or reward_fn is not None):
        other = "--reward_pretrain" if reward_models else "--reward_fn"
        raise ValueError(f"--remote_rm_url and {other} are both set; rewards come from one of them")
    if reward_models:
        from lightppo.rewards.reward_models import source_of_models  # loads torch

        return source_of_models(reward_models, reward_fn, model_options or {})
    if is_file_alone(urls):
        return function_source(urls[0], "--remote_rm_url", function_options)
    if urls:
        REWARDS.find("server")  # an error where no plugin brings it
        return rewards.RemoteReward(urls, **(remote_options or {}))
    if reward_fn is None:
        raise ValueError(
            "no rewards: set --remote_rm_url (http(s) URL or path.py), --reward_fn or --reward_pretrain"
        )
    return function_source(reward_fn, "--reward_fn", function_options)
