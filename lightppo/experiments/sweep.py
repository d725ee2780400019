"""``lightppo sweep``: seeds × settings as runs side by side, and how sure one may be of what they show.

    settings:
      grpo: {advantage_estimator: grpo}
      rloo: {advantage_estimator: rloo}
    seeds: [1, 2, 3, 4]
    config: ppo.yaml        # options of all runs, as for --config
    options: {eval_steps: 20}
    save_path: runs/sweep

Each run is `lightppo ppo` with the save_path SAVE_PATH/SETTING/seedS. The same command goes on where it was stopped;
what is finished stays. The first setting is the one that others are compared with.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightppo.config import PPOConfig
from lightppo.config.cli import CommandParser, exit_on_mistakes, with_file
from lightppo.errors import ConfigError, ReportError
from lightppo.experiments.members import (
    Member,
    options_text,
    places,
    recorded_rows,
    run_members,
    write_options,
)
from lightppo.files import facts_of, write_text
from lightppo.suggestions import nearest

PAGE = "sweep.html"
KEYS = ("settings", "seeds", "config", "options", "save_path", "score", "ranks")
OWN = (
    "save_path",
    "ckpt_path",
    "seed",
    "resume",
    "config",
)  # options of each run that the sweep sets
_SCORES = ("eval/reward", "rollout/reward")
_SHARE = 10  # a run's score is the mean of the last tenth of its values

_SLURM = """\
#!/bin/bash
# Written by `{command}`: a task for each run. Add what your cluster needs (partition, time, GPUs).
#SBATCH --job-name=lightppo-sweep
#SBATCH --array=0-{last}{at_once}
#SBATCH --output={logs}/slurm_%a.log
#SBATCH --signal=TERM@120
commands=(
{commands}
)
cd {folder} && eval "exec ${{commands[$SLURM_ARRAY_TASK_ID]}}"
"""


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
        members = []
        for seed, (setting, _) in itertools.product(self.seeds, self.settings.items()):
            member = self.members(setting)[self.seeds.index(seed)]
            config = self.options(setting, seed)
            if not (is_complete(member.folder) and _is_as_written(member.config_file, config)):
                write_options(member.config_file, config)
                members.append(member)
        return members


def is_complete(run: Path) -> bool:
    """Tell whether a run has ended and written its model."""
    return "step" in facts_of(run) if run.is_dir() else False


def _is_as_written(path: Path, config: PPOConfig) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == options_text(config)


# -- the file --------------------------------------------------------------------------------------------------------


def read_sweep(path: Path) -> Sweep:
    """Return what a file asks for.

    Raises:
        ConfigError: it cannot be read, or asks for what there is not; a line names the file and the key.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
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
    is_list = isinstance(seeds, list) and all(type(seed) is int for seed in seeds)
    if not is_list or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds: must be a list of different whole numbers, not {seeds!r}")
    if type(ranks := values.get("ranks", 1)) is not int or ranks < 1:
        raise ConfigError(f"ranks: must be a whole number of at least 1, not {ranks!r}")
    config = PPOConfig()
    if values.get("config") is not None:
        config = with_file(config, str(path.parent / str(values["config"])))
    config = _with(config, values.get("options"), "options")
    configs = {
        str(name): _valid(_with(config, options, f"settings: {name}"), f"settings: {name}", ranks)
        for name, options in settings.items()
    }
    for name in configs:
        if not name.strip(".") or "/" in name:
            raise ConfigError(f"settings: {name!r} cannot be the name of a folder")
    return Sweep(configs, seeds, Path(values["save_path"]), values.get("score"), ranks)


def _with(config: PPOConfig, options: Any, key: str) -> PPOConfig:
    """Return the config with the options of a key of the file."""
    if not isinstance(options or {}, dict):
        raise ConfigError(f"{key}: must be a mapping of options to values")
    if own := [name for name in options or {} if name in OWN]:
        raise ConfigError(f"{key}: {own[0]} is the sweep's own: leave it out")
    try:
        return config.with_options(**(options or {}))
    except ConfigError as error:
        raise ConfigError("\n".join(f"{key}: {line}" for line in str(error).split("\n"))) from error


def _valid(config: PPOConfig, key: str, ranks: int) -> PPOConfig:
    """Return a config whose options go together."""
    try:
        config.validate(world_size=ranks)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{key}: {line}" for line in str(error).split("\n"))) from error
    return config


# -- what it does ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str], program: str = "lightppo sweep") -> None:
    """Run what is missing, then report: exit code 1 where a run failed."""
    parser = CommandParser(
        program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE.yaml", type=Path, help="settings, seeds, options")
    parser.add_argument("--jobs", type=int, help="runs at once; default: as many as the GPUs allow, "
                        "on a CPU 2")  # fmt: skip
    parser.add_argument(
        "--slurm", type=Path, help="run nothing: write an array job for Slurm to this file"
    )
    parser.add_argument("--report", action="store_true", help="run nothing: compare what is there")
    parser.add_argument("--picture", type=Path, help="also write the curves to this PNG file")
    request = parser.parse_args(arguments)
    if request.jobs is not None and request.jobs < 1:
        parser.error(f"--jobs {request.jobs}: must be at least 1")
    if request.slurm is not None and (request.report or request.picture is not None):
        parser.error(
            "--slurm runs nothing, so there is nothing to report: leave out --report, --picture"
        )
    with exit_on_mistakes(program):
        sweep = read_sweep(request.file)
        members = [] if request.report else sweep.missing()
        total = len(sweep.settings) * len(sweep.seeds)
        if request.slurm is not None:
            return write_slurm(sweep, members, request)
        at_once = places(request.jobs, sweep.ranks) if members else 0
    if not request.report:
        print(
            f"{total} runs, {total - len(members)} of them done; into {sweep.save_path}", flush=True
        )
    codes = run_members(members, at_once) if members else {}
    from lightppo.experiments.sweep_page import report

    with exit_on_mistakes(program, ReportError):
        report(sweep, request.picture)
    if any(codes.values()):
        raise SystemExit(1)


def write_slurm(sweep: Sweep, members: Sequence[Member], request: argparse.Namespace) -> None:
    """Write a script with an array job for the runs that are missing."""
    if not members:
        return print("all runs are done: there is nothing to submit")
    logs = sweep.save_path.absolute()
    logs.mkdir(parents=True, exist_ok=True)
    commands = "\n".join(f"  {shlex.quote(shlex.join(member.command()))}" for member in members)
    text = _SLURM.format(
        command=shlex.join(["lightppo", "sweep", str(request.file), "--slurm", str(request.slurm)]),
        last=len(members) - 1,
        at_once=f"%{request.jobs}" if request.jobs else "",
        logs=shlex.quote(str(logs)),
        commands=commands,
        folder=shlex.quote(str(Path.cwd())),
    )
    write_text(request.slurm, text)
    print(f"{request.slurm}: {len(members)} runs: sbatch {request.slurm}")
    print(f"afterwards: lightppo sweep {request.file} --report")


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
            for member in sweep.members(setting)
            if is_complete(member.folder) and (curve := curve_of(member.folder, metric))
        ]
        for setting in sweep.settings
    }
