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

from lightppo.cli.conversions import Ours, convert, of_launcher
from lightppo.cli.their_command import PROGRAMS, REMARKS, Theirs, read
from lightppo.config.arguments import CommandParser
from lightppo.config.cli import exit_on_mistakes
from lightppo.config.option_needs import condition_text, facts_of, holds, source_facts
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
    text = options.command[0] if len(options.command) == 1 else shlex.join(options.command)
    with exit_on_mistakes(prog):
        theirs = read(sys.stdin.read() if text == "-" else text, options.program)
        of_launcher(theirs)
        theirs.ranks = options.ranks or theirs.ranks
        lines, is_whole = translated(theirs)
    print(plain(without_secrets("\n".join(lines))))
    raise SystemExit(0 if is_whole else 1)


class Defaults(NamedTuple):
    """What a program of another trainer does where its command says nothing."""

    version: str = ""  # such as TRL 1.16.0
    values: Mapping[str, str] = {}  # by its own names


@functools.cache
def defaults() -> dict[str, Defaults]:
    """Of each program, by the names that --from takes."""
    text = Path(__file__).with_name("defaults_of_other_trainers.txt").read_text(encoding="utf-8")
    parts = re.split(r"^\[([\w -]+)\] (.*)\n", text, flags=re.MULTILINE)[1:]
    found: dict[str, Defaults] = {}
    for titles, version, lines in zip(parts[::3], parts[1::3], parts[2::3]):
        pairs = (line.partition(" ") for line in lines.strip().split("\n"))
        values = {name: value for name, _, value in pairs}
        for title in titles.split():
            earlier = found.get(title, Defaults()).values
            found[title] = Defaults(version, {**earlier, **values})
    return found


def translated(theirs: Theirs) -> tuple[list[str], bool]:
    """The lines of our script, and whether all of the command is here."""
    kind = trained_by()[PROGRAMS[theirs.program].command]
    known = defaults()[theirs.program]
    ours = convert({**known.values, **theirs.values}, theirs, known.values)
    options = {one.name: one for one in kind.all_options()}
    ours.values |= PROGRAMS[theirs.program].means
    said = {name for name, used in ours.sources.items() if theirs.values.keys() & set(used)}
    said |= {*PROGRAMS[theirs.program].means}
    if ours.values.get("advantage_estimator", "gae") != "gae":
        said.add("advantage_estimator")  # what a program is for
    given = {name: value for name, value in ours.values.items() if name in said}
    idle = _idle(kind, given)
    given = {name: value for name, value in given.items() if name not in idle}
    lines = [
        f"# {PROGRAMS[theirs.program].trainer} ({theirs.program}), {_ranks(theirs)}",
        *_command(theirs, options, given),
    ]
    parts = {
        "Not here:": _told(ours.not_here, theirs),
        "For you to decide:": [*_told(ours.look, theirs), *theirs.notes],
        "Without effect in such a run:": [
            f"{_names(ours.sources[name], theirs)}: --{name} needs {needed}"
            for name, needed in idle.items()
        ],
        "What lightppo would say of this command line:": _problems(kind, given, theirs.ranks),
    }
    for title, found in parts.items():
        if found:
            lines += ["", f"# {title}", *(line for text in found for line in _wrapped(text))]
    lines += _differences(kind, given, ours, said, known)
    option, remark = REMARKS.get(PROGRAMS[theirs.program].trainer, ("", ""))
    if remark and option not in given:
        lines += ["", f"# {remark}"]
    return lines, not any(parts.values())


def _wrapped(text: str) -> list[str]:
    """The lines of a comment."""
    more = {"initial_indent": "#   ", "subsequent_indent": "#     ", "break_on_hyphens": False}
    return textwrap.wrap(text, 110, break_long_words=False, **more)


def _ranks(theirs: Theirs) -> str:
    ranks = "1 process" if theirs.ranks == 1 else f"{theirs.ranks} processes"
    return ranks + (f" on {theirs.nodes} nodes" if theirs.nodes > 1 else "")


def _command(
    theirs: Theirs, options: Mapping[str, Option], given: Mapping[str, Any]
) -> Iterator[str]:
    """Our command line, an option a line."""
    command = PROGRAMS[theirs.program].command
    start = f"lightppo {command}"
    if theirs.nodes > 1:
        per_node = max(1, theirs.ranks // theirs.nodes)
        meeting = '--rdzv_backend=c10d --rdzv_endpoint="$HEAD:29400" --rdzv_id=run1'
        start = f"torchrun --nnodes={theirs.nodes} --nproc_per_node={per_node} {meeting} -m {start}"
    elif theirs.ranks > 1:
        start = f"deepspeed --num_gpus {theirs.ranks} --module {start}"
    flags = [_flag(options[name], given[name]) for name in options if name in given]
    *first, last = [start, *(f"    {flag}" for flag in flags)]
    yield from (f"{line} \\" for line in first)
    yield last


def _flag(one: Option, value: Any) -> str:
    """An option as the command line takes it."""
    if one.kind is bool and value is not None:
        return f"--{one.name}" if value else f"--no_{one.name}"
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([f"--{one.name}", *map(_word, values)])


def _word(value: Any) -> str:
    """In single quotes where needed; a variable of the shell stays one."""
    text = shown_default(value) if isinstance(value, bool) else str(value)
    if re.search(r"\$[{(]?\w", text) and '"' not in text:
        return f'"{text}"'
    return shlex.quote(text)


def _names(used: Sequence[str], theirs: Theirs) -> str:
    return ", ".join(name for name in used if name in theirs.values) or ", ".join(used)


def _told(found: Mapping[tuple[str, ...], str], theirs: Theirs) -> list[str]:
    """A line for each reason, behind the names that the command says; values may be keys, and are not shown."""
    names: dict[str, list[str]] = {}
    for used, text in found.items():
        if theirs.values.keys() & set(used):
            names.setdefault(plain_text(text), []).append(_names(used, theirs))
    return [f"{', '.join(of_text)}{': ' * bool(text)}{text}" for text, of_text in names.items()]


def _config(kind: type[OptionSet], given: Mapping[str, Any]) -> OptionSet:
    return kind.from_flat(given)


def _facts(config: OptionSet) -> dict[str, Any]:
    """Values with what None stands for, and which conditions hold."""
    values = config.known() if hasattr(config, "known") else config.flat()
    with suppress(ConfigError):
        values |= source_facts(config)
    return values | facts_of(config)


def _idle(kind: type[OptionSet], given: Mapping[str, Any]) -> dict[str, str]:
    """Options that would be refused, because what they need is not there: their name → what that is, in words."""
    values = _facts(_config(kind, given))
    return {
        one.name: condition_text(unmet[0])
        for one in kind.all_options()
        if one.name in given and one.is_set(given[one.name])
        if (unmet := [need for need in one.needs if not holds(need, values)])
    }


def _problems(kind: type[OptionSet], given: Mapping[str, Any], ranks: int) -> list[str]:
    """What our command line would still say of these options."""
    try:
        _config(kind, given).validate(world_size=ranks)
    except ConfigError as error:
        return [line for line in str(error).split("\n") if "None is required" not in line]
    return []


def _differences(
    kind: type[OptionSet],
    given: Mapping[str, Any],
    ours: Ours,
    said: set[str],
    known: Defaults,
) -> list[str]:
    """Comments for defaults that differ, where the command says nothing: the option that makes them equal."""
    facts = _facts(_config(kind, given))
    lines = []
    for one in kind.all_options():
        if one.name not in ours.values or one.name in said:
            continue
        value = ours.values[one.name]
        here = facts[one.name]
        if one.name.startswith("eval_") and not (
            facts.get("eval_data") or facts.get("eval_dataset")
        ):
            continue
        if one.name == "eps_clip" and facts["eps_clip_low"] == facts["eps_clip_high"]:
            here = facts["eps_clip_low"]
        if value == here or (not one.is_set(value) and not one.is_set(here)):
            continue
        if any(not holds(need, facts | ours.values) for need in one.needs):
            continue
        names = [name for name in ours.sources[one.name] if name in known.values]
        theirs = [f"{name} {known.values[name]}" for name in names]
        more = ", …" * (len(theirs) > 2)
        lines.append(
            f"#   {_flag(one, value)}    # there {', '.join(theirs[:2])}{more}; the default here is {_shown(here)}"
        )
    title = f"# Defaults of {known.version} that differ, where the command says nothing; to train as there, add:"
    return ["", title, *lines] if lines else []


def _shown(value: Any) -> str:
    return "none" if value is None else shown_default(value)
