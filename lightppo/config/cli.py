"""Command line and YAML → options, by argparse out of the declarations; ``--help``; docs/flags.md.

Mistakes end with exit code 2 and one line each, before any model is loaded.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml

from lightppo.config.options import OptionSet, conform, hint, told_of
from lightppo.config.rules import (
    PPOConfig,
    condition_text,
    idle_flags,
)
from lightppo.errors import ConfigError
from lightppo.option import Option, Section
from lightppo.plugin import ARGUMENTS, trained_by
from lightppo.shown import plain, without_secrets
from lightppo.suggestions import nearest

C = TypeVar("C", bound=OptionSet)

_DATA = "--pretrain MODEL --dataset FILE"
_USAGE = "--pretrain MODEL --prompt_data FILE --reward_fn FILE.py"
_DESCRIPTION = "Train a causal language model with PPO."
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
        unfed: the run is only computed, see :func:`~lightppo.config.rules.contradictions`.

    Raises:
        SystemExit: code 2 on an unknown flag or key, a value out of range or a contradiction; code 0 after ``--help``.
    """
    arguments = arguments_of(argv, lambda everything: help_text(prog, everything, kind))
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
        for needed, names in idle_flags(config, flags).items():
            change = "changes" if len(names) == 1 else "change"
            given = ", ".join(f"--{name}" for name in names)
            print_on_rank_0(
                f"{prog}: note: {given} {change} nothing here: as by default, without {needed}\n",
                sys.stderr,
            )
    return config


def arguments_of(argv: Sequence[str] | None, help_of: Callable[[bool], str]) -> Sequence[str]:
    """The arguments; with ``--help`` prints the text, of all options or the usual ones, and exits."""
    arguments = sys.argv[1:] if argv is None else argv
    if "--help" in arguments or "-h" in arguments:
        print_on_rank_0(help_of("all" in arguments))
        raise SystemExit(0)
    return arguments


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
    for look in ARGUMENTS.values():
        spelled = look.fn(spelled)
    spelled, problems = _without_values_of_switches(spelled, options)
    given, unknown = _parser(options).parse_known_args(spelled)
    problems += _unknown_arguments(unknown, options)
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
    values += [value for flag, value in pairwise(words) if flag == "--config"]
    return [value for value in values if value != "None"]


def _without_values_of_switches(
    words: Sequence[str], options: Iterable[Option]
) -> tuple[list[str], list[str]]:
    """The words without the value of ``--bf16 true``, which argparse would not explain; and a message for each."""
    switches = {
        f"--{prefix}{one.name}": one.name
        for one in options
        if one.kind is bool
        for prefix in ("", "no_")
    }
    takes_value = {f"--{one.name}" for one in options if one.kind is bool and one.may_be_none}
    kept: list[str] = []
    problems = []
    for before, word in zip(["", *words], words):
        flag, equals, value = word.partition("=")
        if not equals and not word.startswith("-"):
            flag, value = before, word
        is_value = flag in switches and flag not in takes_value and value
        if not is_value:
            kept.append(word)
            continue
        kept += [flag] * bool(equals)
        name = switches[flag]
        problems.append(
            f"{flag} {value}: a switch takes no value: write --{name} for on, --no_{name} for off"
        )
    return kept, problems


def _unknown_arguments(unknown: Sequence[str], options: Iterable[Option]) -> list[str]:
    """A message for each argument that no option takes; the value of an unknown flag has none of its own."""
    flags = [f"--{option.name}" for option in options]
    problems = []
    for before, text in zip(["", *unknown], unknown):
        name = text.partition("=")[0]
        if name.startswith("--"):
            problems.append(f"unknown flag {name}{_meant_by(name, flags)}")
        elif re.match("-[a-zA-Z]", name):
            flag = f"-{name}".replace("-", "_").replace("__", "--", 1)
            fix = f": write {flag}, with two dashes" if flag in flags else _meant_by(flag, flags)
            problems.append(f"unexpected argument {name!r}{fix}")
        elif not re.match("-+[a-zA-Z]", before):
            shown = f"{name}=…" if "=" in text else text  # the value may be a key
            problems.append(
                f"unexpected argument {shown!r}{hint(name) or ': write --NAME VALUE' * ('=' in text)}"
            )
    return problems


def _meant_by(flag: str, flags: Sequence[str]) -> str:
    """What an unknown flag may have meant: what the tables say, an option of another command, a similar one."""
    if told := told_of(flag, flags):
        return told
    of_others = [
        name
        for name, kind in trained_by().items()
        if flag in {f"--{one.name}" for one in kind.all_options()}
    ]
    if of_others:
        return f": it is an option of lightppo {' and '.join(of_others)}, not of this command"
    return nearest(flag, flags)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message)


class _Switch(argparse.Action):
    """``--x``, ``--no_x``, and ``--x True``, ``False`` or ``None`` where None is a value."""

    def __call__(self, parser: Any, namespace: Any, value: Any, flag: str | None = None) -> None:
        setattr(namespace, self.dest, value or str(flag == f"--{self.dest}"))


def _parser(options: Iterable[Option]) -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    # argparse's own takes -1e5 for a flag
    parser._negative_number_matcher = re.compile(
        r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|-inf$", re.IGNORECASE
    )
    for option in options:
        if option.kind is bool:
            flags = [f"--{option.name}", f"--no_{option.name}"]
            parser.add_argument(*flags, action=_Switch, nargs="?" if option.may_be_none else 0)
        else:
            parser.add_argument(
                f"--{option.name}", nargs="*" if get_origin(option.kind) is tuple else None
            )
    return parser


def _typed(value: str | list[str], option: Option) -> Any:
    """What a text on the command line means; numbers are left to the option's validator."""
    meant: dict[str, Any] = {"None": None} if option.may_be_none else {}
    if option.kind is bool:
        meant |= {"True": True, "False": False}
    if get_origin(option.kind) is Literal:
        meant |= {str(choice): choice for choice in get_args(option.kind)}
    if isinstance(value, list):
        return None if value == ["None"] and option.may_be_none else value
    return meant.get(value, value)


def with_file(config: C, path: str, above: tuple[str, ...] = ()) -> C:
    """The config with the options of the ``--config`` file, over those of the file beside it that it names itself."""
    try:
        values = _read_yaml(path, config.sections())
        if (base := values.pop("config", None)) is not None:
            if path in above:
                raise ConfigError("'config' leads back to this file")
            config = with_file(config, str(Path(path).parent / str(base)), (*above, path))
        return config.with_options(**values)
    except ConfigError as error:
        raise ConfigError(
            "\n".join(f"--config {path}: {line}" for line in str(error).split("\n"))
        ) from error


def _read_yaml(path: str, sections: Container[str]) -> dict[str, Any]:
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
    if nested := [
        name for name, value in values.items() if isinstance(value, dict) and name in sections
    ]:
        raise ConfigError(
            f"sections are not nested: write the options of {nested[0]!r} at the top level"
        )
    return {str(name): value for name, value in values.items()}


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


# -- help and docs/flags.md ------------------------------------------------------------------------------------------


def help_text(prog: str, everything: bool, kind: type[C] = PPOConfig) -> str:
    """One screen of the usual options, or all of them by section with unit, range, default and what they need."""
    options = {option.name: option for option in kind.all_options()}
    usage, screen, what = (
        (_USAGE, _SCREEN, _DESCRIPTION) if kind is PPOConfig else (_DATA, kind.screen, kind.__doc__)
    )
    lines = [f"usage: {prog} {usage} [--config FILE.yaml] [flags]"]
    if everything:
        lines += ["", f"{what} One process per GPU (or CPU rank): deepspeed, torchrun or python."]
        for section in kind.sections().values():
            lines += ["", *_section_lines(section)]
        return "\n".join(lines) + "\n"
    for title, names in screen.items():
        lines.append(f"{title}:")
        for option in map(options.__getitem__, names.split()):
            text = option.help.partition(". ")[0].rstrip(".")
            shown = "required" if option.required else shown_default(option.default)
            note = (
                f" [{shown}]" if option.required or option.default not in (None, (), False) else ""
            )
            lines.append(f"  --{option.name:<23} {text}{note}")
    lines.append("--help all shows all options, docs/flags.md their table.")
    return "\n".join(lines) + "\n"


def section_help(usage: str, section: type[Section]) -> str:
    """How a program is called, and the options of one section."""
    return "\n".join([f"usage: {usage}", "", *_section_lines(section)]) + "\n"


def _section_lines(section: type[Section]) -> Iterator[str]:
    yield section.__doc__ or ""
    for option in section.options().values():
        needs = f"needs {_needs(option)}" if option.needs else ""
        notes = "; ".join(
            filter(None, ["required" * option.required, option.unit, option.range_text, needs])
        )
        yield f"  {_spelled(option)}"
        yield f"      {option.help}{f' [{notes}]' * bool(notes)} (default: {shown_default(option.default)})"


def _spelled(option: Option) -> str:
    if option.kind is bool:
        return f"--{option.name}, --no_{option.name}"
    several = " ..." if get_origin(option.kind) is tuple else ""
    kind = get_args(option.kind)[0] if several else option.kind
    choices = "|".join(map(str, option.choices))
    return f"--{option.name} {choices or _METAVARS[kind] + several}"


_METAVARS = {int: "N", float: "NUMBER", str: "TEXT"}


def _needs(option: Option) -> str:
    return " and ".join(map(condition_text, option.needs))


def shown_default(value: Any) -> str:
    """A default as ``--help`` and docs/flags.md write it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) if value else "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
