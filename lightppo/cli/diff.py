"""``lightppo diff``: the first step and quantity in which two runs differ, how far they differ, and what else does."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

from lightppo.config.arguments import CommandParser
from lightppo.errors import ReportError
from lightppo.logging.report_page import (
    facts_of,
    named_run,
    options_of,
    read_jsonl,
    read_metrics,
    recorded_path,
)
from lightppo.redaction import plain

# As quantities arise in a step: samples, their scores, what follows from both, losses, gradients. Then as in the row.
_ORDER = (
    "rollout/response",
    "rollout/total",
    "rollout/generated",
    "reward/",
    "rollout/reward",
    "rollout/",
    "train/",
)
_OF_GRADIENTS = ("_grad_norm", "_skipped", "_stopped", "_lr")
_CLOCK = ("step", "time", "perf/")  # what a clock measured, and the step's number
_SHOWN = 20  # characters of two texts from where they differ

Values = dict[str, Any]
Differences = dict[str, list[tuple[int, Any, Any]]]


def main(argv: Sequence[str], prog: str = "lightppo diff") -> None:
    """Compare two runs: exit code 0 where all that both recorded is equal, else 1; 2 without two runs."""
    parser = CommandParser(
        prog, description=f"{__doc__.partition(': ')[2]} Exit code 0: equal; 1: different."
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=lambda path: Path(named_run(path)),
        nargs=2,
        help="the --save_path of a run",
    )
    parser.add_argument("--tolerance", type=float, default=0.0, help="largest difference, relative to the larger "
                        "number or to 1, that counts as equal; default: 0")  # fmt: skip
    args = parser.parse_args(argv)
    try:
        first, second = map(steps_of, args.runs)
        common = sorted(first.keys() & second.keys())
        found = differences([(step, first[step], second[step]) for step in common], args.tolerance)
        sample = first_sample([recorded_path(run, "rollout_data_dir") for run in args.runs], common)
        for letter, run, steps in zip("ab", args.runs, (first, second)):
            print(plain(f"{letter}: {run}, steps {min(steps)} to {max(steps)}"))
        lines = (
            f"{len(common)} steps in both",
            *_verdict(found, sample),
            *_table(found),
            *_around(args.runs),
        )
        print(*map(plain, lines), sep="\n")
    except (ReportError, OSError) as error:
        parser.error(str(error))
    raise SystemExit(1 if found or sample or not common else 0)


# -- what runs recorded ----------------------------------------------------------------------------------------------


def steps_of(run: Path) -> dict[int, Values]:
    """All that a run recorded of each step, without what a clock measured."""
    steps: dict[int, Values] = {}
    for row in read_metrics(run / "metrics.jsonl"):
        if values := {name: value for name, value in row.items() if not name.startswith(_CLOCK)}:
            steps.setdefault(row["step"], {}).update(values)
    return steps


# -- where they differ -----------------------------------------------------------------------------------------------


def differences(steps: Sequence[tuple[int, Values, Values]], tolerance: float = 0.0) -> Differences:
    """By quantity, the steps at which two runs differ, with both values; the quantity that differs first is first.

    What one lacks is ``"missing"``; an evaluation that only one of them made is no difference.
    """
    found: Differences = {}
    for step, a, b in steps:
        for name in sorted({**a, **b}, key=_place):
            first = a.get(name, "missing")
            second = b.get(name, "missing")
            equal = first == second or _apart(first, second) <= tolerance * max(
                [1.0, *(abs(v) for v in (first, second) if isinstance(v, float))]
            )
            if not equal and not ("missing" in (first, second) and name.startswith("eval/")):
                found.setdefault(name, []).append((step, first, second))
    return found


def _place(name: str) -> tuple[int, bool]:
    place = next((i for i, prefix in enumerate(_ORDER) if name.startswith(prefix)), len(_ORDER))
    return place, name.endswith(_OF_GRADIENTS)


def _apart(first: Any, second: Any) -> float:
    """Infinity where one is missing, or null: it was not finite."""
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return abs(first - second)
    return math.inf


def first_sample(folders: Sequence[Path | None], steps: Sequence[int]) -> str | None:
    """The first sample that differs between two folders of ``--rollout_data_dir``: its step, itself, and in what."""
    for step in steps if None not in folders else ():
        files = [folder / f"step{step}.jsonl" for folder in folders]
        if not all(map(Path.is_file, files)):
            continue
        for first, second in zip_longest(*map(read_jsonl, files), fillvalue={}):
            for name in {**first, **second}:
                if first.get(name) != second.get(name):
                    sample = first or second
                    which = f"prompt {sample['index']}, sample {sample['sample_index']}"
                    return (
                        f"step {step}, {which}, {_in_what(name, first.get(name), second.get(name))}"
                    )
    return None


def _in_what(name: str, first: Any, second: Any) -> str:
    """A column and its two values; texts from the first character in which they differ."""
    if isinstance(first, str) and isinstance(second, str):
        pairs = zip(first, second, strict=False)
        start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        first, second = (text[start : start + _SHOWN] for text in (first, second))
        name = f"{name} from character {start} on"
    return f"{name}: {first!r} and {second!r}"


# -- what is said ----------------------------------------------------------------------------------------------------


def _verdict(found: Differences, sample: str | None) -> Iterator[str]:
    if sample:
        yield f"first sample that differs: {sample}"
    if found:
        name, ((step, first, second), *_) = next(iter(found.items()))
        yield f"first number that differs: step {step}, {name}: {first} and {second}"
    elif not sample:
        yield "all that both recorded is equal"


def _table(found: Differences) -> Iterator[str]:
    """How far apart the runs are, from the first difference on."""
    if found:
        yield f"\n{'quantity':<32}{'from step':>9}{'a there':>14}{'b there':>14}{'most apart':>14}{'at step':>9}"
    for name, steps in found.items():
        step, *there = steps[0]
        at, *most = max(steps, key=lambda difference: _apart(*difference[1:]))
        there = "".join(
            f"{x:>14.6g}" if isinstance(x, (int, float)) else f"{x or 'null':>14}" for x in there
        )
        yield f"{name:<32}{step:>9}{there}{_apart(*most):>14.4g}{at:>9}"


def _around(runs: Sequence[Path]) -> Iterator[str]:
    for title, read in {"options": options_of, "versions, ranks, files": facts_of}.items():
        first, second = map(read, runs)
        names = [
            name
            for name in {**first, **second}
            if first.get(name, "missing") != second.get(name, "missing")
        ]
        lacking = " and ".join(
            letter for letter, values in zip("ab", (first, second)) if not values
        )
        yield f"\n{title}: " + (f"not recorded in {lacking}" if lacking else f"{len(names)} differ")
        yield from (
            f"  {n}: {_json(first, n)} and {_json(second, n)}" for n in names if not lacking
        )


def _json(values: Mapping[str, Any], name: str) -> str:
    if name in values:
        return json.dumps(values[name], ensure_ascii=False)
    return "missing"
