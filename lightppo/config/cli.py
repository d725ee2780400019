"""Command line and YAML → options, by argparse out of the declarations; ``--help``; the arguments of small commands.

Mistakes end with exit code 2 and one line each, before any model is loaded.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import yaml

from lightppo.config import evaluation_options
from lightppo.config.contradictions import condition_text, idle_notes
from lightppo.config.option_errors import conform, nearest
from lightppo.config.options import OptionSet, PPOConfig
from lightppo.errors import ConfigError
from lightppo.option import Option, Section, choices, range_text, shown_default
from lightppo.plugin import trained_by
from lightppo.redaction import plain, without_secrets
from lightppo.suggestions import answer_of

C = TypeVar("C", bound=OptionSet)
S = TypeVar("S", bound=Section)


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
        notes = (idle_notes(config, flags), evaluation_options.notes(config, flags))
        for line in itertools.chain(*notes):
            print_on_rank_0(f"{prog}: note: {line}\n", sys.stderr)
    return config


@contextmanager
def exit_on_mistakes(
    prog: str, kind: type[Exception] | tuple[type[Exception], ...] = ConfigError, code: int = 2
) -> Iterator[None]:
    """Turn errors of these kinds into an exit code, and print their lines on rank 0."""
    try:
        yield
    except kind as error:
        for line in str(error).split("\n"):
            print_on_rank_0(f"{prog}: error: {line}\n", sys.stderr)
        raise SystemExit(code) from None


def print_on_rank_0(text: str, file: Any = None) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(plain(without_secrets(text)), end="", file=file)


# -- flags and YAML --------------------------------------------------------------------------------------------------


def read_flags(arguments: Sequence[str], options: Sequence[Option]) -> dict[str, Any]:
    """Return the options that are given, in their types; a ConfigError has one line for each mistake."""
    # --train-batch-size is --train_batch_size
    spelled = [
        re.sub(r"^--[A-Za-z][\w-]*", lambda match: "--" + match[0][2:].replace("-", "_"), text)
        for text in arguments
    ]
    spelled = take_wandb_key(spelled)
    parser = _parser(options)
    namespace, unknown = parser.parse_known_args(spelled)
    problems = parser.problems + _unknown_arguments(unknown, options, spelled)
    if len(files := _config_files(spelled)) > 1:
        named_files = " and ".join(files)
        problems.append(
            f"--config is given twice, {named_files}: name one file, whose key `config` may name the other one"
        )
    values = {}
    for option in options:
        if option.name in namespace:
            try:
                values[option.name] = conform(
                    option, _typed_value(getattr(namespace, option.name), option)
                )
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return values


def _config_files(words: Sequence[str]) -> list[str]:
    """Return the files that the words name by ``--config``; None takes one back and is no file."""
    values = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    values += [value for flag, value in itertools.pairwise(words) if flag == "--config"]
    return [value for value in values if value != "None"]


def _unknown_arguments(
    unknown: Sequence[str], options: Iterable[Option], words: Sequence[str]
) -> list[str]:
    """Return a message for each of the words that no option takes; the value of an unknown flag has none of its own."""
    lists = [f"--{option.name}" for option in options if "several with commas" in option.help]
    flags = [f"--{option.name}" for option in options]
    problems = []
    for previous_word, word in zip(["", *unknown], unknown):
        name, is_assigned, _ = word.partition("=")
        if name.startswith("--"):
            problems.append(f"unknown flag {name}{nearest(name, flags, 'option')}")
        elif (is_flag := _FLAG.match(name)) or not _FLAG.match(previous_word):
            shown_word = name
            if is_assigned and not is_flag:
                shown_word = f"{name}=…"  # the value may be a key
            cure = _with_commas(words, word, lists) or nearest(word, flags, "word")
            problems.append(f"unexpected argument {shown_word!r}{cure}")
    return problems


def _with_commas(words: Sequence[str], word: str, lists: Sequence[str]) -> str:
    """Return what to write for ``--prompt_data a.jsonl b.jsonl``; nothing, where a word follows no such flag."""
    words_before = list(words[: words.index(word)]) if word in words else []
    values = list(itertools.takewhile(lambda each: not _FLAG.match(each), reversed(words_before)))
    flag = words_before[-len(values) - 1] if len(values) < len(words_before) else ""
    flag, _, value = flag.partition("=")
    list_values = [*([value] if value else []), *reversed(values)]
    if flag not in lists or not list_values:
        return ""
    return f": separate several with commas: {flag} {','.join([*list_values, word])}"


_FLAG = re.compile("-+[a-zA-Z]")


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(
            add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, **options
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

    def __init__(self, may_be_none: bool, **options: Any) -> None:
        super().__init__(nargs="?", **options)
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


def _typed_value(value: str | list[str], option: Option) -> Any:
    """Return what a text on the command line means; numbers are left to the option's validator."""
    value_of_text: dict[str, Any] = {"None": None} if option.may_be_none else {}
    if option.kind is bool:
        value_of_text |= {"True": True, "False": False}
    if get_origin(option.kind) is Literal:
        value_of_text |= {str(choice): choice for choice in get_args(option.kind)}
    if isinstance(value, list):
        if value == ["None"] and option.may_be_none:
            return None
        return value
    return value_of_text.get(value, value)


def with_file(config: C, path: str, above: tuple[str, ...] = ()) -> C:
    """Return the config with the options of the ``--config`` file, over those of the file beside it that it names."""
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
            omitted_lines = (
                f"{len(lines) - _MOST} more lines like these" if len(lines) > _MOST else ""
            )
            advice = f"nested keys are of another trainer: lightppo translate {path} says what they are here"
            lines = [*lines[:_MOST], *filter(None, [omitted_lines]), advice]
        raise ConfigError("\n".join(f"--config {path}: {line}" for line in lines)) from error


_MOST = 8  # lines about a file of another trainer, which may have hundreds of keys


def _read_yaml(path: str, sections: Mapping[str, type[Section]]) -> dict[str, Any]:
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"must be a mapping of option to value, not a {type(values).__name__}")
    for name, value in values.items():
        section_options = sections[name].options() if name in sections else {}
        if isinstance(value, dict) and value and value.keys() <= section_options.keys():
            raise ConfigError(
                f"sections are not nested: write the options of {name!r} at the top level"
            )
    options = {name for kind in sections.values() for name in kind.options()}
    option_values = {str(name): value for name, value in values.items() if str(name) in options}
    return option_values | dotted(
        {name: value for name, value in values.items() if str(name) not in option_values}
    )


def dotted(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested keys, as other trainers' files have them, with dots between."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_nested = isinstance(value, dict) and value
        flat |= dotted(value, f"{above}{name}.") if is_nested else {f"{above}{name}": value}
    return flat


class UniqueKeyLoader(yaml.SafeLoader):
    """Plain YAML, but a key that is given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, key in enumerate(keys):
            if key.value in {earlier.value for earlier in keys[:i]}:
                problem = f"{key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(
                    problem=problem, problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)


# -- --use_wandb KEY: the key must not be seen by others, nor be recorded --------------------------------------------

_KEY = "WANDB_API_KEY"


def take_wandb_key(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the key of ``--use_wandb KEY``, which goes where wandb looks."""
    arguments_without_key: list[str] = []
    for previous_argument, argument in zip(["", *arguments], arguments):
        with_key = argument.startswith("--use_wandb=")
        if with_key:
            key = argument.partition("=")[2]
        elif previous_argument == "--use_wandb":
            key = argument
        else:
            key = ""
        if not key or key.startswith("-") or key in ("True", "False", "None"):
            arguments_without_key.append(argument)
            continue
        arguments_without_key += ["--use_wandb"] * with_key
        os.environ[_KEY] = key
        sys.argv = [word.replace(key, "…") for word in sys.argv]  # wandb records them
        _hide_argument(key)
    return arguments_without_key


def _hide_argument(secret: str) -> None:
    """Overwrite an argument of this process where Linux shows it (/proc/PID/cmdline, ps)."""
    try:
        start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
        with open("/proc/self/mem", "r+b") as memory:
            memory.seek(start)
            position = memory.read(end - start).find(secret.encode())
            if position >= 0:
                memory.seek(start + position)
                memory.write(b"*" * len(secret.encode()))
    except OSError as error:
        if os.environ.get("RANK", "0") == "0":
            note = f"note: --use_wandb KEY stays visible in the process list ({error}); set {_KEY} instead"
            print(note, file=sys.stderr)


# -- --help: one screen of the usual options of a command, or all options by section ---------------------------------

# What --help shows: the options that most people set, on one screen.
_SCREEN = {
    "Run": "config save_path save_steps eval_steps use_wandb",
    "Model": "pretrain bf16 lora_rank gradient_checkpointing zero_stage",
    "Data": "prompt_data eval_data input_key label_key apply_chat_template prompt_max_len",
    "Reward (one of them)": "reward_fn reward_source reward_pretrain remote_rm_url",
    "Rollout": "rollout_engine rollout_batch_size n_samples_per_prompt generate_max_len temperature",
    "Algorithm": "advantage_estimator policy_loss init_kl_coef use_kl_loss",
    "Training": "train_batch_size micro_train_batch_size max_epochs num_episodes actor_learning_rate "
    "critic_learning_rate packing_samples",
}
_ALL = "--help all shows all options"


def help_text(prog: str, everything: bool, kind: type[OptionSet] = PPOConfig) -> str:
    """Return one screen of the usual options, or all by section with unit, range, default and what they need."""
    usage = "--pretrain MODEL --dataset FILE"
    screen = getattr(kind, "screen", {})
    description = kind.__doc__
    if kind is PPOConfig:
        usage = "--pretrain MODEL --prompt_data FILE --reward_fn FILE.py"
        screen = _SCREEN
        description = "Train a causal language model with PPO."
    lines = [f"usage: {prog} {usage} [--config FILE.yaml] [flags]"]
    if everything:
        lines += [
            "",
            f"{description} One process per GPU (or CPU rank): deepspeed, torchrun or python.",
        ]
        for section in kind.sections().values():
            lines += ["", *_section_lines(section)]
    else:
        lines += [*_screen_lines(kind, screen), f"{_ALL}, docs/flags.md their table."]
    return "\n".join(lines) + "\n"


def _screen_lines(kind: type[OptionSet], screen: Mapping[str, str]) -> Iterator[str]:
    options = {option.name: option for option in kind.all_options()}
    for title, names in screen.items():
        yield f"{title}:"
        for option in map(options.__getitem__, names.split()):
            text = option.help.partition(". ")[0].rstrip(".")
            shown_value = "required" if option.required else shown_default(option.default)
            is_noted = option.required or option.default not in (None, (), False)
            yield f"  --{option.name:<23} {text}{f' [{shown_value}]' * is_noted}"


def section_help(usage: str, section: type[Section]) -> str:
    """Return how a program is called, and the options of one section."""
    return "\n".join([f"usage: {usage}", "", *_section_lines(section)]) + "\n"


def _section_lines(section: type[Section]) -> Iterator[str]:
    yield section.__doc__ or ""
    for option in section.options().values():
        conditions = " and ".join(map(condition_text, option.needs))
        needs = f"needs {conditions}" if conditions else ""
        notes = "; ".join(
            filter(None, ["required" * option.required, option.unit, range_text(option), needs])
        )
        yield f"  {_flag_text(option)}"
        yield f"      {option.help}{f' [{notes}]' * bool(notes)} (default: {shown_default(option.default)})"


def _flag_text(option: Option) -> str:
    if option.kind is bool:
        return f"--{option.name}, --no_{option.name}"
    several = " ..." if get_origin(option.kind) is tuple else ""
    kind = get_args(option.kind)[0] if several else option.kind
    values = "|".join(map(str, choices(option)))
    return f"--{option.name} {values or _METAVARS[kind] + several}"


_METAVARS = {int: "N", float: "NUMBER", str: "TEXT"}


# -- commands that are small and train nothing -----------------------------------------------------------------------


class CommandParser(argparse.ArgumentParser):
    """The arguments of a small command: a mistake ends it with exit code 2 and a line, which says what was meant."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self.explained(unknown[0]))
        return parsed

    def error(self, message: str) -> NoReturn:
        print_on_rank_0(f"{self.prog}: error: {message}\n", sys.stderr)
        raise SystemExit(2)

    def explained(self, word: str) -> str:
        """Say what is wrong with an argument that the command does not know."""
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {word!r}"
        placeholders = [
            action.metavar
            for action in self._actions
            if action.metavar and not action.option_strings
        ]
        if placeholder := answer_of(name, placeholders, "argument"):
            return f"unknown flag {name}: {placeholder} is given without a flag: {self.prog} {' '.join(placeholders)}"
        return f"unknown flag {name}{nearest(name, self._option_string_actions, 'flag')}"


def parse_section(
    kind: type[S], check: Callable[[S, int], list[str]], argv: Sequence[str] | None, prog: str
) -> S:
    """Return the options of a script that has one section; errors as :func:`parse_args`.

    ``check`` says what is wrong with values that are each in range, for so many ranks. An option ``config`` names the
    YAML file of a run, out of which the section's options are taken beneath the flags.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if {"--help", "-h"} & {*arguments}:
        print_on_rank_0(section_help(f"{prog} [flags]", kind))
        raise SystemExit(0)
    with exit_on_mistakes(prog):
        flags = read_flags(arguments, list(kind.options().values()))
        if flags.get("config") is not None:
            of_run = with_file(
                trained_by().get(flags.get("for"), PPOConfig)(), flags["config"]
            ).flat()
            flags = {
                name: value for name, value in of_run.items() if name in kind.options()
            } | flags
        config = kind(**flags)
        if problems := config.missing() + check(config, int(os.environ.get("WORLD_SIZE", "1"))):
            raise ConfigError("\n".join(problems))
    return config
