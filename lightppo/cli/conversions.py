"""Options and values of other trainers → ours: by other_trainers.txt, and by a rule where several options say one thing."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    Arguments,
    is_none,
    items_of,
    truth,
)
from lightppo.cli.other_commands import PROGRAMS, OtherCommand, Program
from lightppo.config.other_trainers import parts_of, translations
from lightppo.errors import ConfigError
from lightppo.option import Option
from lightppo.plugin import trained_by

_OF_LAUNCHER = {  # ranks per node: nodes
    "trainer.n_gpus_per_node": "trainer.nnodes",
    "actor.num_gpus_per_node": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor_num_nodes",
    "cluster.n_gpus_per_node": "cluster.n_nodes",
}


def read_ranks(command: OtherCommand) -> None:
    """Read the ranks of programs whose own options say how many there are."""
    for per_node, nodes_option in _OF_LAUNCHER.items():
        rank_count = str(command.values.get(per_node, ""))
        if rank_count.isdigit():
            node_count = str(command.values.get(nodes_option))
            command.nodes = max(1, int(node_count)) if node_count.isdigit() else 1
            command.ranks = max(1, int(rank_count)) * command.nodes


def convert(
    values: Mapping[str, Any], command: OtherCommand, defaults: Mapping[str, Any]
) -> Conversion:
    """Return what values of another trainer's options are here.

    Args:
        values: by their names; without a default that is to stand.
        command: whose program they are of, and its ranks.
        defaults: of the program, by their names: what equals its default and is not here is not told.
    """
    conversion = Conversion(PROGRAMS[command.program])
    program = conversion.program
    read_names = {*_OF_LAUNCHER, *_OF_LAUNCHER.values()}
    for conversion_rule in RULES:
        given_names = tuple(
            option_name for option_name in conversion_rule.names if option_name in values
        )
        if (
            conversion_rule.trainer != program.trainer
            or program.command not in conversion_rule.commands
            or not given_names
        ):
            continue
        read_names.update(given_names)
        try:
            options = list(conversion_rule.convert(Arguments(values, command)))
        except (ValueError, IndexError) as error:
            conversion.look[given_names] = f"lightppo cannot read a value: {error}"
            continue
        for option_name, value in options:
            conversion.take(option_name, value, given_names)
    for option_name, value in values.items():
        if option_name not in read_names:
            is_default = option_name in defaults and str(defaults[option_name]) == str(value)
            conversion.take_by_table(option_name, value, is_default)
    return conversion


# What follows a flag in other_trainers.txt where a value has to be changed, or where more than this flag is meant.
_CHANGES = re.compile(
    r", (in (minutes|tokens|samples|prompts)|as |a (share|number)|one more|per rank|the (text|number)|PPO steps|"
    r"which holds|off is)|: (of each rank|samples per|rows per|that|`)| (and|switches|above|for|takes|while|or)\b|"
    r", (and )?`--| alone\b"
)
_FLAG = re.compile(r"`--(no_)?(\w+)(?: ([^`]+))?`(?: for (False)\b| for `([^`]+)`)?")
_OFF = ("", "none", "null", "false", "0", "{}", "[]")


class Conversion:
    """What a command of another trainer is here."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.options = {
            option.name: option for option in trained_by()[program.command].all_options()
        }
        self.values: dict[str, Any] = {}  # by our options
        self.sources: dict[str, tuple[str, ...]] = {}  # the names that each comes from
        self.not_here: dict[tuple[str, ...], str] = {}  # their names → why
        self.look: dict[tuple[str, ...], str] = {}  # … → what a person has to decide
        self.titles = [
            title for title in parts_of(program.command) if title.split()[0] == program.trainer
        ]

    def take(self, name: str, value: Any, source_names: tuple[str, ...]) -> None:
        """Take a value of one of our options; a value that it does not take is for a person to look at."""
        if name == NOT_HERE:
            self.not_here[source_names] = value
            return
        if name == LOOK:
            self.look[source_names] = value
            return
        if name not in self.options:
            self.not_here[source_names] = f"lightppo {self.program.command} has no --{name}"
            return
        for table_title in self.titles:
            if answers := translations(f"{name}={value}", [table_title]):
                if answers[0].text.startswith("not here"):
                    self.look[source_names] = answers[0].text
                    return
                value = re.match(r"`([^`]+)`", answers[0].text)[1]
        option = self.options[name]
        try:
            self.values[name] = option.conform(_in_type(value, option))
            self.sources[name] = source_names
        except ConfigError as error:
            self.look[source_names] = str(error)

    def take_by_table(self, name: str, value: Any, is_default: bool) -> None:
        """Take what other_trainers.txt says of a name that no rule has read."""
        own_titles = [table_title for table_title in self.titles if " " in table_title]
        answers = translations(name, own_titles) or translations(name, self.titles)
        if not answers and name.startswith("no_") and value is True:
            return self.take_by_table(name.removeprefix("no_"), False, is_default)
        text = answers[0].text if answers else ""
        if text == "=" or text.startswith("the same") or (not text and name in self.options):
            self.take(name, value, (name,))
        elif not text:
            self.look[name,] = f"no option of {self.program.trainer} that lightppo knows"
        elif text.startswith("not here"):
            if not is_default and str(value).lower() not in _OFF:
                self.not_here[name,] = text.removeprefix("not here").removeprefix(": ")
        elif not is_none(value):
            self._take_by_text(name, value, text)

    def _take_by_text(self, name: str, value: Any, text: str) -> None:
        """Take what a text says, at best a flag: with the value there, with the flag's own, or for one value alone."""
        flag_match = _FLAG.match(text)
        if flag_match is None:
            if str(value).lower() != "false":
                self.look[name,] = text
            return
        negated, option, own_value, if_false, one_value = flag_match.groups()
        option_type = self.options[option].kind if option in self.options else None
        is_switch = str(value).lower() in ("true", "false", "0", "1")
        if one_value:
            if str(value) != one_value:
                self.look[name,] = text
            elif own_value or option_type is bool:
                self.take(option, own_value or True, (name,))
        elif _CHANGES.match(text, flag_match.end()) or re.search(r"[A-Z=…]|--", own_value or ""):
            if str(value).lower() != "false":
                self.look[name,] = text
        elif own_value:
            if (truth(value) or not is_switch) != bool(if_false):
                self.take(option, own_value, (name,))
        elif option_type is bool and is_switch:
            is_on = truth(value) != bool(negated)
            self.take(option, is_on != bool(if_false), (name,))
        elif option_type is bool or (value is True and option_type is not None):
            self.look[name,] = text
        else:
            self.take(option, value, (name,))


def _in_type(value: Any, option: Option) -> Any:
    if is_none(value) and option.may_be_none:
        return None
    if option.kind is bool:
        return truth(value)
    if option.takes_several:
        return items_of(value)
    if option.kind is str and (
        isinstance(value, (list, tuple)) or re.fullmatch(r"\[.*\]", str(value))
    ):
        return ",".join(items_of(value))
    if get_origin(option.kind) is Literal:
        choices = {str(choice): choice for choice in get_args(option.kind)}
        return choices.get(str(value), value)
    return value
