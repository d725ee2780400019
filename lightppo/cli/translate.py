"""``lightppo translate``: a command of another trainer, its script or its YAML, as a command line of lightppo."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

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
from lightppo.cli.other_commands import PROGRAMS, REMARKS, OtherCommand, Program, read
from lightppo.config.cli import CommandParser, exit_on_mistakes
from lightppo.config.contradictions import condition_text, facts_of, holds, source_facts
from lightppo.config.options import OptionSet
from lightppo.config.other_trainers import parts_of, plain_text, translations
from lightppo.errors import ConfigError
from lightppo.option import Option, shown_default
from lightppo.plugin import trained_by
from lightppo.redaction import plain, without_secrets


def main(argv: Sequence[str], prog: str = "lightppo translate") -> None:
    """Print our command line, and as comments what is not here and which defaults differ.

    Raises:
        SystemExit: code 0 if all of the command is here, 1 if a line says what is not, 2 if it cannot be read.
    """
    parser = CommandParser(
        prog=prog,
        description="Print a command of another trainer as a command line of lightppo: a shell script whose comments "
        "say what is not here, what is for you to decide, and which defaults differ where the command says nothing.",
        epilog="exit code: 0 if all of the command is here, 1 if a comment says what is not, 2 if it cannot be read",
    )
    parser.add_argument("--from", dest="program", choices=PROGRAMS, metavar="PROGRAM",
                        help=f"the program, where the command does not name it: {', '.join(PROGRAMS)}")  # fmt: skip
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes over all nodes, where the launcher does not say",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND",
                        help="the command in quotes, a script or a YAML file; - for standard input")  # fmt: skip
    options = parser.parse_args(argv)
    if options.ranks is not None and options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: must be at least 1")
    if not any(word.strip() for word in options.command):
        parser.error("a command is missing: give it in quotes, or a script or YAML file")
    text = shlex.join(options.command)
    if len(options.command) == 1:
        (text,) = options.command
    if text == "-":
        text = sys.stdin.read()
    with exit_on_mistakes(prog):
        command = read(text, options.program)
        read_ranks(command)
        command.ranks = options.ranks or command.ranks
        lines, is_complete = translated(command)
    print(plain(without_secrets("\n".join(lines))))
    raise SystemExit(0 if is_complete else 1)


class Defaults(NamedTuple):
    """What a program of another trainer does where its command says nothing."""

    version: str = ""  # such as TRL 1.16.0
    values: Mapping[str, str] = {}  # by its own names


@functools.cache
def defaults() -> dict[str, Defaults]:
    """Return those of each program, by the names that --from takes."""
    defaults_text = (
        Path(__file__).with_name("defaults_of_other_trainers.txt").read_text(encoding="utf-8")
    )
    parts = re.split(r"^\[([\w -]+)\] (.*)\n", defaults_text, flags=re.MULTILINE)[1:]
    programs: dict[str, Defaults] = {}
    for titles, version, default_lines in zip(parts[::3], parts[1::3], parts[2::3]):
        pairs = (line.partition(" ") for line in default_lines.strip().split("\n"))
        values = {option_name: value for option_name, _, value in pairs}
        for title in titles.split():
            earlier = programs.get(title, Defaults()).values
            programs[title] = Defaults(version, {**earlier, **values})
    return programs


def translated(command: OtherCommand) -> tuple[list[str], bool]:
    """Return the lines of our script, and whether all of the command is here."""
    program = PROGRAMS[command.program]
    config_class = trained_by()[program.command]
    theirs = defaults()[command.program]
    conversion = convert({**theirs.values, **command.values}, command, theirs.values)
    conversion.values |= program.means
    chosen = {*program.means}  # and not defaults
    for option_name, source_names in conversion.sources.items():
        if command.values.keys() & set(source_names):
            chosen.add(option_name)
    if conversion.values.get("advantage_estimator", "gae") != "gae":
        chosen.add("advantage_estimator")  # what a program is for
    values = {
        option_name: value
        for option_name, value in conversion.values.items()
        if option_name in chosen
    }
    idle = _idle(config_class, values)
    values = {
        option_name: value for option_name, value in values.items() if option_name not in idle
    }
    script_lines = [
        f"# {program.trainer} ({command.program}), {_ranks(command)}",
        *_command(command, conversion.options, values),
    ]
    comment_parts = {
        "Not here:": _by_reason(conversion.not_here, command),
        "For you to decide:": [*_by_reason(conversion.look, command), *command.notes],
        "Without effect in such a run:": [
            f"{_names(conversion.sources[option_name], command)}: --{option_name} needs {condition}"
            for option_name, condition in idle.items()
        ],
        "What lightppo would say of this command line:": _problems(
            config_class, values, command.ranks
        ),
    }
    for title, part_texts in comment_parts.items():
        if part_texts:
            script_lines += [
                "",
                f"# {title}",
                *(line for text in part_texts for line in _wrapped(text)),
            ]
    script_lines += _differences(config_class.from_flat(values), conversion, chosen, theirs)
    option, remark = REMARKS.get(program.trainer, ("", ""))
    if remark and option not in values:
        script_lines += ["", f"# {remark}"]
    return script_lines, not any(comment_parts.values())


def _wrapped(text: str) -> list[str]:
    """Return the lines of a comment."""
    return textwrap.wrap(
        text,
        110,
        initial_indent="#   ",
        subsequent_indent="#     ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _ranks(command: OtherCommand) -> str:
    if command.nodes > 1:
        return f"{command.ranks} processes on {command.nodes} nodes"
    return f"{command.ranks} process{'es' * (command.ranks > 1)}"


def _command(
    command: OtherCommand, options: Mapping[str, Option], values: Mapping[str, Any]
) -> Iterator[str]:
    """Yield our command line, an option a line."""
    command_words = f"lightppo {PROGRAMS[command.program].command}"
    if command.nodes > 1:
        per_node = max(1, command.ranks // command.nodes)
        rendezvous = '--rdzv_backend=c10d --rdzv_endpoint="$HEAD:29400" --rdzv_id=run1'
        command_words = f"torchrun --nnodes={command.nodes} --nproc_per_node={per_node} {rendezvous} -m {command_words}"
    elif command.ranks > 1:
        command_words = f"deepspeed --num_gpus {command.ranks} --module {command_words}"
    option_flags = [_flag(options[name], values[name]) for name in options if name in values]
    yield from " \\\n    ".join([command_words, *option_flags]).split("\n")


def _flag(option: Option, value: Any) -> str:
    """Return an option as the command line takes it."""
    if option.kind is bool and value is not None:
        return f"--{option.name}" if value else f"--no_{option.name}"
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([f"--{option.name}", *map(_word, values)])


def _word(value: Any) -> str:
    """Return a word in single quotes where needed; a variable of the shell stays one."""
    word_text = shown_default(value) if isinstance(value, bool) else str(value)
    if re.search(r"\$[{(]?\w", word_text) and '"' not in word_text:
        return f'"{word_text}"'
    return shlex.quote(word_text)


def _names(source_names: Sequence[str], command: OtherCommand) -> str:
    return ", ".join(
        source_name for source_name in source_names if source_name in command.values
    ) or ", ".join(source_names)


def _by_reason(reasons: Mapping[tuple[str, ...], str], command: OtherCommand) -> list[str]:
    """Return a line for each reason, behind the names that the command says; values may be keys, and are not shown."""
    names_by_text: dict[str, list[str]] = {}
    for source_names, reason in reasons.items():
        if command.values.keys() & set(source_names):
            names_by_text.setdefault(plain_text(reason), []).append(_names(source_names, command))
    return [
        ": ".join(filter(None, (", ".join(source_names), reason)))
        for reason, source_names in names_by_text.items()
    ]


def _facts(config: OptionSet) -> dict[str, Any]:
    """Return values with what None stands for, and which conditions hold."""
    values = config.known()
    with suppress(ConfigError):
        values |= source_facts(config)
    return values | facts_of(config)


def _idle(kind: type[OptionSet], values: Mapping[str, Any]) -> dict[str, str]:
    """Return options that would be refused, because what they need is not there: name → what that is, in words."""
    facts = _facts(kind.from_flat(values))
    return {
        option.name: condition_text(unmet_conditions[0])
        for option in kind.all_options()
        if option.name in values and option.is_set(values[option.name])
        if (
            unmet_conditions := [
                condition for condition in option.needs if not holds(condition, facts)
            ]
        )
    }


def _problems(kind: type[OptionSet], values: Mapping[str, Any], ranks: int) -> list[str]:
    """Return what our command line would still say of these options."""
    try:
        kind.from_flat(values).validate(world_size=ranks)
    except ConfigError as error:
        return [problem for problem in str(error).split("\n") if "None is required" not in problem]
    return []


def _differences(
    config: OptionSet, conversion: Conversion, chosen: set[str], theirs: Defaults
) -> list[str]:
    """Return comments for defaults that differ, where the command says nothing: the option that makes them equal."""
    facts = _facts(config)
    if facts.get("eps_clip_low") == facts.get("eps_clip_high"):
        facts["eps_clip"] = facts.get("eps_clip_low")
    evaluates = facts.get("eval_data") or facts.get("eval_dataset")
    option_lines = []
    for option_name, option in conversion.options.items():
        if option_name not in conversion.values or option_name in chosen:
            continue
        if option_name.startswith("eval_") and not evaluates:
            continue
        value = conversion.values[option_name]
        default = facts[option_name]
        if value == default or not (option.is_set(value) or option.is_set(default)):
            continue
        if any(not holds(condition, facts | conversion.values) for condition in option.needs):
            continue
        source_names = [
            source for source in conversion.sources[option_name] if source in theirs.values
        ]
        other_defaults = ", ".join(
            f"{source} {theirs.values[source]}" for source in source_names[:2]
        )
        if len(source_names) > 2:
            other_defaults += ", …"
        default_text = "none" if default is None else shown_default(default)
        option_lines.append(
            f"#   {_flag(option, value)}    # there {other_defaults}; the default here is {default_text}"
        )
    title = f"# Defaults of {theirs.version} that differ, where the command says nothing; to train as there, add:"
    return option_lines and ["", title, *option_lines]


# -- options and values: by other_trainers.txt, and by a rule where several options say one thing --------------------

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
