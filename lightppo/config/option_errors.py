"""What messages about a wrong option say at their end: where the name or the value belongs, or what was meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, get_args

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from lightppo.config import similar_names as meant_names
from lightppo.config.option_text import range_text, type_text
from lightppo.errors import ConfigError
from lightppo.option import Option
from lightppo.plugin import HINTS, trained_by


def nearest(name: str, known: Iterable[str], kind: str = "") -> str:
    """What an unknown name may have meant; see :func:`lightppo.suggestions.nearest`."""
    known = list(known)
    if kind == "word":
        return _word(name, known)
    if kind in ("option", "key"):
        return _option(name, known, of_commands=kind == "option") or meant_names.nearest(
            name, known
        )
    if kind == "command" and (told := _algorithm(name, known)):
        return told
    return meant_names.nearest(name, known, kind)


def wrong_value(one: Option, value: Any, error: ValueError) -> str:
    """A message about a value that an option does not take; an empty text if there is nothing more to say."""
    if told := _hint(one.name, value):
        return f"--{one.name} {value}{told}"
    is_known = one.names is None or meant_names.meant(str(value), one.names, one.name)
    if not is_known and (other := _option_that_takes(value)):
        return f"--{one.name} {value}: it is a value of --{other}"
    if isinstance(error, ConfigError):
        return ""
    choices = [choice for choice in get_args(one.kind) if isinstance(choice, str)]
    wanted = " ".join(filter(None, (type_text(one), range_text(one))))
    if one.may_be_object:
        wanted += f"{': path.py:name' if one.names is None else ''}, or in Python the function or object itself"
    got = f"{value!r}{nearest(str(value), choices, one.name)}"
    return f"--{one.name} must be {wanted}, not {'another value' if one.secret else got}"


def _hint(name: str, value: Any = None, flags: Collection[str] = ()) -> str:
    """What plugins say of a name that is no option of a command with these flags, or of a value that one does not take."""
    texts = (entry.fn(name, value, flags) for entry in HINTS.values())
    return next(filter(None, texts), "")


def _option(flag: str, flags: Collection[str], of_commands: bool) -> str:
    """Other trainers' names, what people mean, and whose option it is; ``of_commands``: of a command that trains."""
    name = flag.removeprefix("--")
    told = _hint(name, flags=flags) or meant_names.meant(flag, flags, "flag")
    if told or not of_commands:
        return told
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
        name: meant_names.answer_of(flag, _flags(kind), "flag")
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
        return (
            f": write {flag}, with two dashes" if flag in flags else nearest(flag, flags, "option")
        )
    return _hint(name, flags=flags) or ": write --NAME VALUE" * bool(equals) or _path(word, flags)


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
