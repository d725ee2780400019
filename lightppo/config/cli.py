"""Command line and YAML → PPOConfig. Mistakes end with exit code 2 and one line each, before any model is loaded."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
import yaml

from lightppo.config.fields import ConfigError, nearest
from lightppo.config.ppo import PPOConfig

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
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _yaml_arguments(arguments) + arguments
    except ConfigError as error:
        _fail(prog, error)
    config = tyro.cli(
        PPOConfig,
        args=arguments,
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


def _yaml_arguments(arguments: list[str]) -> list[str]:
    """The options of the ``--config`` file as flags, so that both go through the same checks."""
    path = None
    for i, argument in enumerate(arguments):
        if argument.startswith("--config="):
            path = argument.removeprefix("--config=")
        elif argument == "--config" and i + 1 < len(arguments):
            path = arguments[i + 1]
    if path is None or path == "None":
        return []
    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return []
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must be a mapping of option to value, not a {type(values).__name__}")
    defaults = PPOConfig().flat()
    flags: list[str] = []
    for name, value in values.items():
        if name not in defaults:
            raise ConfigError(f"--config {path}: unknown option {name!r}{nearest(str(name), defaults)}")
        flags += _as_flag(path, name, value, is_switch=isinstance(defaults[name], bool))
    return flags


def _as_flag(path: str, name: str, value: Any, is_switch: bool) -> list[str]:
    if is_switch and isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    if isinstance(value, dict):
        raise ConfigError(f"--config {path}: option {name!r} must be a value or a list, not a mapping")
    return [f"--{name}={value}"]
