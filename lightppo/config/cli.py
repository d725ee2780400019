"""Command line and YAML → PPOConfig. Mistakes end with exit code 2 and one line each, before any model is loaded."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
import yaml

from lightppo.config.ppo import PPOConfig, all_options
from lightppo.config.values import alternatives, kind_of
from lightppo.errors import ConfigError

_DESCRIPTION = (
    "Train a causal language model with PPO. One process per GPU (or CPU rank): deepspeed, torchrun or python."
)


def parse_args(argv: Sequence[str] | None = None, prog: str = "train_ppo.py") -> PPOConfig:
    """Parse flags (and ``--config FILE.yaml`` beneath them) into a resolved, checked config.

    Args:
        argv: arguments; ``None`` for those of this process.
        prog: name of the program in messages.

    Raises:
        SystemExit: code 2 on an unknown flag or key, a value out of range or a contradiction; code 0 after ``--help``.
    """
    arguments = _spell_out_switches(sys.argv[1:] if argv is None else argv)
    try:
        defaults = _with_file(arguments)
    except ConfigError as error:
        _fail(prog, error)
    config = tyro.cli(
        PPOConfig,
        args=arguments,
        default=defaults,
        prog=prog,
        description=_DESCRIPTION,
        use_underscores=True,
        config=(tyro.conf.OmitArgPrefixes,),
        console_outputs=_is_rank_0(),
    )
    try:
        config.validate(world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as error:
        _fail(prog, error)
    return config.resolved()


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _fail(prog: str, error: ConfigError) -> None:
    if _is_rank_0():
        for line in str(error).split("\n"):
            print(f"{prog}: error: {line}", file=sys.stderr)
    raise SystemExit(2)


def _spell_out_switches(arguments: Sequence[str]) -> list[str]:
    """``--adv_norm`` → ``--adv_norm True`` and ``--no_adv_norm`` → ``--adv_norm False``.

    Switches that may also be None take a value on tyro's command line; these are spelled like all other switches here.
    """
    switches = {f.name for _, f in all_options() if {bool, type(None)} == set(alternatives(kind_of(f)))}
    spelled: list[str] = []
    for i, argument in enumerate(arguments):
        name = argument.removeprefix("--").replace("-", "_") if argument.startswith("--") else ""
        following = arguments[i + 1] if i + 1 < len(arguments) else "--"
        if name in switches and following.startswith("--"):
            spelled += [f"--{name}", "True"]
        elif name.removeprefix("no_") in switches and name.startswith("no_"):
            spelled += [f"--{name.removeprefix('no_')}", "False"]
        else:
            spelled.append(argument)
    return spelled


def _with_file(arguments: Sequence[str]) -> PPOConfig:
    """The defaults with the options of the ``--config`` file over them."""
    path = None
    for i, argument in enumerate(arguments):
        if argument.startswith("--config="):
            path = argument.removeprefix("--config=")
        elif argument == "--config" and i + 1 < len(arguments):
            path = arguments[i + 1]
    if path is None or path == "None":
        return PPOConfig()
    try:
        values = _read_yaml(path)
        return PPOConfig().with_options(**values)
    except ConfigError as error:
        raise ConfigError("\n".join(f"--config {path}: {line}" for line in str(error).split("\n"))) from error


def _read_yaml(path: str) -> dict[str, Any]:
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
    homes = {home.name for home in dataclasses.fields(PPOConfig)}
    for name, value in values.items():
        if isinstance(value, dict) and name in homes:
            raise ConfigError(f"sections are not nested: write the options of {name!r} at the top level")
    if "config" in values:
        raise ConfigError("the file names another with 'config': give one file only")
    return {str(name): value for name, value in values.items()}


class _Loader(yaml.SafeLoader):
    """Plain YAML, but an option that is given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, key in enumerate(keys):
            if key.value in {earlier.value for earlier in keys[:i]}:
                problem = f"option {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)
