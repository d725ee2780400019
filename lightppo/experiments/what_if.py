"""``lightppo what-if``: fork a run at a checkpoint, change an option in one branch, and say what that does.

Both branches go on from the same weights with the same prompts and random numbers, so they sample the same tokens until
their policies differ: their difference has far less noise than that of two runs with other seeds.

    lightppo what-if runs/sums --step 8 --set actor_learning_rate=2e-6 --steps 8 --pairs 6

RUN is the --save_path of a run of `lightppo ppo`, finished or stopped; it is only read. The same command goes on where
it was stopped; more --pairs or --steps add to what is there.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from lightppo.config.cli import CommandParser, exit_on_mistakes
from lightppo.errors import ConfigError, ReportError
from lightppo.experiments.fork import MEASURES, PROGRAM, Fork
from lightppo.experiments.members import check_alike, check_place, check_scipy, places, run_members
from lightppo.logging.report_page import named_run

_CHANGES = "NAME=VALUE"


def arguments_of(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = CommandParser(
        program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", metavar="RUN", type=lambda path: Path(named_run(path)), help="folder of the run"
    )
    parser.add_argument(
        "--step", type=int, required=True, help="step of the checkpoint at which the branches begin"
    )
    parser.add_argument("--set", nargs="+", action="extend", required=True, metavar=_CHANGES,
                        help="options of the changed branch, as in actor_learning_rate=2e-6; several "
                        "values with spaces between, in quotes; switches are true or false")  # fmt: skip
    parser.add_argument("--steps", type=int, required=True, help="steps of each branch")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of branches, each with a seed of its own; intervals "
                        "need at least two; default: 1")  # fmt: skip
    parser.add_argument("--jobs", type=int, help="branches that run at once; default: as many as "
                        "the GPUs allow, on a CPU 2")  # fmt: skip
    parser.add_argument("--width", nargs="+", default=[], metavar=_CHANGES, help="say how many pairs give an "
                        "interval of this width, as in reward=0.02; default: half of what it is")  # fmt: skip
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of branches and page; default: RUN_what_if/stepN_NAME=VALUE",
    )
    parser.add_argument("--picture", type=Path, help="also write the curves to this PNG file")
    request = parser.parse_args(arguments)
    for name in ("steps", "pairs", "jobs"):
        if (value := getattr(request, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    request.width = _widths(request.width, parser)
    return request


def _widths(words: Sequence[str], parser: CommandParser) -> dict[str, float]:
    """Return the widths by measure."""
    widths = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in MEASURES or not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", text) or not float(text):
            parser.error(
                f"--width {word}: give one of {', '.join(MEASURES)} and a width: reward=0.02"
            )
        widths[name] = float(text)
    return widths


def main(arguments: Sequence[str], program: str = PROGRAM) -> None:
    """Run the branches that are not there yet, then compare: exit code 1 where a branch failed."""
    request = arguments_of(arguments, program)
    with exit_on_mistakes(program, (ConfigError, ReportError)):
        check_scipy()
        check_place("--picture", request.picture)
        fork = Fork(request, program)
        fork.check_files()
        fork.claim()
        at_once = places(request.jobs, fork.ranks)
        members = fork.missing()
        print(fork.plan(members), flush=True)
    codes = run_members(members, at_once, fork.out) if members else {}
    from lightppo.experiments.pair_page import report  # it loads scipy

    with exit_on_mistakes(program, (ConfigError, ReportError), code=1):
        check_alike(fork.done())
        report(fork)
    if any(codes.values()) or fork.missing():
        raise SystemExit(1)
