"""``lightppo diff``: the first step and quantity in which two runs differ, how far they differ, and what else does."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

from lightppo.config.cli import CommandParser
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
_GRADIENT_ENDINGS = ("_grad_norm", "_skipped", "_stopped", "_lr")
_CLOCK = ("step", "time", "perf/")  # what a clock measured, and the step's number
_EXCERPT = 20  # characters of two texts from where they differ

Values = dict[str, Any]
Differences = dict[str, list[tuple[int, Any, Any]]]


def main(arguments: Sequence[str], program: str = "lightppo diff") -> None:
    """Compare two runs: exit code 0 where all that both recorded is equal, else 1; 2 without two runs."""
    parser = CommandParser(
        program, description=f"{__doc__.partition(': ')[2]} Exit code 0: equal; 1: different."
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
    options = parser.parse_args(arguments)
    runs = options.runs
    try:
        first_steps, second_steps = map(steps_of, runs)
        common = sorted(first_steps.keys() & second_steps.keys())
        steps = [(step, first_steps[step], second_steps[step]) for step in common]
        differing = differences(steps, options.tolerance)
        sample = first_sample([recorded_path(run, "rollout_data_dir") for run in runs], common)
        for letter, run, steps in zip("ab", runs, (first_steps, second_steps)):
            print(plain(f"{letter}: {run}, steps {min(steps)} to {max(steps)}"))
        lines = (
            f"{len(common)} steps in both",
            *_verdict(differing, sample),
            *_table(differing),
            *_options_and_facts(runs),
        )
        print(*map(plain, lines), sep="\n")
    except (ReportError, OSError) as error:
        parser.error(str(error))
    raise SystemExit(1 if differing or sample or not common else 0)


# -- what runs recorded ----------------------------------------------------------------------------------------------


def steps_of(run: Path) -> dict[int, Values]:
    """Return all that a run recorded of each step, without what a clock measured."""
    values_by_step: dict[int, Values] = {}
    for metric_row in read_metrics(run / "metrics.jsonl"):
        if values := {
            metric: value for metric, value in metric_row.items() if not metric.startswith(_CLOCK)
        }:
            values_by_step.setdefault(metric_row["step"], {}).update(values)
    return values_by_step


# -- where they differ -----------------------------------------------------------------------------------------------


def differences(steps: Sequence[tuple[int, Values, Values]], tolerance: float = 0.0) -> Differences:
    """Return by quantity the steps at which two runs differ, with both values; the quantity that differs first is first.

    What one lacks is ``"missing"``; an evaluation that only one of them made is no difference.
    """
    differing: Differences = {}
    for step, first_values, second_values in steps:
        for metric in sorted({**first_values, **second_values}, key=_order):
            values = (first_values.get(metric, "missing"), second_values.get(metric, "missing"))
            scale = max([1.0, *(abs(value) for value in values if isinstance(value, float))])
            is_equal = values[0] == values[1] or _distance(*values) <= tolerance * scale
            if not is_equal and not ("missing" in values and metric.startswith("eval/")):
                differing.setdefault(metric, []).append((step, *values))
    return differing


def _order(metric: str) -> tuple[int, bool]:
    positions = [position for position, prefix in enumerate(_ORDER) if metric.startswith(prefix)]
    return min(positions, default=len(_ORDER)), metric.endswith(_GRADIENT_ENDINGS)


def _distance(first: Any, second: Any) -> float:
    """Return how far two values are apart; infinity where one is missing, or null: it was not finite."""
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return abs(first - second)
    return math.inf


def first_sample(folders: Sequence[Path | None], steps: Sequence[int]) -> str | None:
    """Return the first sample that differs between two folders of ``--rollout_data_dir``: step, sample, and in what."""
    for step in steps if None not in folders else ():
        sample_files = [folder / f"step{step}.jsonl" for folder in folders]
        if not all(map(Path.is_file, sample_files)):
            continue
        for first, second in zip_longest(*map(read_jsonl, sample_files), fillvalue={}):
            for column in {**first, **second}:
                values = (first.get(column), second.get(column))
                if values[0] != values[1]:
                    sample = first or second
                    return (
                        f"step {step}, prompt {sample['index']}, sample {sample['sample_index']}, "
                        f"{_in_column(column, *values)}"
                    )
    return None


def _in_column(column: str, first_text: Any, second_text: Any) -> str:
    """Return a column and its two values; texts from the first character in which they differ."""
    if isinstance(first_text, str) and isinstance(second_text, str):
        pairs = zip(first_text, second_text, strict=False)
        start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        first_text = first_text[start : start + _EXCERPT]
        second_text = second_text[start : start + _EXCERPT]
        column = f"{column} from character {start} on"
    return f"{column}: {first_text!r} and {second_text!r}"


# -- what is said ----------------------------------------------------------------------------------------------------


def _verdict(differing: Differences, sample: str | None) -> Iterator[str]:
    if sample:
        yield f"first sample that differs: {sample}"
    if differing:
        metric, ((step, first, second), *_) = next(iter(differing.items()))
        yield f"first number that differs: step {step}, {metric}: {first} and {second}"
    elif not sample:
        yield "all that both recorded is equal"


def _table(differing: Differences) -> Iterator[str]:
    """Yield how far apart the runs are, from the first difference on."""
    if differing:
        yield f"\n{'quantity':<32}{'from step':>9}{'a there':>14}{'b there':>14}{'most apart':>14}{'at step':>9}"
    for metric, steps in differing.items():
        first_step, *values = steps[0]
        value_texts = ""
        for value in values:
            is_number = isinstance(value, (int, float))
            value_texts += f"{value:>14.6g}" if is_number else f"{value or 'null':>14}"
        distances = [(_distance(first, second), step) for step, first, second in steps]
        distance, farthest_step = max(distances, key=itemgetter(0))
        yield f"{metric:<32}{first_step:>9}{value_texts}{distance:>14.4g}{farthest_step:>9}"


def _options_and_facts(runs: Sequence[Path]) -> Iterator[str]:
    for title, read_entries in {"options": options_of, "versions, ranks, files": facts_of}.items():
        first, second = map(read_entries, runs)
        letters = [letter for letter, values in zip("ab", (first, second)) if not values]
        if letters:
            yield f"\n{title}: not recorded in {' and '.join(letters)}"
            continue
        difference_lines = [
            f"  {entry_name}: {_json(first, entry_name)} and {_json(second, entry_name)}"
            for entry_name in {**first, **second}
            if first.get(entry_name, "missing") != second.get(entry_name, "missing")
        ]
        yield f"\n{title}: {len(difference_lines)} differ"
        yield from difference_lines


def _json(values: Mapping[str, Any], entry_name: str) -> str:
    return json.dumps(values[entry_name], ensure_ascii=False) if entry_name in values else "missing"
