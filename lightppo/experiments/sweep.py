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
import shlex
from collections.abc import Sequence
from pathlib import Path

from lightppo.config.cli import CommandParser, exit_on_mistakes
from lightppo.errors import ConfigError, ReportError
from lightppo.experiments.members import (
    Member,
    check_alike,
    check_place,
    check_scipy,
    check_unedited,
    places,
    record_contents,
    run_members,
)
from lightppo.experiments.sweep_file import Sweep, check_files, read_sweep
from lightppo.files import write_text

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
        check_place("--picture", request.picture)
        check_place("--slurm", request.slurm)
        sweep = read_sweep(request.file)
        if not request.report and request.slurm is None:
            from lightppo.logging.run_folder import claim_folder

            claim_folder("save_path", str(sweep.save_path), "save_path")
        members = []
        if not request.report:
            check_unedited(sweep.kept(), "save_path")
            check_files(sweep, request.file)
            members = sweep.missing()
        total = len(sweep.settings) * len(sweep.seeds)
        if request.slurm is not None:
            return write_slurm(sweep, members, request)
        check_scipy()
        at_once = places(request.jobs, sweep.ranks) if members else 0
    if not request.report:
        print(
            f"{total} runs, {total - len(members)} of them done; into {sweep.save_path}", flush=True
        )
    codes = run_members(members, at_once, sweep.save_path) if members else {}
    from lightppo.experiments.sweep_page import report  # it loads scipy

    with exit_on_mistakes(program, (ConfigError, ReportError), code=1):
        check_alike(sweep.all_done())
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
    for member in members:  # before its task begins
        record_contents(member)
    write_text(request.slurm, text)
    print(f"{request.slurm}: {len(members)} runs: sbatch {request.slurm}")
    print(f"afterwards: lightppo sweep {request.file} --report")
