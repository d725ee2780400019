"""Options without effect: without what they need, beside others that exclude them, or at their defaults."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS
from lightppo.config.reward_plan import built_in, further_sources, reward_sources
from lightppo.config.rules import estimator_entry, policy_loss_entry
from lightppo.errors import ConfigError
from lightppo.option import SECTIONS
from lightppo.plugin import REWARDS

# -- what an option may need beside other options ----------------------------------------------------------------------


def _with(trait: str) -> str:
    names = [name for name, entry in ADVANTAGE_ESTIMATORS.items() if getattr(entry, trait)]
    return f"--advantage_estimator {' or '.join(names)}"


def conditions() -> dict[str, str]:
    """What ``needs`` may name beside options, and what to set for it: facts, sources of rewards, those of sections."""
    known = {
        "sampling": "a --temperature above 0 (and no --no_do_sample)",
        "critic": f"a critic ({_with('needs_critic')})",
        "whitening": "whitening of advantages (--adv_norm)",
        "discounting": _with("discounted"),
        "group_deviation": _with("divides_by_std"),
        "clipping": "a --policy_loss that clips",
        "function": "a reward function (--reward_fn)",
        "server": "a reward server (--remote_rm_url)",
    }
    known |= {name: f"--reward_source {name}" for name in built_in()}
    known["trained_scores"] = f"scores that are trained on (not {_with('ignores_scores')})"
    known["own_reference"] = (
        "a reference model of its own (no --lora_rank, or another --ref_pretrain)"
    )
    known["one_source"] = "a single source of rewards"
    for place in SECTIONS.values():
        known |= place.kind.conditions
    return known


def facts_of(config: Any) -> dict[str, bool]:
    """Which of these conditions hold, but for those of reward sources; of a command without a policy none is known."""
    if config.command != "ppo":
        return {}
    estimator = estimator_entry(config)
    whitens = config.algorithm.adv_norm
    facts = {
        "sampling": config.rollout.do_sample and config.rollout.temperature > 0,
        "critic": estimator.needs_critic,
        "whitening": estimator.whiten if whitens is None else whitens,
        "discounting": estimator.discounted,
        "group_deviation": estimator.divides_by_std,
        "clipping": policy_loss_entry(config).eps_clip is not None,
        "trained_scores": not estimator.ignores_scores,
    }
    for part in config.parts():
        facts |= part.facts(config)
    return facts


def source_facts(config: Any) -> dict[str, bool]:
    """Which conditions of reward sources hold, for all sources of the run; ConfigError as reward_sources."""
    if config.command != "ppo":
        return {}
    used = {*reward_sources(config), *further_sources(config)}
    return {name: name in used for name in REWARDS}


def condition_text(condition: str) -> str:
    """One of an option's ``needs`` in words.

    ``"dynamic_sampling"`` (given or true), ``"zero_stage=2|3"``, ``"rollout_check!=off"``, ``"lora_rank>0"``, one of
    :func:`conditions`, or several of these with ``" or "`` between.
    """
    texts = []
    known = conditions()
    for name, sign, value in map(_parts, condition.split(" or ")):
        words = {
            "": "",
            "=": f" {value.replace('|', ' or ')}",
            "!=": f" other than {value}",
            ">": f" above {value}",
        }
        texts.append(known.get(name, f"--{name}{words[sign]}"))
    return " or ".join(texts)


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Whether a condition holds, or is of something unknown."""
    return any(_holds(*_parts(part), values) for part in condition.split(" or "))


def _holds(name: str, sign: str, wanted: str, values: Mapping[str, Any]) -> bool:
    if name not in values:
        return True
    value = values[name]
    if sign == ">":
        return value > float(wanted)
    if sign:
        return (str(value) in wanted.split("|")) == (sign == "=")
    return value is not None and value is not False and value != ()


def _parts(condition: str) -> tuple[str, str, str]:
    name, sign, value = re.fullmatch(r"(\w+)(!=|=|>|)(.*)", condition).groups()
    return name, sign, value


# -- what is refused, and what is told ---------------------------------------------------------------------------------


def problems(options: SimpleNamespace) -> Iterator[str]:
    """Options without what they need, and such as exclude each other; ``options`` as of ``Section.problems``."""
    config = options.config
    given = options.config.flat()
    options.facts = facts_of(config)
    of_trainer = config.of_trainer()
    declared = {
        option.name: option
        for option in config.all_options()
        if not options.by_hand or option.owner in of_trainer
    }
    values = {name: getattr(options, name) for name in declared}
    if options.by_hand:
        values["enable_ema"] = True  # the script brings its ema_model
    else:
        with suppress(ConfigError):  # which is told by itself
            options.facts |= source_facts(config)
    values |= options.facts
    is_set = {
        f"no_{name}" if given[name] is False else name: option
        for name, option in declared.items()
        if option.is_set(given[name])
    }
    for flag, option in is_set.items():
        for condition in option.needs:
            if not holds(condition, values):
                yield f"--{flag} needs {condition_text(condition)}: set that, or leave --{flag} out"
    for flag, others, reason in (one for part in config.parts() for one in part.exclusive):
        for other in others.split():
            if {flag, other} <= is_set.keys():
                yield f"--{flag} and --{other} {reason}: leave one out"


def idle_flags(config: Any, given: Container[str]) -> dict[str, list[str]]:
    """Options that were ``given`` and change nothing, which no error says because they are off or the default.

    Returns:
        what they need, in words → their names.
    """
    flat = config.flat()
    found = {}
    idle = [
        one
        for one in config.all_options()
        if one.needs and one.name in given and not one.is_set(flat[one.name])
    ]
    values = config.resolved().flat() | facts_of(config) | source_facts(config) if idle else {}
    for one in idle:
        if unmet := [condition for condition in one.needs if not holds(condition, values)]:
            found.setdefault(condition_text(unmet[0]), []).append(one.name)
    return found


def notes(config: Any, given: Container[str]) -> Iterator[str]:
    """A line for options on the command line that change nothing."""
    for needed, names in idle_flags(config, given).items():
        change = "changes" if len(names) == 1 else "change"
        flags = ", ".join(f"--{name}" for name in names)
        yield f"{flags} {change} nothing here: as by default, without {needed}"
