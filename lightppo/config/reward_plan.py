"""Which sources ``--reward_source`` and ``--reward_routes`` name, with what weights, and what these need."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightppo.errors import ConfigError
from lightppo.option import is_object
from lightppo.plugin import REWARDS
from lightppo.suggestions import nearest

ANY_ROUTE = "*"  # of the samples without a route of their own
Plan = dict[str, dict[str, float]]  # route → source → weight


def built_in() -> list[str]:
    """The sources that their names alone stand for."""
    return [name for name, entry in REWARDS.items() if not entry.flag]


def given_sources(config: Any) -> list[str]:
    """The sources whose flags are set. The last one scores: beside models, ``--reward_fn`` combines their scores."""
    flat = config.flat()
    return [name for name, entry in REWARDS.items() if entry.flag and flat[entry.flag]]


def reward_sources(config: Any) -> list[str]:
    """Names in ``REWARDS`` of what scores training: those that options name, else the one that a flag gives.

    Raises:
        ConfigError: what options name is no source.
    """
    if (plan := reward_plan(config)) is not None:
        return names_in(plan)
    if is_file_alone(
        config.reward.remote_rm_url
    ):  # a file in place of servers has a reward function
        return ["function"]
    return given_sources(config)[-1:]


def further_sources(config: Any) -> set[str]:
    """Names of the sources that sections ask for, beside those that score training."""
    return {name for part in config.parts() for name in part.sources(config)}


def reward_plan(config: Any) -> Plan | None:
    """The sources of ``--reward_source`` or ``--reward_routes``; ``None`` where one of the other flags is the source.

    Raises:
        ConfigError: not of the form, an unknown source, or a weight that is no number.
    """
    verifier = config.verifier
    if verifier.reward_routes is not None:
        return _routes(verifier.reward_routes)
    if verifier.reward_source:
        return {ANY_ROUTE: named_weights("--reward_source", verifier.reward_source)}
    return None


def names_in(plan: Plan) -> list[str]:
    """All sources of a plan, in the order in which they are called."""
    return list(dict.fromkeys(name for weights in plan.values() for name in weights))


def is_file_alone(urls: Sequence[str]) -> bool:
    """Whether ``--remote_rm_url`` names a Python file instead of servers."""
    return len(urls) == 1 and "://" not in urls[0]


def sources_by_flag() -> dict[str, str]:
    """The sources that another flag gives, and the flag."""
    return {name: entry.flag for name, entry in REWARDS.items() if entry.flag}


def names_rewards(options: Any) -> bool:
    """Whether an option asks for a source of rewards, be it right or wrong; ``options`` as of ``Section.problems``."""
    return bool(
        given_sources(options.config) or options.reward_source or options.reward_routes is not None
    )


def named_weights(flag: str, sources: Iterable[str]) -> dict[str, float]:
    """Source → weight of texts ``NAME[=WEIGHT]``; errors as of :func:`reward_plan`, which name the flag."""
    parts = (text.partition("=") for text in sources)
    return _weights(flag, {name.strip(): weight if sign else 1.0 for name, sign, weight in parts})


def _routes(text: str) -> Plan:
    if not text.lstrip().startswith("{"):
        path = Path(text).expanduser()
        if not path.is_file():
            raise ConfigError(f"--reward_routes {text!r} is neither a JSON object nor a file")
        text = path.read_text()
    try:
        routes = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--reward_routes is not JSON: {error}") from None
    if (
        not isinstance(routes, dict)
        or not routes
        or not all(isinstance(w, dict) and w for w in routes.values())
    ):
        raise ConfigError(
            '--reward_routes must be an object of objects: {"gsm8k": {"math": 1}, "*": {"model": 1}}'
        )
    return {
        route: _weights(f"--reward_routes {route!r}", weights) for route, weights in routes.items()
    }


def _weights(where: str, weights: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, weight in weights.items():
        if name not in REWARDS:
            known = ", ".join((*built_in(), *sources_by_flag()))
            raise ConfigError(
                f"{where}: unknown source {name!r}{nearest(name, REWARDS)}; known are {known}"
            )
        try:
            found[name] = float(weight)
        except (TypeError, ValueError):
            found[name] = math.nan
        if not math.isfinite(found[name]):
            raise ConfigError(f"{where}: the weight of {name} must be a number, got {weight!r}")
    return found


# -- what cannot work ------------------------------------------------------------------------------------------------


def source_problems(options: Any) -> Iterator[str]:
    """What the sources of a run need, and which do not fit together."""
    if options.by_hand:
        return
    yield from wrong_reward("reward_fn", options.reward_fn)
    try:
        plan = reward_plan(options.config)
        further = further_sources(options.config)
    except ConfigError:  # which is told by itself
        return
    if plan is None:
        yield from _of_flags(options)
    else:
        yield from _of_plan(options, set(names_in(plan)), further)
    models = len(options.reward_pretrain)
    if models > 1 and not options.reward_fn:
        yield f"--reward_pretrain has {models} models: --reward_fn path.py:name must combine their scores"


def _of_flags(options: Any) -> Iterator[str]:
    """One flag gives the source; beside models, a function combines their scores."""
    flags = sources_by_flag()
    given = given_sources(options.config)
    scoring = [name for name in given if name != "function" or "model" not in given]
    for name in scoring[:-1]:
        pair = f"--{flags[scoring[-1]]} and --{flags[name]}"
        yield f"{pair}: leave one out, or add them up by --reward_source"


def _of_plan(options: Any, named: set[str], further: set[str]) -> Iterator[str]:
    """Each source that is named has its flag, and each flag that is set gives one that is named."""
    by = "--reward_source" if options.reward_routes is None else "--reward_routes"
    combines = {"function"} if len(options.reward_pretrain) > 1 else set()
    given = given_sources(options.config)
    for name, flag in sources_by_flag().items():
        if name in named and name not in given:
            yield f"{by} names {name!r}, which is what --{flag} gives: set --{flag}"
        if name in given and name not in named | combines | further:
            yield f"--{flag} is set, but {by} does not name {name!r}: add it, or leave --{flag} out"
    if named & combines:
        yield "--reward_fn combines the scores of several --reward_pretrain: it cannot be a source itself too"


def wrong_reward(name: str, given: Any) -> Iterator[str]:
    """Why an object of the user's own, the value of this option, scores nothing."""
    is_usable = callable(given) or callable(getattr(given, "score", None))
    if is_object(given) and (isinstance(given, type) or not is_usable):
        yield f"--{name}: {given!r} scores nothing: give a function, or an object with name and score(rollouts)"
