"""The reward source of a run; loads heavy packages only when needed.

The names of ``--reward_source`` are those of ``lightppo.plugin.REWARDS``; docs/extending.md shows how to add one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightppo.config import PPOConfig
from lightppo.config.reward_plan import given_sources, reward_sources
from lightppo.config.rules import estimator_entry, micro_batch_spec
from lightppo.errors import ConfigError
from lightppo.plugin import OUTSIDE, REWARD_SUMS, REWARD_WRAPPERS, REWARDS
from lightppo.ranks import Alone, Ranks
from lightppo.rewards.function import FunctionReward
from lightppo.rewards.reward_source import NoReward, RewardSource
from lightppo.user_code import load_python_object, split_python_spec

# that a file of a reward function is searched for: OpenRLHF's and verl's
FUNCTION_NAMES = ("reward_func", "compute_score")


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
    def names(self) -> list[str]:
        """All sources of the run, in the order in which they are called."""
        return reward_sources(self.config)


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
    if estimator_entry(config).ignores_scores and not request.names:
        return NoReward()
    try:
        source = REWARD_SUMS.first(request)
        if source is None:
            given = given_sources(config) or ["function"]
            source = source_named(given[-1], request)
        for wrapper in REWARD_WRAPPERS.values():
            source = wrapper.fn(source, request)
        return source
    except ValueError as error:
        raise ConfigError(str(error)) from error


def source_named(name: str, request: RewardRequest) -> RewardSource:
    """The source of a name in ``REWARDS``, with what is around those outside the run."""
    entry = REWARDS.find(name)

    def make() -> RewardSource:
        source = entry.fn(request)
        if not is_source(source):
            raise ValueError(
                f"--reward_source {name}: its function gives {source!r}, and not an object with name and score(rollouts)"
            )
        return source

    if entry.outside != "no":
        for around in OUTSIDE.values():
            make = partial(around.fn, make, name, entry.outside == "yes", request)
    return make()


def function_reward(request: RewardRequest) -> RewardSource:
    """``--reward_fn``."""
    return source_of_function(request.config.reward.reward_fn, request.flag, FunctionReward)


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


# --- functions


def is_source(value: Any) -> bool:
    """Whether this is a source, and not the class of one."""
    return isinstance(value, RewardSource) and not isinstance(value, type)


def source_of_function(
    given: str | Callable[..., Any] | RewardSource, option: str, make: Callable[..., RewardSource]
) -> RewardSource:
    """The source of a function, of a file with one, or of a source itself; errors name the option.

    ``make(function, name, spec=spec)`` is the source of a function; of a file, spec is ``path.py:name``.
    """
    name, spec = None, None
    if isinstance(given, str):
        path, default = split_python_spec(given, FUNCTION_NAMES[0], option=option)
        given = load_python_object(given, *FUNCTION_NAMES, option=option)
        spec = f"{path}:{getattr(given, '__name__', default)}"
        name = Path(spec).name
    if is_source(given):
        return given
    if isinstance(given, type) or not callable(given):
        raise ValueError(
            f"{option}: {given!r} is neither a function nor a source (an object with name and score)"
        )
    try:
        return make(given, name, spec=spec)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
