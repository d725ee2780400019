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
from typing import Any, NamedTuple

from lightppo.cli.conversions import Conversion, convert, read_ranks
from lightppo.cli.other_commands import PROGRAMS, REMARKS, OtherCommand, read
from lightppo.config.cli import CommandParser, exit_on_mistakes
from lightppo.config.contradictions import condition_text, facts_of, holds, source_facts
from lightppo.config.options import OptionSet
from lightppo.config.other_trainers import plain_text
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
