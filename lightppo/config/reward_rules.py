"""Which reward sources a run has, by name and weight, and which of their options cannot work."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightppo.config.fields import nearest
from lightppo.errors import ConfigError

if TYPE_CHECKING:
    from lightppo.config.ppo import PPOConfig

BUILT_IN = ("math", "format", "code")
OWN = {"function": "reward_fn", "server": "remote_rm_url", "model": "reward_pretrain"}  # name → the flag it stands for
ANY_ROUTE = "*"

Plan = dict[str, dict[str, float]]  # route → source → weight


def reward_plan(config: PPOConfig) -> Plan | None:
    """The sources of ``--reward_source`` or ``--reward_routes``; ``None`` where one of the other flags is the source.

    Raises:
        ConfigError: not of the form, an unknown source, or a weight that is no number.
    """
    v = config.verifier
    if v.reward_routes is not None:
        return _routes(v.reward_routes)
    if v.reward_source:
        return {ANY_ROUTE: _weights("--reward_source", dict(_named(text) for text in v.reward_source))}
    return None


def sources_of(plan: Plan | None) -> set[str]:
    """Names of all sources of a plan."""
    return {name for weights in (plan or {}).values() for name in weights}


def problems(config: PPOConfig) -> list[str]:
    """One message per combination of reward options that cannot work, or of which one does nothing."""
    try:
        plan = reward_plan(config)
    except ConfigError as error:
        return [str(error)]
    return [*_which(config, plan), *_functions(config, plan), *_verifiers(config, plan), *_addresses(config)]


def _which(config: PPOConfig, plan: Plan | None) -> list[str]:
    models, r, v = config.model.reward_pretrain, config.reward, config.verifier
    given = {"function": bool(r.reward_fn), "server": bool(r.remote_rm_url), "model": bool(models)}
    named = sources_of(plan)
    found = []
    if plan is None:
        if not any(given.values()):
            found.append(
                "no reward: set --reward_fn path.py, --remote_rm_url URL, --reward_pretrain MODEL or a built-in "
                f"--reward_source ({', '.join(BUILT_IN)})"
            )
        if given["server"] and (given["model"] or given["function"]):
            other = "--reward_pretrain" if given["model"] else "--reward_fn"
            found.append(
                f"--remote_rm_url and {other} are two sources of reward: set one, or say how they add up by "
                "--reward_source"
            )
    if plan is not None:
        found += [
            f"{_by(config)} names {name!r}, which is what --{flag} gives: set --{flag}"
            for name, flag in OWN.items()
            if name in named and not given[name]
        ]
        found += [
            f"--{flag} is set, but {_by(config)} does not name {name!r}: add it, or leave --{flag} out"
            for name, flag in OWN.items()
            if given[name] and name not in named and not (name == "function" and len(models) > 1)
        ]
    if len(models) > 1 and not r.reward_fn:
        found.append(f"{len(models)} models in --reward_pretrain need --reward_fn path.py:name to combine their scores")
    if len(models) > 1 and "function" in named:
        found.append("--reward_fn combines the scores of several --reward_pretrain: it cannot be a source itself too")
    if v.reward_source and v.reward_routes is not None:
        found.append("--reward_source and --reward_routes both name the sources: set one of them")
    if v.reward_routes_by != "data_source" and v.reward_routes is None:
        found.append("--reward_routes_by has no effect without --reward_routes")
    return found


def _functions(config: PPOConfig, plan: Plan | None) -> list[str]:
    r, v = config.reward, config.verifier
    named = sources_of(plan)
    is_file = len(r.remote_rm_url) == 1 and "://" not in r.remote_rm_url[0]
    has_function = "function" in named or (plan is None and (is_file or bool(r.reward_fn and not _models(config))))
    has_limit = has_function or "math" in named
    of_function = {"reward_fn_style": v.reward_fn_style != "auto", "reward_manager": v.reward_manager != "auto"}
    of_limit = {
        "reward_workers": v.reward_workers is not None,
        "reward_timeout": v.reward_timeout is not None,
        "reward_retries": v.reward_retries > 0,
    }
    found = [f"--{flag} acts on a reward function: it needs --reward_fn" for flag, on in of_function.items() if on]
    found = [] if has_function else found
    if not has_limit:
        found += [
            f"--{flag} acts on a reward function or --reward_source math: set one, or leave it out"
            for flag, on in of_limit.items()
            if on
        ]
    has_server = "server" in named or (plan is None and any("://" in url for url in r.remote_rm_url))
    if v.on_reward_failure is not None and not (has_limit or has_server or "code" in named):
        found.append("--on_reward_failure acts on reward functions, servers and verifiers: set one, or leave it out")
    if v.reward_manager == "prime" and v.reward_timeout is None:
        found.append("--reward_manager prime kills a call at its limit: set --reward_timeout")
    of_model = {
        "normalize_reward": r.normalize_reward,
        "reward_input_tokenizer": bool(r.reward_input_tokenizer),
        "reward_max_length": r.reward_max_length is not None,
        "reward_truncation": r.reward_truncation != "error",
    }
    if not _models(config):
        found += [f"--{flag} acts on reward models: it needs --reward_pretrain" for flag, on in of_model.items() if on]
    elif len(r.reward_input_tokenizer) not in (0, 1, len(_models(config))):
        found.append(
            f"--reward_input_tokenizer has {len(r.reward_input_tokenizer)} for {len(_models(config))} models in "
            "--reward_pretrain: give one for all, or one each"
        )
    if v.async_rewards and config.sampling.skip_rollout is not None:
        found.append("--async_rewards has no effect where --skip_rollout replays samples: leave one out")
    if v.async_rewards and _models(config):
        found.append("--async_rewards cannot run a reward model beside generation: leave it out with --reward_pretrain")
    return found


def _verifiers(config: PPOConfig, plan: Plan | None) -> list[str]:
    v, named = config.verifier, sources_of(plan)
    found = []
    defaults = type(v)()
    owners = {"math_": "math", "reward_format": "format", "code_": "code", "allow_unsafe_code": "code"}
    for prefix, name in owners.items():
        found += [
            f"--{flag} belongs to --reward_source {name}: name it there, or leave the flag out"
            for flag in vars(v)
            if flag.startswith(prefix) and getattr(v, flag) != getattr(defaults, flag) and name not in named
        ]
    for service in ("sandbox_fusion", "function_call"):
        url = getattr(v, f"{service}_url")
        if url is not None and "code" not in named:
            found.append(f"--{service}_url belongs to --reward_source code: name it there, or leave the flag out")
        found += [
            f"--{flag} needs --{service}_url"
            for flag in vars(v)
            if flag.startswith(service) and url is None and getattr(v, flag) != getattr(defaults, flag)
        ]
    if v.sandbox_fusion_url is not None and v.function_call_url is not None:
        found.append("--sandbox_fusion_url and --function_call_url both run the programs: set one of them")
    is_sum = any(len(weights) > 1 for weights in (plan or {}).values()) or len(plan or {}) > 1
    if is_sum and v.reward_minimum is None:
        found += [
            f"--{flag} with several sources cannot know their lowest sum: set --reward_minimum"
            for flag in ("check_verifier_status", "check_xml_format")
            if getattr(v, flag)
        ]
    if v.reward_minimum is not None and not (v.check_verifier_status or v.check_xml_format):
        found.append("--reward_minimum has no effect without --check_verifier_status or --check_xml_format")
    return found


def _addresses(config: PPOConfig) -> list[str]:
    r = config.reward
    found = []
    servers = [url for url in r.remote_rm_url if url.startswith(("http://", "https://"))]
    for url in r.remote_rm_url:
        if "@" in url:  # not shown: what stands before it may be a password
            found.append("--remote_rm_url with a user or password: give a token by --remote_rm_token_env instead")
        elif url not in servers and not url.split(":")[0].endswith(".py"):
            found.append(f"--remote_rm_url {url!r} is neither an http(s) URL nor a .py file")
    if r.remote_rm_token_env is not None and not servers:
        found.append("--remote_rm_token_env is for reward servers: it needs --remote_rm_url http(s)://...")
    return found


def _models(config: PPOConfig) -> tuple[str, ...]:
    return config.model.reward_pretrain


def _by(config: PPOConfig) -> str:
    return "--reward_routes" if config.verifier.reward_routes is not None else "--reward_source"


def _named(text: str) -> tuple[str, Any]:
    name, has_weight, weight = text.partition("=")
    return name.strip(), weight if has_weight else 1.0


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
    if not isinstance(routes, dict) or not routes or not all(isinstance(w, dict) and w for w in routes.values()):
        raise ConfigError('--reward_routes must be an object of objects: {"gsm8k": {"math": 1}, "*": {"model": 1}}')
    return {route: _weights(f"--reward_routes {route!r}", weights) for route, weights in routes.items()}


def _weights(where: str, weights: dict[str, Any]) -> dict[str, float]:
    known = (*BUILT_IN, *OWN)
    found: dict[str, float] = {}
    for name, weight in weights.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown source {name!r}{nearest(name, known)}; known are {', '.join(known)}")
        try:
            found[name] = float(weight)
        except (TypeError, ValueError):
            found[name] = math.nan
        if not math.isfinite(found[name]):
            raise ConfigError(f"{where}: the weight of {name} must be a number, got {weight!r}")
    return found
