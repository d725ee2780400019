"""Makes one reward source from a config, or from options one by one; loads heavy packages only when needed.

A new built-in source needs a file with its class, whose arguments are its options; lines in ``BUILT_IN_SOURCES`` and in
``BUILT_IN`` of ``config.rules``; the options in ``config.verifier_section``; a test; a section in docs/rewards.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightppo.config import PPOConfig, VerifierConfig
from lightppo.config.rules import ANY_ROUTE, MicroBatchSpec, Plan, micro_batch_spec, reward_plan
from lightppo.errors import ConfigError
from lightppo.http import check_url, read_token, shown_url
from lightppo.ranks import Ranks
from lightppo.rewards.code import CodeReward, CodeVerifier, Comparison, SandboxVerifier
from lightppo.rewards.formats import FormatReward, XmlFormatCheck
from lightppo.rewards.function import FunctionReward
from lightppo.rewards.math import MathReward
from lightppo.rewards.remote import RemoteReward
from lightppo.rewards.services import FunctionCallVerifier, SandboxFusionVerifier
from lightppo.rewards.source import CombinedReward, OnFailure, RewardSource, RoutedReward
from lightppo.sandbox import SandboxLimits, SandboxPool
from lightppo.user_code import load_python_function, load_python_object, split_python_spec

if TYPE_CHECKING:
    import torch

    from lightppo.rewards.model import RewardInputs

RewardKind = Literal["remote", "function", "model"]

_FUNCTION_NAME = "reward_func"
_VERL_NAME = "compute_score"
_COMBINE_NAME = "reward_fn"


# --- the sources of a run


def build_reward(config: PPOConfig, reward_models: Sequence[Any], tokenizer: Any, ranks: Ranks) -> RewardSource:
    """The reward source of a run: servers, a Python file, the prepared reward models, built-in verifiers, or a sum."""
    r, v = config.reward, config.verifier
    try:
        function = {"reward_fn": r.reward_fn, "function_options": function_options(v)}
        server = {
            "remote_rm_url": r.remote_rm_url,
            "remote_timeout": r.remote_rm_timeout,
            "remote_retries": r.remote_rm_retries,
            "remote_token": read_token(env=r.remote_rm_token_env),
            "on_remote_failure": v.on_reward_failure or "error",
        }
        model: dict[str, Any] = {}
        if reward_models:
            model = {
                "reward_models": reward_models,
                "device": ranks.device,
                "pad_token_id": tokenizer.pad_token_id,
                "micro_batch_size": micro_batch_spec(config, "reward"),
                "ranks": ranks,
                "model_options": {
                    "inputs": reward_inputs(config, tokenizer),
                    "reward_max_length": r.reward_max_length,
                    "reward_truncation": r.reward_truncation,
                },
            }
        plan = reward_plan(config)
        if plan is None:
            source = build_reward_source(**function, **server, **model)
        else:
            combine = {"reward_fn": r.reward_fn} if len(reward_models) > 1 else {}
            own = {
                "function": partial(build_reward_source, **function),
                "server": partial(build_reward_source, **server, function_options=function_options(v)),
                "model": partial(build_reward_source, **model, **combine),
            }
            source = planned_source(plan, v, own)
        return XmlFormatCheck(source, minimum=v.reward_minimum) if v.check_xml_format else source
    except ValueError as error:
        raise ConfigError(str(error)) from error


def planned_source(plan: Plan, config: VerifierConfig, own: Mapping[str, Callable[[], RewardSource]]) -> RewardSource:
    """The source of ``--reward_source`` or ``--reward_routes``; ``own`` makes function, server and model sources."""
    makers = {name: partial(make, config) for name, make in BUILT_IN_SOURCES.items()} | dict(own)
    made = {name: makers[name]() for name in dict.fromkeys(name for weights in plan.values() for name in weights)}
    routes = {route: [(made[name], weight) for name, weight in weights.items()] for route, weights in plan.items()}
    if list(routes) != [ANY_ROUTE]:
        return RoutedReward(routes, by=config.reward_routes_by)
    pairs = routes[ANY_ROUTE]
    return pairs[0][0] if len(pairs) == 1 and pairs[0][1] == 1.0 else CombinedReward(dict(pairs))


def reward_inputs(config: PPOConfig, tokenizer: Any) -> list[RewardInputs]:
    """What reward models read: the actor's ids, or the chat in the template and ids of their own tokenizers."""
    from transformers import AutoTokenizer

    from lightppo.data.readers import stage_to_local
    from lightppo.rewards.model import Retemplated, SameIds, check_same_ids

    m = config.model
    load = partial(
        AutoTokenizer.from_pretrained, trust_remote_code=m.trust_remote_code, use_fast=not m.disable_fast_tokenizer
    )
    if config.reward.reward_input_tokenizer:
        return [Retemplated(load(stage_to_local(path))) for path in config.reward.reward_input_tokenizer]
    for path in m.reward_pretrain:
        folder = stage_to_local(path)
        if Path(folder, "tokenizer_config.json").is_file():
            check_same_ids(tokenizer, load(folder), path)
    return [SameIds(tokenizer.pad_token_id, tokenizer.bos_token_id)]


# --- built-in sources


def math_source(config: VerifierConfig) -> MathReward:
    """``math``: the final answer equals the label."""
    return _make(MathReward, config, on_reward_failure=config.on_reward_failure or "unscored")


def format_source(config: VerifierConfig) -> FormatReward:
    """``format``: the response has the tags."""
    return _make(FormatReward, config)


def code_source(config: VerifierConfig) -> CodeReward:
    """``code``: the program passes its tests."""
    failure = config.on_reward_failure or "unscored"
    return _make(CodeReward, config, verifier=_verifier(config), on_reward_failure=failure)


def _verifier(config: VerifierConfig) -> CodeVerifier:
    """Runs the programs: a service, or this machine's sandboxes."""
    if config.function_call_url is not None:
        return _make(FunctionCallVerifier, config)
    comparison = _make(Comparison, config)
    if config.sandbox_fusion_url is not None:
        return _make(SandboxFusionVerifier, config, comparison=comparison)
    pool = _make(SandboxPool, config, limits=_make(SandboxLimits, config))
    return _make(SandboxVerifier, config, pool=pool, comparison=comparison)


BUILT_IN_SOURCES: dict[str, Callable[[VerifierConfig], RewardSource]] = {
    "math": math_source,
    "format": format_source,
    "code": code_source,
}


def function_options(config: VerifierConfig) -> dict[str, Any]:
    """Further arguments of ``FunctionReward`` for ``--reward_fn``."""
    return _options_of(FunctionReward, config) | {"on_reward_failure": config.on_reward_failure or "error"}


def _make(kind: Callable[..., Any], config: VerifierConfig, **given: Any) -> Any:
    return kind(**_options_of(kind, config) | given)


def _options_of(kind: Callable[..., Any], config: VerifierConfig) -> dict[str, Any]:
    """The options that ``kind`` takes as arguments, matched by name."""
    return {name: getattr(config, name) for name in inspect.signature(kind).parameters if hasattr(config, name)}


# --- the run's own function, server or model


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
    ranks: Ranks | None = None,
    remote_timeout: float = 60.0,
    remote_retries: int = 3,
    remote_token: str | None = None,
    on_remote_failure: OnFailure = "error",
    function_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
) -> RewardSource:
    """Makes the reward source that the options of :func:`check_reward_options` describe.

    Args:
        remote_rm_url: servers (``remote_…``: see :class:`~lightppo.rewards.remote.RemoteReward`), or one
            ``path.py[:name]``, by default its ``reward_func`` or ``compute_score``.
        reward_fn: a function (see :class:`~lightppo.rewards.function.FunctionReward`), a :class:`RewardSource` or a
            file with either; with reward models, the function that combines their tensors, in a file by default
            ``reward_fn``.
        reward_models: see :class:`~lightppo.rewards.model.RewardModelSource`, also for ``device``, ``pad_token_id``,
            ``micro_batch_size`` and ``ranks``, which only models need.
        function_options, model_options: further arguments of ``FunctionReward`` and ``RewardModelSource``.
    """
    urls = _as_urls(remote_rm_url)
    kind = check_reward_options(remote_rm_url=urls, reward_fn=reward_fn, n_reward_models=len(reward_models))
    if kind == "remote":
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
        ranks=ranks,
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
