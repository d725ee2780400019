"""Options and values of other trainers → ours: by other_trainers.txt, and by a rule where several options say one thing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from lightppo.cli import (  # noqa: F401 - they add their rules
    rules_of_areal,
    rules_of_openrlhf,
    rules_of_slime,
    rules_of_trl,
    rules_of_verl,
)
from lightppo.cli.conversion_rules import (
    LOOK,
    NOT_HERE,
    RULES,
    Their,
    is_none,
    items_of,
    truth,
)
from lightppo.cli.their_command import PROGRAMS, Program, Theirs
from lightppo.config.other_trainers import meanings, parts_of
from lightppo.errors import ConfigError
from lightppo.option import Option
from lightppo.plugin import trained_by


@dataclass
class Ours:
    """What a command of another trainer is here."""

    values: dict[str, Any] = field(default_factory=dict)  # by our options
    sources: dict[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # the names that each comes from
    not_here: dict[tuple[str, ...], str] = field(default_factory=dict)  # their names → why
    look: dict[tuple[str, ...], str] = field(
        default_factory=dict
    )  # … → what a person has to decide


_OF_LAUNCHER = (
    ("trainer.n_gpus_per_node", "trainer.nnodes"),
    ("actor.num_gpus_per_node", "actor.num_nodes"),
    ("actor_num_gpus_per_node", "actor_num_nodes"),
    ("cluster.n_gpus_per_node", "cluster.n_nodes"),
)


def of_launcher(theirs: Theirs) -> None:
    """The ranks of programs whose own options say how many there are."""
    for per_node, nodes in _OF_LAUNCHER:
        if str(theirs.values.get(per_node, "")).isdigit():
            count = str(theirs.values.get(nodes, "1"))
            theirs.nodes = int(count) if count.isdigit() else 1
            theirs.nodes = max(1, theirs.nodes)
            theirs.ranks = max(1, int(theirs.values[per_node])) * theirs.nodes


def convert(values: Mapping[str, Any], theirs: Theirs, defaults: Mapping[str, Any]) -> Ours:
    """What values of another trainer's options are here.

    Args:
        values: by their names; without a default that is to stand.
        theirs: the program that they are of, and its ranks.
        defaults: of the program, by their names: what equals its default and is not here is not told.
    """
    program = PROGRAMS[theirs.program]
    options = {one.name: one for one in trained_by()[program.command].all_options()}
    ours = Ours()
    taken = {name for names in _OF_LAUNCHER for name in names}
    of_program = [
        one for one in RULES if one.trainer == program.trainer and program.command in one.commands
    ]
    for one in of_program:
        if used := tuple(name for name in one.names if name in values):
            taken |= set(used)
            try:
                found = list(one.yields(Their(values, theirs)))
            except (ValueError, IndexError) as error:
                ours.look[used] = f"lightppo cannot read a value: {error}"
                continue
            for name, value in found:
                _take(ours, program, options, name, value, used)
    for name, value in values.items():
        if name not in taken:
            is_default = name in defaults and str(defaults[name]) == str(value)
            _by_table(ours, program, options, name, value, is_default)
    return ours


def _take(
    ours: Ours,
    program: Program,
    options: Mapping[str, Option],
    name: str,
    value: Any,
    used: tuple[str, ...],
) -> None:
    """Take a value of one of our options; a value that it does not take is for a person to look at."""
    if name in (NOT_HERE, LOOK):
        (ours.not_here if name == NOT_HERE else ours.look)[used] = value
        return
    if name not in options:
        ours.not_here[used] = f"lightppo {program.command} has no --{name}"
        return
    for title in parts_of(program.command):
        found = meanings(f"{name}={value}", [title]) if title.split()[0] == program.trainer else []
        if found and found[0].text.startswith("not here"):
            ours.look[used] = found[0].text
            return
        if found:
            value = re.match(r"`([^`]+)`", found[0].text)[1]
    try:
        ours.values[name] = options[name].conform(_in_type(value, options[name]))
        ours.sources[name] = used
    except ConfigError as error:
        ours.look[used] = str(error)


def _in_type(value: Any, one: Option) -> Any:
    if is_none(value) and one.may_be_none:
        return None
    if one.kind is bool:
        return truth(value)
    if one.takes_several:
        return items_of(value)
    if one.kind is str and (
        isinstance(value, (list, tuple)) or re.fullmatch(r"\[.*\]", str(value))
    ):
        return ",".join(items_of(value))
    choices = {str(choice): choice for choice in get_args(one.kind)}
    if get_origin(one.kind) is Literal:
        return choices.get(str(value), value)
    return value


# What follows a flag in other_trainers.txt where a value has to be changed, or where more than this flag is meant.
_CHANGES = re.compile(
    r", (in (minutes|tokens|samples|prompts)|as |a (share|number)|one more|per rank|the (text|number)|PPO steps|"
    r"which holds|off is)|: (of each rank|samples per|rows per|that|`)| (and|switches|above|for|takes|while|or)\b|"
    r", (and )?`--| alone\b"
)


def _by_table(
    ours: Ours,
    program: Program,
    options: Mapping[str, Option],
    name: str,
    value: Any,
    is_default: bool,
) -> None:
    """What other_trainers.txt says of a name that no rule has taken."""
    titles = [title for title in parts_of(program.command) if title.split()[0] == program.trainer]
    own = [title for title in titles if " " in title]
    found = meanings(name, own) or meanings(name, titles)
    if not found and name.startswith("no_") and value is True:
        name = name.removeprefix("no_")
        value = False
        return _by_table(ours, program, options, name, value, is_default)
    text = found[0].text if found else ""
    if text == "=" or text.startswith("the same") or (not text and name in options):
        _take(ours, program, options, name, value, (name,))
    elif not text:
        ours.look[name,] = f"no option of {program.trainer} that lightppo knows"
    elif text.startswith("not here"):
        if not is_default and str(value).lower() not in (
            "",
            "none",
            "null",
            "false",
            "0",
            "{}",
            "[]",
        ):
            ours.not_here[name,] = text.removeprefix("not here").removeprefix(": ")
    elif not is_none(value):
        _by_text(ours, program, options, name, value, text)


def _by_text(
    ours: Ours, program: Program, options: Mapping[str, Option], name: str, value: Any, text: str
) -> None:
    """By a text that begins with a flag: with the value there, with the flag's own, or for one value alone."""
    flag = re.match(r"`--(no_)?(\w+)(?: ([^`]+))?`(?: for (False)\b| for `([^`]+)`)?", text)
    kind = _kind(options, flag[2]) if flag else None
    is_switch = str(value).lower() in ("true", "false", "0", "1")
    if flag and flag[5]:  # for this value
        if str(value) == flag[5] and (flag[3] or kind is bool):
            _take(ours, program, options, flag[2], flag[3] or True, (name,))
        elif str(value) != flag[5]:
            ours.look[name,] = text
    elif not flag or _CHANGES.match(text, flag.end()) or re.search(r"[A-Z=…]|--", flag[3] or ""):
        if str(value).lower() != "false":
            ours.look[name,] = text
    elif flag[3]:
        if (truth(value) or not is_switch) != bool(flag[4]):
            _take(ours, program, options, flag[2], flag[3], (name,))
    elif kind is bool and is_switch:
        _take(
            ours,
            program,
            options,
            flag[2],
            (truth(value) != bool(flag[1])) != bool(flag[4]),
            (name,),
        )
    elif kind is bool or (value is True and kind is not None):
        ours.look[name,] = text
    else:
        _take(ours, program, options, flag[2], value, (name,))


def _kind(options: Mapping[str, Option], name: str) -> Any:
    return options[name].kind if name in options else None
