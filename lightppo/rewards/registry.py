"""The reward source of a run or a script; loads heavy packages only when needed.

A new built-in source needs a file with its class, whose arguments are its options; lines in ``BUILT_IN_SOURCES`` and in
``BUILT_IN`` of ``config.rules``; the options in ``VerifierConfig``; a test; a section in docs/rewards.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightppo.config import PPOConfig, VerifierConfig
from lightppo.config.rules import ANY_ROUTE, estimator_entry, micro_batch_spec, reward_plan, reward_sources
from lightppo.data.records import Prompt
from lightppo.errors import ConfigError
from lightppo.plugins.http.client import read_token
from lightppo.plugins.http.remote import RemoteReward
from lightppo.plugins.verifiers.code import CodeReward, CodeVerifier, Comparison, SandboxVerifier, find_tests
from lightppo.plugins.verifiers.formats import FormatReward, XmlFormatCheck
from lightppo.plugins.verifiers.math import MathReward, gold_answers
from lightppo.plugins.verifiers.sandbox import SandboxLimits, SandboxPool
from lightppo.plugins.verifiers.services import FunctionCallVerifier, SandboxFusionVerifier
from lightppo.ranks import Ranks
from lightppo.rewards.function import BoundFunction, FunctionReward
from lightppo.rewards.source import NO_LABELS, CombinedReward, NoReward, RewardSource, RoutedReward
from lightppo.user_code import declared_function, load_python_function, load_python_object, split_python_spec

if TYPE_CHECKING:
    from lightppo.rewards.model import RewardInputs

_FUNCTION_NAME = "reward_func"
_VERL_NAME = "compute_score"
_COMBINE_NAME = "reward_fn"


# --- the source of a run


def build_reward(
    config: PPOConfig, reward_models: Sequence[Any], tokenizer: Any, ranks: Ranks, flag: str = "--reward_fn"
) -> RewardSource:
    """The reward source of a run: servers, a Python file, the prepared reward models, built-in verifiers, or a sum.

    ``flag`` is what errors call the Python file.
    """
    r, v = config.reward, config.verifier
    if estimator_entry(config).of_teacher and not reward_sources(config):
        return NoReward()
    own = "server" if r.remote_rm_url else "model" if reward_models else "function"
    plan = reward_plan(config) or {ANY_ROUTE: {own: 1.0}}
    names = list(dict.fromkeys(name for weights in plan.values() for name in weights))

    def server() -> RewardSource:
        options = {"timeout": r.remote_rm_timeout, "retries": r.remote_rm_retries} | _options_of(RemoteReward, v)
        options |= {"token": read_token(env=r.remote_rm_token_env), "ranks": ranks}
        functions = function_options(v)  # of --remote_rm_url path.py
        return build_reward_source(remote_rm_url=r.remote_rm_url, remote_options=options, function_options=functions)

    def model() -> RewardSource:
        options = {
            **{"device": ranks.device, "ranks": ranks, "micro_batch_size": micro_batch_spec(config, "reward")},
            **{"reward_max_length": r.reward_max_length, "reward_truncation": r.reward_truncation},
            "inputs": reward_inputs(config, tokenizer),
        }
        combine = None if "function" in names else r.reward_fn
        return build_reward_source(reward_models=reward_models, reward_fn=combine, model_options=options)

    def function() -> RewardSource:
        return _function_source(r.reward_fn, flag, function_options(v))

    makers = {name: partial(make, v) for name, make in BUILT_IN_SOURCES.items()}
    makers |= {"server": server, "model": model, "function": function}
    try:
        made = {name: makers[name]() for name in names}
        routes = {route: [(made[name], weight) for name, weight in weights.items()] for route, weights in plan.items()}
        if list(plan) != [ANY_ROUTE]:
            source: RewardSource = RoutedReward(routes, by=v.reward_routes_by)
        else:
            source = made[names[0]] if plan[ANY_ROUTE] == {names[0]: 1.0} else CombinedReward(dict(routes[ANY_ROUTE]))
        return XmlFormatCheck(source, minimum=v.reward_minimum) if v.check_xml_format else source
    except ValueError as error:
        raise ConfigError(str(error)) from error


def reward_inputs(config: PPOConfig, tokenizer: Any) -> list[RewardInputs]:
    """What reward models read: the actor's ids, or the chat in the template and ids of their own tokenizers."""
    from transformers import AutoTokenizer

    from lightppo.files import stage_to_local
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


BUILT_IN_SOURCES: dict[str, Callable[[VerifierConfig], RewardSource]] = {
    "math": lambda config: _make(MathReward, config),
    "format": lambda config: _make(FormatReward, config),
    "code": lambda config: _make(CodeReward, config, verifier=_verifier(config)),
}


def _verifier(config: VerifierConfig) -> CodeVerifier:
    """Runs the programs: a service, or this machine's sandboxes."""
    if config.function_call_url is not None:
        return _make(FunctionCallVerifier, config)
    comparison = _make(Comparison, config)
    if config.sandbox_fusion_url is not None:
        return _make(SandboxFusionVerifier, config, comparison=comparison)
    pool = _make(SandboxPool, config, limits=_make(SandboxLimits, config))
    return _make(SandboxVerifier, config, pool=pool, comparison=comparison)


def function_options(config: VerifierConfig) -> dict[str, Any]:
    """Further arguments of ``FunctionReward`` for ``--reward_fn``."""
    return _options_of(FunctionReward, config)


def _make(kind: Callable[..., Any], config: VerifierConfig, **given: Any) -> Any:
    return kind(**_options_of(kind, config) | given)


def _options_of(kind: Callable[..., Any], config: VerifierConfig) -> dict[str, Any]:
    """The options that ``kind`` takes as arguments, matched by name; ``None`` stands for its own default."""
    values = {name: getattr(config, name, None) for name in inspect.signature(kind).parameters}
    return {name: value for name, value in values.items() if value is not None}


# --- servers, a function, or models


def check_reward_files(config: PPOConfig, flag: str = "--reward_fn") -> tuple[BoundFunction | None, str | None]:
    """Refuses a ``path.py`` whose source shows that it cannot be used, with a ``ValueError``; the file does not run.

    Returns the function, if it gets all rows, and its parameter with the labels, if it reads them.
    """
    r, sources, declared = config.reward, reward_sources(config), None
    option, spec = (flag, r.reward_fn) if "function" in sources and r.reward_fn else ("--remote_rm_url", "")
    if not spec and _is_file(r.remote_rm_url):
        spec = r.remote_rm_url[0]
    if r.reward_fn and not spec and "model" in sources:
        declared_function(r.reward_fn, _COMBINE_NAME, option=flag)
    if not spec or (declared := declared_function(spec, _FUNCTION_NAME, _VERL_NAME, option=option)) is None:
        return None, None
    try:
        FunctionReward(declared.function, Path(spec).name, spec=spec, **function_options(config.verifier))
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    bound = BoundFunction(declared.function, Path(spec).name, config.verifier.reward_fn_style)
    gets_all = list(reward_plan(config) or (ANY_ROUTE,)) == [ANY_ROUTE]
    return bound if gets_all else None, bound.label_parameter if bound.label_parameter in declared.names else None


def check_label(config: PPOConfig, prompt: Prompt) -> None:
    """Refuses a row that a built-in source of all rows cannot judge, with a ``ValueError``."""
    plan = reward_plan(config) or {}
    names = plan[ANY_ROUTE] if list(plan) == [ANY_ROUTE] else {}
    if "math" in names:
        if prompt.label is None:
            raise ValueError(NO_LABELS)
        gold_answers(prompt.label)
    if "code" in names:
        find_tests(prompt)


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
            :class:`~lightppo.plugins.http.remote.RemoteReward`, :class:`~lightppo.rewards.function.FunctionReward` and
            :class:`~lightppo.rewards.model.RewardModelSource`.
    """
    urls = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or ())
    if urls and (reward_models or reward_fn is not None):
        other = "--reward_pretrain" if reward_models else "--reward_fn"
        raise ValueError(f"--remote_rm_url and {other} are both set; rewards come from one of them")
    if reward_models:
        from lightppo.rewards.model import RewardModelSource

        if isinstance(reward_fn, str):
            reward_fn = load_python_function(reward_fn, _COMBINE_NAME, option="--reward_fn")
        if reward_fn is not None and not callable(reward_fn):
            raise ValueError(f"--reward_fn must combine the scores of --reward_pretrain, got {reward_fn!r}")
        return RewardModelSource(reward_models, reward_fn, **(model_options or {}))
    if _is_file(urls):
        return _function_source(urls[0], "--remote_rm_url", function_options or {})
    if urls:
        return RemoteReward(urls, **(remote_options or {}))
    if reward_fn is None:
        raise ValueError("no rewards: set --remote_rm_url (http(s) URL or path.py), --reward_fn or --reward_pretrain")
    return _function_source(reward_fn, "--reward_fn", function_options or {})


def _is_file(urls: Sequence[str]) -> bool:
    return len(urls) == 1 and "://" not in urls[0]


def _function_source(reward_fn: Any, option: str, options: Mapping[str, Any]) -> RewardSource:
    name = spec = None
    if isinstance(reward_fn, str):
        path, default = split_python_spec(reward_fn, _FUNCTION_NAME, option=option)
        reward_fn = load_python_object(reward_fn, _FUNCTION_NAME, _VERL_NAME, option=option)
        spec = f"{path}:{getattr(reward_fn, '__name__', default)}"
        name = Path(spec).name
    if isinstance(reward_fn, RewardSource) and not isinstance(reward_fn, type):
        return reward_fn
    if isinstance(reward_fn, type) or not callable(reward_fn):
        raise ValueError(f"{option}: {reward_fn!r} is neither a function nor a source (an object with name and score)")
    try:
        return FunctionReward(reward_fn, name, spec=spec, **options)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
