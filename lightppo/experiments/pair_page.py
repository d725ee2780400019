"""What ``lightppo what-if`` says: a table for the terminal, and a page with the same and the curves."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from lightppo.errors import ReportError
from lightppo.experiments.fork import MEASURES, Fork
from lightppo.experiments.intervals import Bounded, count_for_width, mean_of
from lightppo.experiments.members import recorded_rows
from lightppo.experiments.page import bounds, save_figure, table, write_page
from lightppo.logging.run_paths import SAMPLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PAGE = "what_if.html"


@dataclass(frozen=True)
class Compared:
    """One measure of all pairs; base and changed are lists by pair of lists by step."""

    measure: str
    metric: str
    base: Sequence[Sequence[float]]
    changed: Sequence[Sequence[float]]

    @property
    def differences(self) -> list[float]:
        """Return the mean difference over the steps, of each pair."""
        return [mean(new) - mean(old) for new, old in zip(self.changed, self.base)]

    @property
    def paired_deviation(self) -> float | None:
        """Return the standard deviation of a pair's difference; None of a single pair."""
        return stdev(self.differences) if len(self.base) > 1 else None

    @property
    def unpaired_deviation(self) -> float | None:
        """Return what it would be if the branches of a pair had different seeds."""
        if len(self.base) < 2:
            return None
        branches = [[mean(steps) for steps in runs] for runs in (self.base, self.changed)]
        return math.hypot(*map(stdev, branches))

    def at_step(self, number: int) -> Bounded:
        """Return the difference at one step."""
        return mean_of([new[number] - old[number] for new, old in zip(self.changed, self.base)])


def compared(
    pairs: Sequence[tuple[Mapping[int, Mapping], Mapping[int, Mapping]]], steps: Sequence[int]
) -> list[Compared]:
    """Return each measure that both branches of all pairs recorded at all steps, from their rows by step."""
    found = []
    for measure, metrics in MEASURES.items():
        for metric in metrics:
            values = [
                [[rows[step].get(metric) for step in steps] for rows in pair] for pair in pairs
            ]
            if all(value is not None for pair in values for runs in pair for value in runs):
                base, changed = zip(*values)
                found.append(Compared(measure, metric, base, changed))
                break
    return found


def row_of(one: Compared, widths: Mapping[str, float]) -> list[str]:
    """Return a line of the table."""
    estimate = mean_of(one.differences)
    means = [mean(map(mean, runs)) for runs in (one.base, one.changed)]
    row = [
        f"{one.measure}, {one.metric}",
        *(f"{value:.4g}" for value in means),
        f"{estimate.value:+.4g}",
    ]
    paired, unpaired = one.paired_deviation, one.unpaired_deviation
    if paired is None or unpaired is None:
        return [*row, "needs --pairs", *["-"] * 4]
    width = widths.get(one.measure) or (estimate.high - estimate.low) / 2
    row += [bounds(estimate), f"{paired:.3g}", f"{unpaired:.3g}"]
    if width == 0:
        return [*row, "-", "-"]
    counts = [count_for_width(paired, width), count_for_width(unpaired, width, groups=2)]
    needed, alone = ("> 1,000,000" if count is None else f"{count:,}" for count in counts)
    return [*row, f"{needed} for {width:.2g}", alone]


HEADER = ("", "base", "changed", "difference", "95% interval", "sd of pairs", "sd of other seeds",
          "pairs for a width", "with other seeds")  # fmt: skip


def report(fork: Fork) -> None:
    """Print the table, write the page.

    Raises:
        ReportError: no pair is whole.
    """
    pairs = fork.whole_pairs()
    if not pairs:
        raise ReportError(f"no pair of branches has all steps yet: their logs are in {fork.out}")
    steps = list(fork.steps)
    rows = [tuple(recorded_rows(branch.run) for branch in pair) for pair in pairs]
    measures = compared(rows, steps)
    base, changed = (branch.run for branch in pairs[0])
    shares = [
        equal_share(sampled_tokens(base, step), sampled_tokens(changed, step)) for step in steps
    ]
    lines = [
        f"{len(pairs)} of {fork.request.pairs} pairs, steps {steps[0]} to {steps[-1]}; means over these steps",
        f"first token that differs: {first_difference(base, changed, steps)}",
    ]
    if known := [f"{share:.0%}" for share in shares if share is not None]:
        lines.append(f"equal tokens by step: {' '.join(known)}")
    cells = [row_of(one, fork.request.width) for one in measures]
    print("\n".join([*lines, "", table(HEADER, cells)]))
    try:
        figure = draw(measures, steps, shares)
    except ModuleNotFoundError:
        from lightppo.logging.report_page import INSTALL

        return print(f"no page: {INSTALL}")
    title = f"{fork.run.name}: what if {fork.title}?"
    write_page(fork.out / PAGE, title, lines, HEADER, cells, figure)
    if fork.request.picture is not None:
        save_figure(figure, fork.request.picture)
    print(fork.out / PAGE)


def draw(
    measures: Sequence[Compared], steps: Sequence[int], shares: Sequence[float | None]
) -> Figure:
    """Return the difference of each measure by step, with its interval and each pair; and the share of equal tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * (len(measures) + 1), 3.4), layout="constrained")
    *panels, last = figure.subplots(1, len(measures) + 1, squeeze=False).flat
    for axes, one in zip(panels, measures):
        for old, new in zip(one.base, one.changed):
            axes.plot(steps, [b - a for a, b in zip(old, new)], color="0.75", linewidth=0.7)
        estimates = [one.at_step(number) for number in range(len(steps))]
        axes.plot(steps, [each.value for each in estimates], color="C0", marker="o", markersize=3)
        if len(one.base) > 1:
            low, high = ([getattr(each, end) for each in estimates] for end in ("low", "high"))
            axes.fill_between(steps, low, high, color="C0", alpha=0.2)
        axes.axhline(0, color="0.3", linewidth=0.8)
        axes.set(title=f"{one.measure}: changed − base", xlabel="step")
    known = [(step, share) for step, share in zip(steps, shares) if share is not None]
    if known:
        last.plot(*zip(*known), color="C2", marker="o", markersize=3)
    else:
        last.text(0.5, 0.5, "no samples kept", ha="center", transform=last.transAxes)
    last.set(title="share of equal tokens", xlabel="step", ylim=(0, 1.05))
    for axes in (*panels, last):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


# -- tokens -----------------------------------------------------------------------------------------------------------


def sampled_tokens(run: Path, step: int) -> dict[tuple[int, int], list[str]]:
    """Return the recorded tokens of a step by (prompt, sample), as texts; none where the run kept none."""
    path = run / SAMPLES / f"step{step}.jsonl.gz"
    if not path.is_file():
        return {}
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return {(row["index"], row["sample_index"]): row["tokens"]["text"] for row in rows}


def equal_share(
    first: Mapping[Any, Sequence[str]], second: Mapping[Any, Sequence[str]]
) -> float | None:
    """Return the share of positions with the same token, of samples in both; None where there is none in both."""
    common = first.keys() & second.keys()
    equal = sum(sum(a == b for a, b in zip(first[key], second[key])) for key in common)
    positions = sum(max(len(first[key]), len(second[key])) for key in common)
    return equal / positions if positions else None


def first_difference(base: Path, changed: Path, steps: Sequence[int]) -> str:
    """Say at which step, sample and token two branches differ first, of the samples that both kept."""
    is_known = False
    for step in steps:
        tokens = [sampled_tokens(run, step) for run in (base, changed)]
        for key in sorted(tokens[0].keys() & tokens[1].keys()):
            is_known = True
            first, second = (each[key] for each in tokens)
            if first != second:
                pairs = zip(first, second)
                end = min(len(first), len(second))
                position = next((n for n, (a, b) in enumerate(pairs) if a != b), end)
                shown = [
                    repr(t[position]) if position < len(t) else "its end" for t in (first, second)
                ]
                return (
                    f"step {step}, prompt {key[0]}, sample {key[1]}, token {position + 1}: "
                    f"{shown[0]} in the base branch, {shown[1]} in the changed one"
                )
    if is_known:
        return "none: the tokens that both kept are equal in all steps"
    return "not known: the run kept no samples (--record_samples)"
