"""Command line and YAML → options, by argparse out of the declarations.

Mistakes end with exit code 2 and one line each, before any model is loaded.
"""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml

from lightppo.config import evaluation_options, option_needs
from lightppo.config.help_page import help_text
from lightppo.config.option_errors import conform, nearest
from lightppo.config.options import OptionSet, PPOConfig
from lightppo.config.wandb_key import take_wandb_key
from lightppo.errors import ConfigError
from lightppo.option import Option, Section
from lightppo.redaction import plain, without_secrets

C = TypeVar("C", bound=OptionSet)


def parse_args(
    argv: Sequence[str] | None = None,
    prog: str = "train_ppo.py",
    kind: type[C] = PPOConfig,
    world_size: int | None = None,
    unfed: bool = False,
) -> C:
    """Parse flags (and ``--config FILE.yaml`` beneath them) into a checked config, as it was asked for.

    Args:
        argv: arguments; ``None`` for the arguments of this process.
        prog: name of the program in messages.
        kind: the command's options.
        world_size: ranks to check for; ``None``: those of this run.
        unfed: the run is only computed, see :func:`~lightppo.config.contradictions.contradictions`.

    Raises:
        SystemExit: code 2 on an unknown flag or key, a value out of range or a contradiction; code 0 after ``--help``.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if {"--help", "-h"} & {*arguments}:
        print_on_rank_0(help_text(prog, "all" in arguments, kind))
        raise SystemExit(0)
    with exit_on_mistakes(prog):
        flags = read_flags(arguments, list(kind.all_options()))
        config = kind()
        if flags.get("config") is not None:
            config = with_file(config, flags["config"])
        config = config.with_options(**flags)
        parts = config.parts()
        if problems := [line for part in parts for line in part.without_effect(config, flags)]:
            raise ConfigError("\n".join(problems))
        computed = {"unfed": True} if unfed else {}
        config.validate(world_size=world_size or int(os.environ.get("WORLD_SIZE", "1")), **computed)
        notes = (option_needs.notes(config, flags), evaluation_options.notes(config, flags))
        for line in itertools.chain(*notes):
            print_on_rank_0(f"{prog}: note: {line}\n", sys.stderr)
    return config


@contextmanager
def exit_on_mistakes(
    prog: str, kind: type[Exception] | tuple[type[Exception], ...] = ConfigError
) -> Iterator[None]:
    """Turns errors of these kinds into exit code 2, and prints its lines on rank 0."""
    try:
        yield
    except kind as error:
        for line in str(error).split("\n"):
            print_on_rank_0(f"{prog}: error: {line}\n", sys.stderr)
        raise SystemExit(2) from None


def print_on_rank_0(text: str, file: Any = None) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(plain(without_secrets(text)), end="", file=file)


# -- flags and YAML --------------------------------------------------------------------------------------------------


def read_flags(arguments: Sequence[str], options: Sequence[Option]) -> dict[str, Any]:
    """The options that are given, in their types; a ConfigError has one line for each mistake."""
    # --train-batch-size is --train_batch_size
    spelled = [
        re.sub(r"^--[A-Za-z][\w-]*", lambda m: "--" + m[0][2:].replace("-", "_"), text)
        for text in arguments
    ]
    spelled = take_wandb_key(spelled)
    parser = _parser(options)
    given, unknown = parser.parse_known_args(spelled)
    problems = parser.problems + _unknown_arguments(unknown, options, spelled)
    if len(files := _config_files(spelled)) > 1:
        named = " and ".join(files)
        problems.append(
            f"--config is given twice, {named}: name one file, whose key `config` may name the other one"
        )
    values = {}
    for option in options:
        if option.name in given:
            try:
                values[option.name] = conform(option, _typed(getattr(given, option.name), option))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def _config_files(words: Sequence[str]) -> list[str]:
    """The files that the words name by ``--config``; None takes one back and is no file."""
    values = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    values += [value for flag, value in itertools.pairwise(words) if flag == "--config"]
    return [value for value in values if value != "None"]


def _unknown_arguments(
    unknown: Sequence[str], options: Iterable[Option], words: Sequence[str]
) -> list[str]:
    """A message for each of the words that no option takes; the value of an unknown flag has none of its own."""
    lists = [f"--{option.name}" for option in options if "several with commas" in option.help]
    flags = [f"--{option.name}" for option in options]
    problems = []
    for before, word in zip(["", *unknown], unknown):
        name, is_assigned, _ = word.partition("=")
        if name.startswith("--"):
            problems.append(f"unknown flag {name}{nearest(name, flags, 'option')}")
        elif (is_flag := _FLAG.match(name)) or not _FLAG.match(before):
            shown = f"{name}=…" if is_assigned and not is_flag else name  # the value may be a key
            cure = _with_commas(words, word, lists) or nearest(word, flags, "word")
            problems.append(f"unexpected argument {shown!r}{cure}")
    return problems


def _with_commas(words: Sequence[str], word: str, lists: Sequence[str]) -> str:
    """What to write for ``--prompt_data a.jsonl b.jsonl``; nothing, where a word follows no such flag."""
    before = list(words[: words.index(word)]) if word in words else []
    values = list(itertools.takewhile(lambda each: not _FLAG.match(each), reversed(before)))
    flag = before[-len(values) - 1] if len(values) < len(before) else ""
    flag, _, value = flag.partition("=")
    first = [*([value] if value else []), *reversed(values)]
    if flag not in lists or not first:
        return ""
    return f": separate several with commas: {flag} {','.join([*first, word])}"


_FLAG = re.compile("-+[a-zA-Z]")


class _Parser(argparse.ArgumentParser):
    def __init__(self, **more: Any) -> None:
        super().__init__(
            add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, **more
        )
        # argparse's own takes -1e5 for a flag
        self._negative_number_matcher = re.compile(
            r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|-inf$", re.IGNORECASE
        )
        self.problems: list[str] = []

    def error(self, message: str) -> Any:
        raise ConfigError(message)


class _Switch(argparse.Action):
    """``--x`` and ``--no_x``; also ``--x True``, ``False`` or ``None`` where None is a value."""

    def __init__(self, may_be_none: bool, **more: Any) -> None:
        super().__init__(nargs="?", **more)
        self.may_be_none = may_be_none

    def __call__(self, parser: Any, namespace: Any, value: Any, flag: str | None = None) -> None:
        takes_value = self.may_be_none and flag == f"--{self.dest}"
        if value is not None and not takes_value:
            fix = f"write --{self.dest} for on, --no_{self.dest} for off"
            parser.problems.append(f"{flag} {value}: a switch takes no value: {fix}")
            value = None
        setattr(namespace, self.dest, value or str(flag == f"--{self.dest}"))


def _parser(options: Iterable[Option]) -> _Parser:
    parser = _Parser()
    for option in options:
        if option.kind is bool:
            flags = [f"--{option.name}", f"--no_{option.name}"]
            parser.add_argument(*flags, action=_Switch, may_be_none=option.may_be_none)
        else:
            nargs = "*" if get_origin(option.kind) is tuple else None
            parser.add_argument(f"--{option.name}", nargs=nargs)
    return parser


def _typed(value: str | list[str], option: Option) -> Any:
    """What a text on the command line means; numbers are left to the option's validator."""
    meant: dict[str, Any] = {"None": None} if option.may_be_none else {}
    if option.kind is bool:
        meant |= {"True": True, "False": False}
    if get_origin(option.kind) is Literal:
        meant |= {str(choice): choice for choice in get_args(option.kind)}
    if isinstance(value, list):
        if value == ["None"] and option.may_be_none:
            return None
        return value
    return meant.get(value, value)


def with_file(config: C, path: str, above: tuple[str, ...] = ()) -> C:
    """The config with the options of the ``--config`` file, over those of the file beside it that it names itself."""
    values: dict[str, Any] = {}
    try:
        values = _read_yaml(path, config.sections())
        if (base := values.pop("config", None)) is not None:
            if path in above:
                raise ConfigError("'config' leads back to this file")
            config = with_file(config, str(Path(path).parent / str(base)), (*above, path))
        return config.with_options(**values)
    except ConfigError as error:
        lines = str(error).split("\n")
        if any("." in name for name in values):
            more = f"{len(lines) - _MOST} more lines like these" if len(lines) > _MOST else ""
            advice = f"nested keys are of another trainer: lightppo translate {path} says what they are here"
            lines = [*lines[:_MOST], *filter(None, [more]), advice]
        raise ConfigError("\n".join(f"--config {path}: {line}" for line in lines)) from error


_MOST = 8  # lines about a file of another trainer, which may have hundreds of keys


def _read_yaml(path: str, sections: Mapping[str, type[Section]]) -> dict[str, Any]:
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"must be a mapping of option to value, not a {type(values).__name__}")
    for name, value in values.items():
        own = sections[name].options() if name in sections else {}
        if isinstance(value, dict) and value and value.keys() <= own.keys():
            raise ConfigError(
                f"sections are not nested: write the options of {name!r} at the top level"
            )
    options = {name for kind in sections.values() for name in kind.options()}
    mine = {str(name): value for name, value in values.items() if str(name) in options}
    return mine | dotted({name: value for name, value in values.items() if str(name) not in mine})


def dotted(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested keys, as other trainers' files have them, with dots between."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_nested = isinstance(value, dict) and value
        flat |= dotted(value, f"{above}{name}.") if is_nested else {f"{above}{name}": value}
    return flat


class _Loader(yaml.SafeLoader):
    """Plain YAML, but an option that is given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, key in enumerate(keys):
            if key.value in {earlier.value for earlier in keys[:i]}:
                problem = f"option {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(
                    problem=problem, problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)
