"""The reward source of a run or a script; loads heavy packages only when needed.

The names of ``--reward_source`` are those of ``lightppo.plugin.REWARDS``; docs/extending.md shows how to add one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightppo.config import PPOConfig
from lightppo.config.rules import (
    ANY_ROUTE,
    estimator_entry,
    micro_batch_spec,
    reward_plan,
    reward_sources,
)
from lightppo.errors import ConfigError
from lightppo.files import files_in_use
from lightppo.option import is_object
from lightppo.plugin import OUTSIDE, REWARD_SUMS, REWARD_WRAPPERS, REWARDS
from lightppo.ranks import Alone, Ranks
from lightppo.rewards.function import BoundFunction, FunctionReward
from lightppo.rewards.source import NoReward, RewardSource
from lightppo.user_code import (
    declared_function,
    load_python_function,
    load_python_object,
    split_python_spec,
)

if TYPE_CHECKING:
    from lightppo.rewards.model import RewardInputs

_FUNCTION_NAME = "reward_func"
_VERL_NAME = "compute_score"
_COMBINE_NAME = "reward_fn"


# --- the source of a run


@dataclass(frozen=True)
class RewardRequest:
    """What an entry of ``REWARDS`` makes its source of: all that a run knows of its rewards."""

    config: PPOConfig  # resolved: what None means is in it
    tokenizer: Any  # the actor's
    ranks: Ranks = field(default_factory=Alone)
    reward_models: Sequence[Any] = ()  # of --reward_pretrain, prepared
    flag: str = "--reward_fn"  # what errors call the option of the reward function

    def options_of(self, kind: Callable[..., Any]) -> dict[str, Any]:
        """The run's options that ``kind`` takes as arguments, by their names; without those that are None."""
        options = self.config.flat()
        values = {name: options.get(name) for name in inspect.signature(kind).parameters}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def plan(self) -> dict[str, dict[str, float]]:
        """Route → name of a source → weight."""
        if plan := reward_plan(self.config):
            return plan
        only = (
            "server"
            if self.config.reward.remote_rm_url
            else "model"
            if self.reward_models
            else "function"
        )
        return {ANY_ROUTE: {only: 1.0}}

    @property
    def names(self) -> list[str]:
        """All sources of the run, in the order in which they are called."""
        return list(dict.fromkeys(name for weights in self.plan.values() for name in weights))


def build_reward(
    config: PPOConfig,
    reward_models: Sequence[Any],
    tokenizer: Any,
    ranks: Ranks,
    flag: str = "--reward_fn",
) -> RewardSource:
    """The reward source of a run: one of the sources in ``REWARDS``, or a sum of several.

    ``flag`` is what errors call the reward function.
    """
    request = RewardRequest(config, tokenizer, ranks=ranks, reward_models=reward_models, flag=flag)
    if estimator_entry(config).ignores_scores and not reward_sources(config):
        return NoReward()
    try:
        source = _combined({name: _made(name, request) for name in request.names}, request)
        for wrapper in REWARD_WRAPPERS.values():
            source = wrapper.fn(source, request)
        return source
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _made(name: str, request: RewardRequest) -> RewardSource:
    """The source of a name, with what is around those outside the run."""
    entry, make = REWARDS.find(name), partial(_source_of, name, request)
    if entry.outside == "no":
        return make()
    is_file = name == "server" and _is_file(request.config.reward.remote_rm_url)
    is_certain = entry.outside == "yes" and not is_file
    for around in OUTSIDE.values():
        make = partial(around.fn, make, name, is_certain, request)
    return make()


def _source_of(name: str, request: RewardRequest) -> RewardSource:
    """The source of a name alone."""
    urls = request.config.reward.remote_rm_url
    if name == "server" and _is_file(urls):
        return _function_source(urls[0], "--remote_rm_url", request.options_of(FunctionReward))
    source = REWARDS.find(name).fn(request)
    return check_source(source, f"--reward_source {name}: its function")


def _combined(made: Mapping[str, RewardSource], request: RewardRequest) -> RewardSource:
    """One source of those that the plan names."""
    plan = request.plan
    if list(plan) == [ANY_ROUTE] and list(plan[ANY_ROUTE].values()) == [1.0]:
        return made[request.names[0]]
    routes = {
        route: [(made[name], weight) for name, weight in weights.items()]
        for route, weights in plan.items()
    }
    if (adds_up := next(iter(REWARD_SUMS.values()), None)) is None:
        raise ValueError(
            "--reward_source: no plugin adds several sources up: name one, without a weight"
        )
    return adds_up.fn(routes, by=request.config.verifier.reward_routes_by)


def function_reward(request: RewardRequest) -> RewardSource:
    """``--reward_fn``."""
    return _function_source(
        request.config.reward.reward_fn, request.flag, request.options_of(FunctionReward)
    )


def model_reward(request: RewardRequest) -> RewardSource:
    """``--reward_pretrain``."""
    reward = request.config.reward
    options = {
        "device": request.ranks.device,
        "ranks": request.ranks,
        "micro_batch_size": micro_batch_spec(request.config, "reward"),
        "reward_max_length": reward.reward_max_length,
        "reward_truncation": reward.reward_truncation,
        "inputs": reward_inputs(request.config, request.tokenizer),
    }
    combine = None if "function" in request.names else reward.reward_fn
    return _model_source(request.reward_models, combine, options)


def reward_inputs(config: PPOConfig, tokenizer: Any) -> list[RewardInputs]:
    """What reward models read: the actor's ids, or the chat in the template and ids of their own tokenizers."""
    from transformers import AutoTokenizer

    from lightppo.rewards.model import Retemplated, SameIds, check_same_ids

    model, files = config.model, files_in_use()
    load_tokenizer = partial(
        AutoTokenizer.from_pretrained,
        trust_remote_code=model.trust_remote_code,
        use_fast=not model.disable_fast_tokenizer,
    )
    if config.reward.reward_input_tokenizer:
        return [
            Retemplated(load_tokenizer(files.bring(path)))
            for path in config.reward.reward_input_tokenizer
        ]
    for path in model.reward_pretrain:
        folder = files.bring(path)
        if Path(folder, "tokenizer_config.json").is_file():
            check_same_ids(tokenizer, load_tokenizer(folder), path)
    return [SameIds(tokenizer.pad_token_id, tokenizer.bos_token_id)]


# --- checks before anything loads


def check_reward_files(
    config: PPOConfig, flag: str = "--reward_fn"
) -> tuple[BoundFunction | None, str | None]:
    """Refuses a ``path.py`` whose source shows that it cannot be used, with a ``ValueError``; the file does not run.

    Returns the function, if it gets all rows, and its parameter with the labels, if it reads them.
    """
    reward, sources = config.reward, reward_sources(config)
    option, spec = flag, reward.reward_fn if "function" in sources else None
    if not spec and _is_file(reward.remote_rm_url):
        option, spec = "--remote_rm_url", reward.remote_rm_url[0]
    if isinstance(reward.reward_fn, str) and not spec and "model" in sources:
        declared_function(reward.reward_fn, _COMBINE_NAME, option=flag)
    options = RewardRequest(config, None).options_of(FunctionReward)
    gets_all = list(reward_plan(config) or (ANY_ROUTE,)) == [ANY_ROUTE]
    if is_object(spec):
        source = _function_source(spec, option, options)
        if source is spec or not gets_all:
            return None, None
        return BoundFunction(spec, source.name, config.verifier.reward_fn_style), None
    if spec is None:
        return None, None
    declared = declared_function(spec, _FUNCTION_NAME, _VERL_NAME, option=option)
    if declared is None:
        return None, None
    name = Path(spec).name
    try:
        FunctionReward(declared.function, name, spec=spec, **options)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
    bound = BoundFunction(declared.function, name, config.verifier.reward_fn_style)
    return (
        bound if gets_all else None,
        bound.label_parameter if bound.label_parameter in declared.names else None,
    )


# --- a source of a script's own


def reward_of(
    value: str | Callable[..., Any] | RewardSource, option: str = "--reward_fn"
) -> RewardSource:
    """The source of a function, of a file with one, or of a source itself; errors name the option."""
    return _function_source(value, option, {})


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
        return _model_source(reward_models, reward_fn, model_options or {})
    if _is_file(urls):
        return _function_source(urls[0], "--remote_rm_url", function_options or {})
    if urls:
        from lightppo import rewards

        REWARDS.find("server")  # an error where no plugin brings it
        return rewards.RemoteReward(urls, **(remote_options or {}))
    if reward_fn is None:
        raise ValueError(
            "no rewards: set --remote_rm_url (http(s) URL or path.py), --reward_fn or --reward_pretrain"
        )
    return _function_source(reward_fn, "--reward_fn", function_options or {})


def _is_file(urls: Sequence[str]) -> bool:
    return len(urls) == 1 and "://" not in urls[0]


def _is_source(value: Any) -> bool:
    return isinstance(value, RewardSource) and not isinstance(value, type)


def check_source(value: Any, origin: str) -> RewardSource:
    """The value; ``ValueError`` with what it came from where it is no source."""
    if not _is_source(value):
        raise ValueError(
            f"{origin} gives {value!r}, and not an object with name and score(rollouts)"
        )
    return value


def _model_source(models: Sequence[Any], combine: Any, options: Mapping[str, Any]) -> RewardSource:
    from lightppo.rewards.model import RewardModelSource

    if isinstance(combine, str):
        combine = load_python_function(combine, _COMBINE_NAME, option="--reward_fn")
    if combine is not None and not callable(combine):
        raise ValueError(
            f"--reward_fn must combine the scores of --reward_pretrain, got {combine!r}"
        )
    return RewardModelSource(models, combine, **options)


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
        raise ValueError(
            f"{option}: {reward_fn!r} is neither a function nor a source (an object with name and score)"
        )
    try:
        return FunctionReward(reward_fn, name, spec=spec, **options)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
