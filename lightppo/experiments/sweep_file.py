"""The file of a sweep: its settings, seeds and runs, and their scores; for ``lightppo sweep``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightppo.config import PPOConfig
from lightppo.config.cli import UniqueKeyLoader, with_file
from lightppo.errors import ConfigError
from lightppo.experiments.members import (
    Member,
    had_options,
    has_saved,
    problems_of,
    recorded_rows,
    write_options,
)
from lightppo.files import facts_of
from lightppo.storage import is_url
from lightppo.suggestions import nearest

KEYS = ("settings", "seeds", "config", "options", "save_path", "score", "ranks")
OWN = (
    "save_path",
    "ckpt_path",
    "seed",
    "resume",
    "config",
)  # options of each run that the sweep sets
_SCORES = ("eval/reward", "rollout/reward")
_LONGEST_NAME = 255  # bytes of a folder's name
_SHARE = 10  # a run's score is the mean of the last tenth of its values


@dataclass(frozen=True)
class Sweep:
    """What a file asks for."""

    settings: Mapping[str, PPOConfig]
    seeds: Sequence[int]
    save_path: Path
    score: str | None = None  # None: of evaluations if there are any, else of training
    ranks: int = 1

    def members(self, setting: str) -> list[Member]:
        """Return the runs of a setting."""
        folder = self.save_path / setting
        return [
            Member(f"{setting}, seed {seed}", folder / f"seed{seed}", self.ranks)
            for seed in self.seeds
        ]

    def options(self, setting: str, seed: int) -> PPOConfig:
        """Return the options of a run."""
        folder = self.save_path / setting / f"seed{seed}"
        return self.settings[setting].with_options(save_path=str(folder), ckpt_path=None, seed=seed)

    def missing(self) -> list[Member]:
        """Return the runs that have not ended, seed by seed, with the files of their options written.

        So many runs of each setting are there whenever the sweep is stopped.
        """
        from lightppo.logging.run_folder import set_aside  # it loads transformers

        members = []
        for setting, seed in self.not_done():
            member = self.members(setting)[self.seeds.index(seed)]
            config = self.options(setting, seed)
            if not had_options(member.folder, config):  # its checkpoints are of another run
                set_aside(member.folder / "checkpoints_ppo")
            write_options(member.config_file, config)
            members.append(member)
        return members

    def not_done(self) -> list[tuple[str, int]]:
        """Return setting and seed of each run that has not ended."""
        pairs = itertools.product(self.seeds, self.settings)
        return [(setting, seed) for seed, setting in pairs if not self.is_done(setting, seed)]

    def is_done(self, setting: str, seed: int) -> bool:
        """Tell whether a run has ended, with the options that the file has now."""
        config = self.options(setting, seed)
        run = Path(config.checkpoint.save_path)
        return is_complete(run) and had_options(run, config)

    def done(self, setting: str) -> list[Member]:
        """Return the runs of a setting that are done."""
        pairs = zip(self.members(setting), self.seeds)
        return [member for member, seed in pairs if self.is_done(setting, seed)]

    def kept(self) -> list[Member]:
        """Return the runs that are done, or go on with what they have saved."""
        return [
            member
            for setting in self.settings
            for member, seed in zip(self.members(setting), self.seeds)
            if had_options(member.folder, self.options(setting, seed))
            and (is_complete(member.folder) or has_saved(member.folder))
        ]

    def all_done(self) -> list[Member]:
        """Return all runs that are done."""
        return [member for setting in self.settings for member in self.done(setting)]


def is_complete(run: Path) -> bool:
    """Tell whether a run has ended and written its model."""
    return "step" in facts_of(run) if run.is_dir() else False


# -- the file --------------------------------------------------------------------------------------------------------


def read_sweep(path: Path) -> Sweep:
    """Return what a file asks for.

    Raises:
        ConfigError: it cannot be read, or asks for what there is not; a line names the file and the key.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping with the keys {', '.join(KEYS)}")
    try:
        return _checked(values, path)
    except ConfigError as error:
        raise ConfigError(
            "\n".join(f"{path}: {line}" for line in str(error).split("\n"))
        ) from error


def _checked(values: Mapping[str, Any], path: Path) -> Sweep:
    if unknown := [key for key in values if key not in KEYS]:
        raise ConfigError(f"unknown key {unknown[0]!r}{nearest(str(unknown[0]), KEYS)}")
    if missing := [key for key in ("settings", "seeds", "save_path") if not values.get(key)]:
        raise ConfigError(
            f"the key {missing[0]!r} is missing; there must be settings, seeds and save_path"
        )
    settings, seeds = values["settings"], values["seeds"]
    if not isinstance(settings, dict):
        raise ConfigError("settings: must be a mapping of a name to options")
    is_list = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not is_list or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds: must be a list of different whole numbers from 0, not {seeds!r}")
    if type(ranks := values.get("ranks", 1)) is not int or ranks < 1:
        raise ConfigError(f"ranks: must be a whole number of at least 1, not {ranks!r}")
    for key in ("save_path", "config", "score"):
        if not isinstance(values.get(key), str | None):
            raise ConfigError(f"{key}: must be text, not {values[key]!r}")
    if is_url(values["save_path"]):
        raise ConfigError(
            f"save_path: {values['save_path']} is a URL: a sweep needs a folder of this machine"
        )
    config = PPOConfig()
    if values.get("config") is not None:
        config = with_file(config, str(path.parent / values["config"]))
    config = _with(config, values.get("options"), "options")
    configs = {
        str(name): _valid(_with(config, options, f"settings: {name}"), f"settings: {name}", ranks)
        for name, options in settings.items()
    }
    for name in configs:
        is_writable = name.isprintable() and len(name.encode()) <= _LONGEST_NAME
        if not name.strip(".") or "/" in name or not is_writable:
            raise ConfigError(f"settings: {name!r} cannot be the name of a folder")
    folder = Path(values["save_path"]).expanduser()  # as lightppo ppo does
    return Sweep(configs, seeds, folder, values.get("score"), ranks)


def check_files(sweep: Sweep, path: Path) -> None:
    """Look at the files and folders that the options of runs name, before the first one starts.

    Raises:
        ConfigError: a line names the file of the sweep, the settings and the problem.
    """
    problems: dict[str, list[str]] = {}  # → the settings that have it
    for setting in dict.fromkeys(setting for setting, _ in sweep.not_done()):
        for problem in problems_of(sweep.options(setting, sweep.seeds[0]), sweep.ranks):
            problems.setdefault(problem, []).append(setting)
    if problems:
        lines = (
            f"{path}: settings: {', '.join(having)}: {problem}"
            for problem, having in problems.items()
        )
        raise ConfigError("\n".join(lines))


def _with(config: PPOConfig, options: Any, key: str) -> PPOConfig:
    """Return the config with the options of a key of the file."""
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise ConfigError(f"{key}: must be a mapping of options to values")
    options = {str(name): value for name, value in options.items()}
    if own := [name for name in options if name in OWN]:
        raise ConfigError(f"{key}: {own[0]} is the sweep's own: leave it out")
    try:
        return config.with_options(**options)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{key}: {line}" for line in str(error).split("\n"))) from error


def _valid(config: PPOConfig, key: str, ranks: int) -> PPOConfig:
    """Return a config whose options go together."""
    try:
        config.validate(world_size=ranks)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{key}: {line}" for line in str(error).split("\n"))) from error
    return config


# -- scores ----------------------------------------------------------------------------------------------------------


def score_name(sweep: Sweep) -> str:
    """Return the metric that runs are compared by."""
    evaluates = all(config.data.eval_data for config in sweep.settings.values())
    return sweep.score or _SCORES[0 if evaluates else 1]


def curve_of(run: Path, metric: str) -> dict[int, float]:
    """Return a metric of a run by step, where it is a number."""
    rows = recorded_rows(run)
    return {step: row[metric] for step, row in sorted(rows.items()) if row.get(metric) is not None}


def score_of(curve: Mapping[int, float]) -> float:
    """Return the mean of the last tenth of the values."""
    values = list(curve.values())
    last = values[-max(1, len(values) // _SHARE) :]
    return sum(last) / len(last)


def scores_of(sweep: Sweep, metric: str) -> dict[str, list[float]]:
    """Return the scores of the runs that have ended, by setting."""
    return {
        setting: [
            score_of(curve)
            for member in sweep.done(setting)
            if (curve := curve_of(member.folder, metric))
        ]
        for setting in sweep.settings
    }
