"""What ``lightppo sweep`` says: settings by their runs, with bootstrap intervals (Agarwal et al. 2021, arXiv:2108.13264)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightppo.errors import ReportError
from lightppo.experiments.intervals import (
    bootstrapped,
    estimated,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
)
from lightppo.experiments.members import Member
from lightppo.experiments.page import bounds, save_figure, table, write_page
from lightppo.experiments.sweep_file import Sweep, curve_of, is_complete, score_name, scores_of
from lightppo.suggestions import nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "sweep.html"
FEWEST = 2  # runs of which an interval is made
_POINTS = 60  # of a profile


def rows_of(scores: Mapping[str, Sequence[float]], total: int) -> list[list[str]]:
    """Return the lines of the table: each setting, beside the first one."""
    first = next(iter(scores.values()))
    rows = []
    for number, (setting, values) in enumerate(scores.items()):
        row = [setting, f"{len(values)} of {total}"]
        if len(values) < FEWEST:
            rows.append([*row, f"{values[0]:.4g}" if values else "-", "-", "-", "-"])
            continue
        middle = estimated(interquartile_mean, values)
        row += [f"{middle.value:.4g}", bounds(middle)]
        if number and len(first) >= FEWEST:
            better = estimated(probability_of_improvement, values, first)
            rows.append([*row, f"{better.value:.2f}", bounds(better)])
        else:
            rows.append([*row, "-", "-"])
    return rows


def _log_of(member: Member) -> str:
    """Name a log that there is; of a run by Slurm its job has it."""
    return f" (its log: {member.log})" if member.log.is_file() else ""


def report(sweep: Sweep, picture: Path | None = None) -> None:
    """Print the table, write the page.

    Raises:
        ReportError: no run has ended, or none has the metric.
    """
    metric = score_name(sweep)
    scores = scores_of(sweep, metric)
    if not any(scores.values()):
        if done := sweep.all_done():
            names = sorted(set().union(*done[0].rows().values()))
            raise ReportError(
                f"score: no run has the metric {metric}{nearest(metric, names)}: name one of {done[0].folder}/metrics.jsonl"
            )
        raise ReportError(
            f"{sweep.save_path}: no run of these options has ended: see the logs there"
        )
    first = next(iter(scores))
    header = ("", "runs", "IQM", "95% interval", f"P(better than {first})", "95% interval")
    rows = rows_of(scores, len(sweep.seeds))
    lines = [
        f"{metric}, the mean of the last tenth of each run; IQM: the mean of the middle half of the runs"
    ]
    for setting in sweep.settings:
        done = sweep.done(setting)
        lines += [
            f"of other options, not compared: {member.name}"
            if is_complete(member.folder)
            else f"not there: {member.name}{_log_of(member)}"
            for member in sweep.members(setting)
            if member not in done
        ]
    print("\n".join([*lines, "", table(header, rows)]))
    try:
        figure = draw(sweep, metric, scores)
    except ModuleNotFoundError:
        from lightppo.logging.report_page import INSTALL

        return print(f"no page: {INSTALL}")
    page = sweep.save_path / PAGE
    write_page(page, f"sweep {sweep.save_path}", lines, header, rows, figure)
    if picture is not None:
        save_figure(figure, picture)
    print(page)


def draw(sweep: Sweep, metric: str, scores: Mapping[str, Sequence[float]]) -> Figure:
    """Return curves of all runs, the IQM of each setting, and performance profiles."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 3.8), layout="constrained")
    curves, middles, profiles = figure.subplots(1, 3)
    known = {setting: values for setting, values in scores.items() if values}
    every = [value for values in known.values() for value in values]
    thresholds = np.linspace(min(every), max(every), _POINTS)
    for number, (setting, values) in enumerate(known.items()):
        color = f"C{number}"
        done = sweep.done(setting)
        running = [each for each in sweep.members(setting) if not is_complete(each.folder)]
        for member in (*done, *running):
            curve = curve_of(member.folder, metric)
            curves.plot(list(curve), list(curve.values()), color=color, linewidth=0.8, alpha=0.6)
        profile = performance_profile(values, thresholds)
        profiles.step(thresholds, profile, color=color, where="post", label=setting)
        middle = interquartile_mean(values)
        middles.plot([middle], [number], "o", color=color)
        if len(values) >= FEWEST:
            estimate = estimated(interquartile_mean, values)
            middles.plot([estimate.low, estimate.high], [number, number], color=color)
            low, high = bootstrapped(lambda drawn: performance_profile(drawn, thresholds), values)
            profiles.fill_between(thresholds, low, high, color=color, alpha=0.15, step="post")
    middles.set(title=f"IQM of {metric}", yticks=range(len(known)), yticklabels=list(known))
    middles.invert_yaxis()
    curves.set(title=metric, xlabel="step")
    profiles.set(title="share of runs above a score", xlabel=metric, ylim=(-0.02, 1.05))
    profiles.legend()
    for axes in (curves, middles, profiles):
        axes.grid(alpha=0.3)
    return figure
