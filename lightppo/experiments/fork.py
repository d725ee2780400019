"""A run that is forked at a checkpoint: what may change, the branches and their options; for ``lightppo what-if``."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightppo.checkpoint.layout import mark_latest, parts_of, tag_of
from lightppo.config import CheckpointConfig, LoggingConfig, PPOConfig, parse_args
from lightppo.config.checkpoint_options import makes_model
from lightppo.config.evaluation_options import EvaluationConfig
from lightppo.errors import ConfigError
from lightppo.experiments.members import (
    Member,
    check_unedited,
    has_saved,
    problems_of,
    read_kept,
    recorded_rows,
    steps_with_checkpoints,
    write_options,
)
from lightppo.files import check_writable, write_text
from lightppo.logging.report_page import command_of, options_of, recorded_path, starts_of
from lightppo.logging.run_paths import check_output
from lightppo.storage import is_url

PROGRAM = "lightppo what-if"
BASE, CHANGED = "base", "changed"
REQUEST = "what_if.json"
REWARD = "rollout/reward"  # what a branch has recorded of each of its steps
# What is compared, by what it is called; of several metrics the first one that both branches recorded.
MEASURES = {
    "reward": (REWARD,),
    "KL": ("rollout/kl", "train/approx_kl"),
    "length": ("rollout/response_length",),
}


def words_of(changes: Sequence[str]) -> dict[str, list[str]]:
    """Return the flags that ``NAME=VALUE`` stand for, by name; ConfigError for a word of another form."""
    flags = {}
    for change in changes:
        name, equals, value = change.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not equals or not name:
            raise ConfigError(f"--set {change}: write NAME=VALUE, as in --set gamma=0.99")
        if name in flags:
            raise ConfigError(f"--set {change}: {name} is given twice: leave one out")
        if value.lower() in ("true", "false"):
            flags[name] = [f"--{name}" if value.lower() == "true" else f"--no_{name}"]
        else:
            flags[name] = [f"--{name}", *_split(value, change)]
    return flags


def _split(value: str, change: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ConfigError(
            f"--set {change}: {str(error).lower()}: close the quotation mark, or put \\ before it"
        ) from error


def branch_options(config: PPOConfig) -> dict[str, Any]:
    """Return what every branch has in place of the run's: no evaluation, log or checkpoint before its end."""
    sections = (CheckpointConfig, EvaluationConfig, LoggingConfig)
    options = {
        option.name: option.default
        for section in config.sections().values()
        if issubclass(section, sections)
        for option in section.options().values()
    }
    options |= {"eval_data": None, "rollout_data_dir": None, "skip_rollout": None}
    return options | {"tape": "off", "tape_from": None, "num_examine": 0, "benchmark_steps": None}


def link_checkpoint(root: Path, step: int, target: Path) -> None:
    """Copy a checkpoint, by hard links where the file system has them: the run may remove its own."""

    def link(source: str, copy: str) -> None:
        try:
            os.link(source, copy)
        except OSError:  # another file system
            shutil.copy2(source, copy)

    if (target / "latest").is_file():
        return
    for part in parts_of(root):
        shutil.rmtree(target / part.name, ignore_errors=True)
        shutil.copytree(part / tag_of(step), target / part.name / tag_of(step), copy_function=link)
        mark_latest(target / part.name, tag_of(step))
    mark_latest(target, tag_of(step))


@dataclass(frozen=True)
class Branch:
    """One branch of a pair."""

    seed: int
    kind: str  # base or changed
    run: Path  # the folder with its records


class Fork:
    """A run, the step at which it is forked, and its branches.

    Raises:
        ConfigError: there is no such run or checkpoint, or the option cannot be changed.
    """

    def __init__(self, request: argparse.Namespace, program: str = PROGRAM) -> None:
        self.request = request
        self.run: Path = request.run
        self.step: int = request.step
        self.checkpoints = self._checkpoints()
        flags = words_of(request.set)
        run_flags = ["--config", str(self.run / "run_config.yaml")]
        self.config = parse_args(run_flags, program)
        words = [word for words in flags.values() for word in words]
        self.changed = parse_args([*run_flags, *words], program)
        self._check_changes(flags)
        starts = starts_of(self.run)
        self.ranks: int = starts[-1]["ranks"] if starts else 1
        self._check_end(starts)
        self.title = ", ".join(request.set)
        folder = re.sub(r"[^\w=.,+-]+", "_", f"step{self.step}_{','.join(request.set)}")[:120]
        out = request.out and request.out.expanduser()
        self.out: Path = out or self.run.with_name(f"{self.run.name}_what_if") / folder

    @property
    def last_step(self) -> int:
        return self.step + self.request.steps

    @property
    def steps(self) -> range:
        """Return the steps of the branches."""
        return range(self.step + 1, self.last_step + 1)

    def _checkpoints(self) -> Path:
        """Return the folder of the checkpoints, which has the step."""
        options = options_of(self.run)
        if not options:
            raise ConfigError(
                f"{self.run} has no run_config.yaml: name the --save_path of a run of `lightppo ppo`"
            )
        if (command := command_of(options)) != "ppo" or options.get("val_only"):
            name = "eval" if options.get("val_only") else command
            raise ConfigError(
                f"{self.run} is a run of `lightppo {name}`: only `lightppo ppo` can be forked"
            )
        if is_url(str(options["ckpt_path"])):
            raise ConfigError(
                f"{self.run}: its checkpoints are at {options['ckpt_path']}: copy them to RUN/checkpoints_ppo first"
            )
        root = recorded_path(self.run, "ckpt_path")
        steps = [] if root is None else steps_with_checkpoints(root)
        if root is None or not steps:
            raise ConfigError(
                f"{self.run} has no checkpoints: run it with --save_steps, or stop it at the step to fork at"
            )
        if self.step not in steps:
            raise ConfigError(
                f"--step {self.step}: {self.run} has no checkpoint of this step; there are those of "
                f"{', '.join(map(str, steps))}"
            )
        return root

    def _check_changes(self, flags: Mapping[str, Any]) -> None:
        """Refuse changes that a checkpoint does not allow, that a fork makes itself, or that are none."""
        before, after = self.config.resolved().flat(), self.changed.resolved().flat()
        declared = {option.name: option for option in self.config.all_options()}
        for name in flags:
            if makes_model(declared[name], self.config.sections()):
                raise ConfigError(
                    f"--set {name}: the checkpoint's weights depend on it, so it may not change on resume"
                )
            if name == "seed" or name in {"config", *branch_options(self.config)}:
                reason = (
                    "--pairs takes other seeds" if name == "seed" else "branches have their own"
                )
                raise ConfigError(f"--set {name}: {reason}: it cannot be what is changed")
            if before[name] == after[name]:
                raise ConfigError(
                    f"--set {name}={after[name]}: {self.run} had this value: nothing changes"
                )

    def _check_end(self, starts: Sequence[Mapping[str, Any]]) -> None:
        total_steps = starts[-1].get("total_steps") if starts else None
        planned = self.config.training.benchmark_steps
        if total_steps is not None and planned is None and self.last_step > total_steps:
            raise ConfigError(
                f"--steps {self.request.steps}: {self.run} has {total_steps} steps in all, so at most "
                f"{total_steps - self.step} are left after step {self.step}"
            )

    def claim(self) -> None:
        """Make the folder and keep others out; refuse one with the branches of another question."""
        from lightppo.logging.run_folder import claim_folder

        claim_folder("--out", str(self.out), "--out")
        question = {
            "run": os.path.relpath(self.run, self.out),
            "step": self.step,
            "set": self.request.set,
        }
        path = self.out / REQUEST
        if path.is_file():
            known = read_kept(path, "name another folder by --out, or remove this one")
            if {key: known.get(key) for key in question} != question:
                raise ConfigError(
                    f"--out {self.out}: holds another what-if ({path}): name another folder"
                )
        # those that stay, or go on: a resume allows every change of the changed options
        begun = [
            one for one in self._members() if self.has_steps(one.folder) or has_saved(one.folder)
        ]
        check_unedited(begun, "--out")
        write_text(path, json.dumps(question, indent=1))
        link_checkpoint(self.checkpoints, self.step, self.out / "fork")

    def check_files(self) -> None:
        """Look at ``--out``, and at the files and folders that options of missing branches name, before one starts.

        Raises:
            ConfigError: a line names the branch and the problem.
        """
        check_output(self.out, {"RUN": str(self.run)}, "--out")
        check_writable(self.out, "--out")
        problems = []
        for kind in dict.fromkeys(branch.kind for branch in self._not_done()):
            config = self.changed if kind == CHANGED else self.config
            own = branch_options(config) | {"save_path": str(self.out / kind)}
            found = problems_of(config.with_options(**own), self.ranks)
            problems += [f"{kind} branch: {line}" for line in found]
        if problems:
            raise ConfigError("\n".join(problems))

    # -- branches ------------------------------------------------------------------------------------------------

    @cached_property
    def run_has_base(self) -> bool:
        """Tell whether the run itself is the base branch of its own seed: it went on, with the same versions."""
        from lightppo.logging.run_folder import versions

        starts = starts_of(self.run)
        is_same = all(start["versions"] == dict(versions()) for start in starts[-1:])
        return is_same and self.has_steps(self.run)

    def has_steps(self, run: Path) -> bool:
        """Tell whether a run has recorded all steps of a branch."""
        rows = recorded_rows(run)
        return all(REWARD in rows.get(step, {}) for step in self.steps)

    def branch(self, pair: int, kind: str) -> Branch:
        seed = self.config.strategy.seed + pair
        if kind == BASE and pair == 0 and self.run_has_base:
            return Branch(seed, kind, self.run)
        return Branch(seed, kind, self.out / f"{kind}_seed{seed}")

    def pairs(self) -> list[tuple[Branch, Branch]]:
        """Return all pairs, the run's own seed first."""
        numbers = range(self.request.pairs)
        return [(self.branch(pair, BASE), self.branch(pair, CHANGED)) for pair in numbers]

    def whole_pairs(self) -> list[tuple[Branch, Branch]]:
        """Return the pairs of which both branches have recorded all steps."""
        return [pair for pair in self.pairs() if all(self.has_steps(one.run) for one in pair)]

    def missing(self) -> list[Member]:
        """Return the branches that still have to run, with the files of their options written."""
        members = []
        for branch in self._not_done():
            member = Member(branch.run.name, branch.run, self.ranks)
            write_options(member.config_file, self.options(branch))
            members.append(member)
        return members

    def _not_done(self) -> list[Branch]:
        branches = [branch for pair in self.pairs() for branch in pair]
        return [branch for branch in branches if not self.has_steps(branch.run)]

    def done(self) -> list[Member]:
        """Return the branches that are compared, without the run itself."""
        return [member for member in self._members() if self.has_steps(member.folder)]

    def _members(self) -> list[Member]:
        """Return all branches but the run itself."""
        branches = [branch.run for pair in self.pairs() for branch in pair]
        return [Member(run.name, run, self.ranks) for run in branches if run != self.run]

    def options(self, branch: Branch) -> PPOConfig:
        """Return the options of a branch: it begins at the fork, or goes on with what it has saved itself."""
        config = self.changed if branch.kind == CHANGED else self.config
        # of resolved options: another loss has other defaults of its own
        before = self.config.resolved().flat()
        after = config.resolved().flat()
        changes = {name for name, value in after.items() if value != before[name]}
        may_change = {option.name for option in config.all_options() if not option.resume_safe}
        own = branch_options(config) | {
            "save_path": str(branch.run),
            "seed": branch.seed,
            "benchmark_steps": self.last_step,
            "resume_changes": sorted({*changes, "seed"} & may_change),
        }
        if not has_saved(branch.run):
            own["resume"] = str(self.out / "fork")
            own["reshape_ckpt"] = "zero_stage" in changes
        return config.with_options(**own)

    def plan(self, members: Sequence[Member]) -> str:
        lines = [f"{self.run}, from step {self.step} to {self.last_step}: what if {self.title}?"]
        if self.run_has_base:
            lines.append(f"the base branch of seed {self.config.strategy.seed} is the run itself")
        lines.append(f"{len(members)} branches to run, into {self.out}")
        return "\n".join(lines)
