"""What a run did, from the files it wrote: its metrics as one picture, before and after, its evaluations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightppo.errors import ReportError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Panel:
    """One plot of the picture; metrics by name, with their legends."""

    title: str
    curves: Mapping[str, str]  # drawn as lines
    points: Mapping[str, str]  # drawn as points joined by a line, for the few steps with an evaluation
    unit_interval: bool = False  # the y axis is 0 to 1


_TRAINING, _HELD_OUT = "training prompts", "held-out prompts"
PANELS = (
    Panel("reward", {"rollout/reward": _TRAINING}, {"eval/reward": _HELD_OUT}),
    Panel("KL to the reference (nats per token)", {"rollout/kl": _TRAINING}, {}),
    Panel("accuracy", {"reward/accuracy": _TRAINING}, {"eval/accuracy": _HELD_OUT}, unit_interval=True),
    Panel("response length (tokens)", {"rollout/response_length": _TRAINING}, {"eval/response_length": _HELD_OUT}),
)


SFT_PANELS = (
    Panel("loss (nats per token)", {"train/loss": "training data"}, {}),
    Panel("gradient norm", {"train/grad_norm": "before clipping"}, {}),
)
FEWEST_STEPS = 3  # of a picture at the end of a run: two points are no curve, and the table has them
PICTURE = "plot.png"
NO_MATPLOTLIB = "no picture: pip install 'lightppo[plots]'"


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All rows of a JSONL file, but for a last one that is being written, or was torn by a crash.

    Raises:
        ReportError: no such file, no row, or a line that is no JSON object.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror})") from error
    rows, lines = [], text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not text.endswith("\n"):
                break
            raise ReportError(
                f"{path}, line {number}: is not JSON ({error}); was the run killed while writing?"
            ) from error
        if not isinstance(row, dict):
            raise ReportError(f"{path}, line {number}: must be an object, not a {type(row).__name__}")
        rows.append(row)
    if not rows:
        raise ReportError(f"{path} is empty")
    return rows


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl: ``step``, ``time`` and what was logged at that step.

    Raises:
        ReportError: as :func:`read_jsonl`, or a row without a step.
    """
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise ReportError(f'{path}, line {number}: has no "step"; is this a metrics.jsonl?')
    return rows


def series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps at which a metric was logged, and its values; rows that lack it or hold null (not finite) are left out."""
    logged = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in logged], [value for _, value in logged]


def evaluations(rows: Sequence[Row], metric: str = "eval/accuracy") -> list[Row]:
    """Rows of evaluations, in order: the first is before training, the last after it.

    Raises:
        ReportError: fewer than two steps with an evaluation.
    """
    found = [row for row in rows if row.get(metric) is not None]
    if len({row["step"] for row in found}) < 2:
        raise ReportError(
            f"{len(found)} evaluations in the metrics, two are needed: run with --eval_data and --val_before_train"
        )
    return found


def before_and_after(rows: Sequence[Row]) -> str:
    """A table: the evaluations, if there are two, and the training: the first and last tenth of its steps, the best."""
    names = sorted({name for row in rows for name in row if name.startswith("eval/")})
    names = [name for name in names if len(series(rows, name)[0]) > 1 and not name.endswith("/samples")]
    names += [name for panel in (*PANELS, *SFT_PANELS) for name in panel.curves]
    lines = [f"{'':<32}{'first':>12}{'last':>12}{'best':>12}   steps"]
    for name, (steps, values) in {name: series(rows, name) for name in names}.items():
        if not steps:
            continue
        n = 1 if name.startswith("eval/") else max(1, len(steps) // 10)  # one step alone is noise
        best = at = ""
        if name.endswith(("reward", "accuracy", "loss")):
            value = (min if name.endswith("loss") else max)(values)
            best, at = f"{value:.4g}", f", best at {steps[values.index(value)]}"
        ends = f"{sum(values[:n]) / n:>12.4g}{sum(values[-n:]) / n:>12.4g}"
        lines.append(f"{name:<32}{ends}{best:>12}   {steps[0]} → {steps[-1]}{at}")
    return "\n".join(lines)


def summary(path: Path) -> str:
    """What to tell at the end of a run whose metrics are in ``path``; draws the picture beside them."""
    try:
        rows = read_metrics(path)
        told = before_and_after(rows)
        if len({row["step"] for row in rows}) < FEWEST_STEPS:
            return told
        plot_training(rows, path.with_name(PICTURE))
        return f"{told}\ncurves: {path.with_name(PICTURE)}"
    except ReportError as error:
        return str(error)
    except (ModuleNotFoundError, OSError) as error:
        why = NO_MATPLOTLIB if isinstance(error, ModuleNotFoundError) else f"no picture: {error}"
        return f"{told}\n{why}"


def draw_training(rows: Sequence[Row], title: str | None = None) -> Figure:
    """The panels of ``PANELS`` over steps, or of ``SFT_PANELS``, from rows of :func:`read_metrics`. What was never
    logged is left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels, size = (SFT_PANELS, (11, 3.5)) if series(rows, "train/loss")[0] else (PANELS, (11, 7))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # its own canvas: pyplot's global state and backend stay as they are
    for axes, panel in zip(figure.subplots(len(panels) // 2, 2).flat, panels):
        _draw_panel(axes, panel, rows)
    if title:
        figure.suptitle(title)
    return figure


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[Row]) -> None:
    for metrics, style in ((panel.curves, {"linewidth": 1}), (panel.points, {"marker": "o"})):
        for name, label in metrics.items():
            steps, values = series(rows, name)
            if steps:
                axes.plot(steps, values, label=label, **style)
    axes.set(title=panel.title, xlabel="step")
    axes.grid(alpha=0.3)
    if panel.unit_interval:
        axes.set_ylim(0, 1)
    if axes.lines:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "not logged", ha="center", va="center", transform=axes.transAxes)


def plot_training(rows: Sequence[Row], path: str | Path, title: str | None = None) -> None:
    """Draw the run (see :func:`draw_training`) into a PNG file."""
    draw_training(rows, title).savefig(path, format="png", dpi=100)


# -- lightppo report ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str], prog: str = "lightppo report") -> None:
    """Print a run's table and draw its picture; code 2 where there is no run, as for every wrong argument."""
    parser = argparse.ArgumentParser(prog, description="Show what a run did: a table and a picture.")
    parser.add_argument("run", metavar="RUN", type=Path, help="its --save_path, which holds metrics.jsonl")
    parser.add_argument("--picture", type=Path, help=f"PNG file; default: RUN/{PICTURE}")
    args = parser.parse_args(argv)
    picture = args.picture or args.run / PICTURE
    try:
        rows = read_metrics(args.run / "metrics.jsonl")
        print(before_and_after(rows))
        plot_training(rows, picture, title=str(args.run))
    except (ReportError, OSError) as error:
        parser.error(str(error))
    except ModuleNotFoundError:
        parser.exit(message=f"{NO_MATPLOTLIB}\n")
    else:
        print(picture)
