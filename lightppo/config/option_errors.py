"""What messages about a wrong option say at their end: where the name or the value belongs, or what was meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from lightppo import suggestions
from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from lightppo.config import other_trainers
from lightppo.config.removed_options import removal
from lightppo.errors import ConfigError
from lightppo.option import Option
from lightppo.plugin import trained_by


def nearest(name: str, known: Iterable[str], kind: str = "") -> str:
    """What an unknown name may have meant, as :func:`lightppo.suggestions.nearest`.

    ``kind`` may also be ``"option"`` or ``"word"`` of a command line, or ``"key"`` of a file.
    """
    known = list(known)
    if kind == "word":
        return _word(name, known)
    if kind in ("option", "key"):
        return _option(name, known, of_commands=kind == "option") or suggestions.nearest(
            name, known
        )
    if kind == "command" and (answer := _algorithm(name, known)):
        return answer
    return suggestions.nearest(name, known, kind)


def conform(one: Option, value: Any) -> Any:
    """Return the value in the option's type, as :meth:`Option.conform`; ConfigError says where else a wrong one belongs."""
    try:
        return one.conform(value)
    except ConfigError as error:
        raise ConfigError(_value_of_another(one, value) or str(error)) from None


def _value_of_another(one: Option, value: Any) -> str:
    if hint := other_trainers.hint(one.name, value):
        return f"--{one.name} {value}{hint}"
    is_known = one.names is None or suggestions.meant(str(value), one.names, one.name)
    if not is_known and (other := _option_that_takes(value)):
        return f"--{one.name} {value}: it is a value of --{other}"
    return ""


def _option(flag: str, flags: Collection[str], of_commands: bool) -> str:
    """Other trainers' names, what people mean, and whose option it is; ``of_commands``: of a command that trains."""
    name = flag.removeprefix("--")
    if answer := removal(name.removeprefix("no_")) or removal(name):
        return answer
    answer = other_trainers.hint(name, flags=flags) or suggestions.meant(flag, flags, "flag")
    if answer or not of_commands:
        return answer
    for others in (_commands_with(flag), _commands_for(flag)):
        if others:
            first = next(iter(others.values()))
            which = "it is" if first == flag else f"{first} is for that,"
            return f": {which} an option of lightppo {' and '.join(others)}, not of this command"
    return ""


def _commands_with(flag: str) -> dict[str, str]:
    """The commands that have this flag; each with the flag."""
    kinds = trained_by().items()
    return {name: flag for name, kind in kinds if flag in _flags(kind)}


def _commands_for(flag: str) -> dict[str, str]:
    """The commands that have what people mean by this flag; each with the flag that it has."""
    answers = {
        name: suggestions.answer_of(flag, _flags(kind), "flag")
        for name, kind in trained_by().items()
    }
    first = next((answer for answer in answers.values() if answer), "")
    return {name: answer for name, answer in answers.items() if first and answer == first}


def _flags(kind: Any) -> set[str]:
    return {f"--{one.name}" for one in kind.all_options()}


def _word(word: str, flags: Collection[str]) -> str:
    """Of a word that is no flag: ``-seed`` or ``NAME=VALUE``."""
    name, equals, _ = word.partition("=")
    if name.startswith("-"):
        flag = f"-{name}".replace("-", "_").replace("__", "--", 1)
        if flag in flags:
            return f": write {flag}, with two dashes"
        return nearest(flag, flags, "option")
    return (
        other_trainers.hint(name, flags=flags)
        or ": write --NAME VALUE" * bool(equals)
        or _path(word, flags)
    )


def _path(word: str, flags: Collection[str]) -> str:
    """Of a path without a flag."""
    if "--pretrain" not in flags or not ("/" in word or Path(word).exists()):
        return ""
    if (options := Path(word, "run_config.yaml")).is_file():
        return f": of a run, --config {options} names the options and --pretrain {word} the model"
    return f": a path needs its flag, such as --pretrain {word}"


def _algorithm(name: str, commands: Collection[str]) -> str:
    """Of a command: names of algorithms are none."""
    tables = {"advantage_estimator": ADVANTAGE_ESTIMATORS, "policy_loss": POLICY_LOSSES}
    for flag, names in tables.items():
        if name.lower() in names and name.lower() not in commands:
            return f": write lightppo ppo --{flag} {name.lower()}"
    return ""


def _option_that_takes(name: Any) -> str | None:
    """The option of PPO whose table of algorithms has this name."""
    options = [one for one in trained_by()["ppo"].all_options() if one.names is not None]
    found = (one.name for one in options if str(name) in one.names and name != one.default)
    return next(found, None)
