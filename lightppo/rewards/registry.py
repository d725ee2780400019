"""The reward source of a run or a script; loads heavy packages only when needed.

The names of ``--reward_source`` are those of ``lightppo.plugin.REWARDS``; docs/extending.md shows how to add one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightppo import rewards
from lightppo.config import PPOConfig
from lightppo.config.rules import (
    ANY_ROUTE,
    estimator_entry,
    micro_batch_spec,
    reward_plan,
    reward_sources,
)
from lightppo.errors import ConfigError
from lightppo.plugin import OUTSIDE, REWARD_SUMS, REWARD_WRAPPERS, REWARDS
from lightppo.ranks import Alone, Ranks
from lightppo.rewards.source import NoReward, RewardSource
from lightppo.user_code import load_python_object, split_python_spec

# that a file of a reward function is searched for: OpenRLHF's and verl's
FUNCTION_NAMES = ("reward_func", "compute_score")


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
    is_file = name == "server" and is_file_alone(request.config.reward.remote_rm_url)
    is_certain = entry.outside == "yes" and not is_file
    for around in OUTSIDE.values():
        make = partial(around.fn, make, name, is_certain, request)
    return make()


def _source_of(name: str, request: RewardRequest) -> RewardSource:
    """The source of a name alone."""
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
    options = request.options_of(rewards.FunctionReward)
    return source_of_function(request.config.reward.reward_fn, request.flag, options)


def model_reward(request: RewardRequest) -> RewardSource:
    """``--reward_pretrain``, one model."""
    from lightppo.rewards.model import RewardModelSource

    if len(request.reward_models) > 1:
        raise ValueError("--reward_pretrain: no plugin combines the scores of models: name one")
    return RewardModelSource(
        request.reward_models[0],
        pad_token_id=request.tokenizer.pad_token_id,
        micro_batch=micro_batch_spec(request.config, "reward"),
        ranks=request.ranks,
    )


# --- a source of a script's own


def reward_of(
    value: str | Callable[..., Any] | RewardSource, option: str = "--reward_fn"
) -> RewardSource:
    """The source of a function, of a file with one, or of a source itself; errors name the option."""
    return source_of_function(value, option, {})


def is_file_alone(urls: Sequence[str]) -> bool:
    """Whether ``--remote_rm_url`` names a Python file instead of servers."""
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


def source_of_function(
    reward_fn: str | Callable[..., Any] | RewardSource, option: str, options: Mapping[str, Any]
) -> RewardSource:
    """As :func:`reward_of`, with ``options`` of :class:`lightppo.rewards.FunctionReward`."""
    spec = None
    if isinstance(reward_fn, str):
        path, default = split_python_spec(reward_fn, FUNCTION_NAMES[0], option=option)
        reward_fn = load_python_object(reward_fn, *FUNCTION_NAMES, option=option)
        spec = f"{path}:{getattr(reward_fn, '__name__', default)}"
    if _is_source(reward_fn):
        return reward_fn
    if isinstance(reward_fn, type) or not callable(reward_fn):
        raise ValueError(
            f"{option}: {reward_fn!r} is neither a function nor a source (an object with name and score)"
        )
    name = None if spec is None else Path(spec).name
    try:
        return rewards.FunctionReward(reward_fn, name, spec=spec, **options)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
