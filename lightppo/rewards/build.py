"""From flags to one reward source. Light to import, so that contradictions are found before any model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightppo.config.micro_batches import MicroBatchSpec
from lightppo.http import check_url, shown_url
from lightppo.rewards.function import FunctionReward
from lightppo.rewards.source import OnFailure, RewardSource
from lightppo.user_code import load_python_function, load_python_object, split_python_spec

if TYPE_CHECKING:
    import torch

RewardKind = Literal["remote", "function", "model"]

_FUNCTION_NAME = "reward_func"
_VERL_NAME = "compute_score"
_COMBINE_NAME = "reward_fn"


def check_reward_options(
    *, remote_rm_url: Sequence[str] | str | None, reward_fn: str | Callable[..., Any] | None, n_reward_models: int
) -> RewardKind:
    """Decides where rewards come from; loads nothing and asks no server.

    ============================ ============================= ==========================
    ``--remote_rm_url``          ``--reward_fn``               ``--reward_pretrain``
    ============================ ============================= ==========================
    http(s) URLs                 –                             –
    ``path.py[:reward_func]``    –                             –
    –                            function, source or its file  –
    –                            combines, needed for several  one or several
    ============================ ============================= ==========================

    Raises:
        ValueError: no source, two of them, an address of another form or a file that is not there; names the flags.
    """
    urls = _as_urls(remote_rm_url)
    if urls and n_reward_models:
        raise ValueError("--remote_rm_url and --reward_pretrain are both set; rewards come from one of them")
    if urls and reward_fn is not None:
        raise ValueError("--remote_rm_url and --reward_fn are both set; rewards come from one of them")
    if isinstance(reward_fn, str):
        default = _COMBINE_NAME if n_reward_models else _FUNCTION_NAME
        split_python_spec(reward_fn, default, option="--reward_fn")
    elif reward_fn is not None and not _is_source(reward_fn) and not callable(reward_fn):
        raise ValueError(f"--reward_fn must be path.py[:name], a function or a reward source, got {reward_fn!r}")
    if n_reward_models:
        if n_reward_models > 1 and reward_fn is None:
            raise ValueError(f"--reward_pretrain has {n_reward_models} models: --reward_fn must say how their scores "
                             "become one: reward_fn([scores (B,), ...]) -> (B,)")  # fmt: skip
        if reward_fn is not None and _is_source(reward_fn):
            raise ValueError("--reward_fn is a reward source of its own, so --reward_pretrain would not be used")
        return "model"
    if reward_fn is not None:
        return "function"
    if not urls:
        raise ValueError("no rewards: set --remote_rm_url (http(s) URL or path.py), --reward_fn or --reward_pretrain")
    return _url_kind(urls)


def build_reward_source(
    *,
    remote_rm_url: Sequence[str] | str | None = None,
    reward_fn: str | Callable[..., Any] | RewardSource | None = None,
    reward_models: Sequence[Callable[..., Any]] = (),
    device: torch.device | str = "cpu",
    pad_token_id: int | None = None,
    micro_batch_size: int | MicroBatchSpec = 8,
    same_count: Callable[[int], int] = lambda count: count,
    remote_timeout: float = 60.0,
    remote_retries: int = 3,
    remote_token: str | None = None,
    on_remote_failure: OnFailure = "error",
    function_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
) -> RewardSource:
    """Makes the reward source that the options of :func:`check_reward_options` describe.

    Args:
        remote_rm_url: servers (see :class:`~lightppo.rewards.remote.RemoteReward`), or one ``path.py[:name]``, by
            default its ``reward_func``, or ``compute_score``.
        reward_fn: without reward models a function (see :class:`~lightppo.rewards.function.FunctionReward`), a
            :class:`RewardSource` or the file of one, by default its ``reward_func`` or ``compute_score``; with reward
            models what combines their tensors, by default the file's ``reward_fn``.
        reward_models: see :class:`~lightppo.rewards.model.RewardModelSource`, as ``device``, ``pad_token_id``,
            ``micro_batch_size`` and ``same_count``, which only models need.
        on_remote_failure: ``on_reward_failure`` of ``RemoteReward``.
        function_options: further arguments of ``FunctionReward``.
        model_options: further arguments of ``RewardModelSource``.
        remote_timeout: seconds of one request; ``remote_retries`` and ``remote_token`` as in ``RemoteReward``.

    Raises:
        ValueError: as :func:`check_reward_options`, or a file that has no such function.
    """
    urls = _as_urls(remote_rm_url)
    kind = check_reward_options(remote_rm_url=urls, reward_fn=reward_fn, n_reward_models=len(reward_models))
    if kind == "remote":
        from lightppo.rewards.remote import RemoteReward

        limits = {"timeout": remote_timeout, "retries": remote_retries, "on_reward_failure": on_remote_failure}
        return RemoteReward(urls, token=remote_token, **limits)
    if kind == "function":
        given, option = (urls[0], "--remote_rm_url") if urls else (reward_fn, "--reward_fn")
        return _function_source(given, option, function_options or {})

    from lightppo.rewards.model import RewardModelSource

    if isinstance(reward_fn, str):
        reward_fn = load_python_function(reward_fn, _COMBINE_NAME, option="--reward_fn")
    if pad_token_id is None:
        raise ValueError("reward models need pad_token_id")
    return RewardModelSource(
        reward_models,
        reward_fn,
        device=device,
        pad_token_id=pad_token_id,
        micro_batch_size=micro_batch_size,
        same_count=same_count,
        **(model_options or {}),
    )


def _as_urls(remote_rm_url: Sequence[str] | str | None) -> list[str]:
    if remote_rm_url is None:
        return []
    return [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url)


def _url_kind(urls: list[str]) -> RewardKind:
    servers = [url for url in urls if "://" in url]
    if not servers and len(urls) == 1:
        split_python_spec(urls[0], _FUNCTION_NAME, option="--remote_rm_url")
        return "function"
    if len(servers) < len(urls):
        raise ValueError(f"--remote_rm_url takes http(s) URLs or one path.py, got {[shown_url(url) for url in urls]}")
    for url in urls:
        check_url(url)
    return "remote"


def _function_source(reward_fn: Any, option: str, options: Mapping[str, Any]) -> RewardSource:
    name = spec = None
    if isinstance(reward_fn, str):
        path, default = split_python_spec(reward_fn, _FUNCTION_NAME, option=option)
        reward_fn = load_python_object(reward_fn, _FUNCTION_NAME, _VERL_NAME, option=option)
        spec = f"{path}:{getattr(reward_fn, '__name__', default)}"
        name = Path(spec).name
    if _is_source(reward_fn):
        return reward_fn
    if isinstance(reward_fn, type) or not callable(reward_fn):
        raise ValueError(f"{option}: {reward_fn!r} is neither a function nor a reward source (an object with 'name' "
                         "and 'score')")  # fmt: skip
    try:
        return FunctionReward(reward_fn, name, spec=spec, **options)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _is_source(value: Any) -> bool:
    return isinstance(value, RewardSource) and not isinstance(value, type)
