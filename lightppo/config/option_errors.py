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


def nearest(name: str, names: Iterable[str], kind: str = "") -> str:
    """Say what an unknown name may have meant, as :func:`lightppo.suggestions.nearest`.

    ``kind`` may also be ``"option"`` or ``"word"`` of a command line, or ``"key"`` of a file.
    """
    names = list(names)
    if kind == "word":
        return _meaning_of_word(name, names)
    if kind in ("option", "key"):
        return _meaning_of_option(name, names, of_commands=kind == "option") or suggestions.nearest(
            name, names
        )
    if kind == "command" and (answer := _flag_of_algorithm(name, names)):
        return answer
    return suggestions.nearest(name, names, kind)


def conform(option: Option, value: Any) -> Any:
    """Return the value in the option's type, as :meth:`Option.conform`; ConfigError says where else a wrong one belongs."""
    try:
        return option.conform(value)
    except ConfigError as error:
        raise ConfigError(explanation(error, option, value)) from None


def explanation(error: ConfigError, option: Option, value: Any) -> str:
    """Return the text for a wrong value, with the option that it belongs to, if there is one."""
    return _another_option_of(option, value) or str(error)


def _another_option_of(option: Option, value: Any) -> str:
    if hint := other_trainers.hint(option.name, value):
        return f"--{option.name} {value}{hint}"
    is_known = option.names is None or suggestions.meant(str(value), option.names, option.name)
    if not is_known and (other_flag := _option_that_takes(value)):
        return f"--{option.name} {value}: it is a value of --{other_flag}"
    return ""


def _meaning_of_option(flag: str, flags: Collection[str], of_commands: bool) -> str:
    """Say what an unknown flag means: of other trainers, of people, or of other commands (``of_commands``)."""
    name = flag.removeprefix("--")
    if answer := removal(name.removeprefix("no_")) or removal(name):
        return answer
    answer = other_trainers.hint(name, flags=flags) or suggestions.meant(flag, flags, "flag")
    if answer or not of_commands:
        return answer
    for others in (_commands_with(flag), _commands_for(flag)):
        if others:
            other_flag = next(iter(others.values()))
            which = "it is" if other_flag == flag else f"{other_flag} is for that,"
            return f": {which} an option of lightppo {' and '.join(others)}, not of this command"
    return ""


def _commands_with(flag: str) -> dict[str, str]:
    """Return the commands that have this flag; each with the flag."""
    kinds = trained_by().items()
    return {name: flag for name, kind in kinds if flag in other_trainers.flags_of(kind)}


def _commands_for(flag: str) -> dict[str, str]:
    """Return the commands that have what people mean by this flag; each with the flag that it has."""
    answers = {
        name: suggestions.answer_of(flag, other_trainers.flags_of(kind), "flag")
        for name, kind in trained_by().items()
    }
    flag_of_command = next((answer for answer in answers.values() if answer), "")
    return {
        name: answer
        for name, answer in answers.items()
        if flag_of_command and answer == flag_of_command
    }


def _meaning_of_word(word: str, flags: Collection[str]) -> str:
    """Say what a word may have meant that is no flag: ``-seed`` or ``NAME=VALUE``."""
    name, equals, _ = word.partition("=")
    if name.startswith("-"):
        flag = f"-{name}".replace("-", "_").replace("__", "--", 1)
        if flag in flags:
            return f": write {flag}, with two dashes"
        return nearest(flag, flags, "option")
    return (
        other_trainers.hint(name, flags=flags)
        or ": write --NAME VALUE" * bool(equals)
        or _flag_of_path(word, flags)
    )


def _flag_of_path(word: str, flags: Collection[str]) -> str:
    """Say which flag a path without one needs."""
    if "--pretrain" not in flags or not ("/" in word or Path(word).exists()):
        return ""
    if (options := Path(word, "run_config.yaml")).is_file():
        return f": of a run, --config {options} names the options and --pretrain {word} the model"
    return f": a path needs its flag, such as --pretrain {word}"


def _flag_of_algorithm(name: str, commands: Collection[str]) -> str:
    """Say which flag takes the name of an algorithm, which is no command."""
    tables = {"advantage_estimator": ADVANTAGE_ESTIMATORS, "policy_loss": POLICY_LOSSES}
    for flag, names in tables.items():
        if name.lower() in names and name.lower() not in commands:
            return f": write lightppo ppo --{flag} {name.lower()}"
    return ""


def _option_that_takes(name: Any) -> str | None:
    """Return the option of PPO whose table of algorithms has this name."""
    options = [option for option in trained_by()["ppo"].all_options() if option.names is not None]
    matching_flags = (
        option.name for option in options if str(name) in option.names and name != option.default
    )
    return next(matching_flags, None)
