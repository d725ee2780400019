"""What a run did, from the files it wrote: before and after, a picture, and a page of HTML (``report.html``)."""

from __future__ import annotations

import atexit
import base64
import gzip
import html
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightppo.callbacks import Callback
from lightppo.config import PPOConfig
from lightppo.config.arguments import CommandParser
from lightppo.config.supervised_options import COMMANDS
from lightppo.errors import ReportError, StagingError
from lightppo.files import write_text
from lightppo.logging.alarms import ALARMS
from lightppo.redaction import plain
from lightppo.storage import download, is_url, local_folder, read_apart
from lightppo.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Panel:
    """One plot of the picture; metrics by name, with their legends."""

    title: str
    curves: Mapping[str, str]  # drawn as lines
    # Drawn as points joined by a line, since few steps have an evaluation.
    points: Mapping[str, str]
    unit_interval: bool = False  # the y axis is 0 to 1


_TRAINING = "training prompts"
_HELD_OUT = "held-out prompts"
PANELS = (
    Panel("reward", {"rollout/reward": _TRAINING}, {"eval/reward": _HELD_OUT}),
    Panel("KL to the reference (nats per token)", {"rollout/kl": _TRAINING}, {}),
    Panel(
        "accuracy", {"reward/accuracy": _TRAINING}, {"eval/accuracy": _HELD_OUT}, unit_interval=True
    ),
    Panel(
        "response length (tokens)",
        {"rollout/response_length": _TRAINING},
        {"eval/response_length": _HELD_OUT},
    ),
)


SFT_PANELS = (
    Panel("loss (nats per token)", {"train/loss": "training data"}, {}),
    Panel("gradient norm", {"train/grad_norm": "before clipping"}, {}),
)
# of a picture at the end of a run: two points are no curve, and the table has them
FEWEST_STEPS = 3
PICTURE = "plot.png"
NO_MATPLOTLIB = "no picture: pip install 'lightppo[plots]'"
REPORT = "report.html"
NO_PLOTLY = "no report: pip install 'lightppo[plots]'"
ROLLOUTS_MB = 50.0  # of samples in a report


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Return all rows of a JSONL file, but for a last one that is being written, or was torn by a crash.

    Raises:
        ReportError: no such file, no row, or a line that is no JSON object.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror})") from error
    rows = []
    lines = text.splitlines()
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
            raise ReportError(
                f"{path}, line {number}: must be an object, not a {type(row).__name__}"
            )
        rows.append(row)
    if not rows:
        raise ReportError(f"{path} is empty")
    return rows


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return rows of a run's metrics.jsonl: ``step``, ``time`` and what was logged at that step.

    Raises:
        ReportError: as :func:`read_jsonl`, or a row without a step.
    """
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise ReportError(f'{path}, line {number}: has no "step"; is this a metrics.jsonl?')
    return rows


def series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a metric was logged, and its values; rows without a finite one are left out."""
    logged = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in logged], [value for _, value in logged]


def evaluations(rows: Sequence[Row], metric: str = "eval/accuracy") -> list[Row]:
    """Return rows of evaluations, in order: the first is before training, the last after it.

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
    """Return a table: the evaluations, if there are two, and of the training the first and last tenth of steps, the best."""
    names = sorted({name for row in rows for name in row if name.startswith("eval/")})
    names = [
        name for name in names if len(series(rows, name)[0]) > 1 and not name.endswith("/samples")
    ]
    names += [name for panel in (*PANELS, *SFT_PANELS) for name in panel.curves]
    if not any(series(rows, name)[0] for name in names):  # an evaluation
        return single_values(rows)
    lines = [f"{'':<32}{'first':>12}{'last':>12}{'best':>12}   steps"]
    for name, (steps, values) in {name: series(rows, name) for name in names}.items():
        if not steps:
            continue
        # One step alone is noise.
        window = 1 if name.startswith("eval/") else max(1, len(steps) // 10)
        best = at = ""
        if name.endswith(("reward", "accuracy", "loss")):
            value = (min if name.endswith("loss") else max)(values)
            best = f"{value:.4g}"
            at = f", best at {steps[values.index(value)]}"
        ends = f"{sum(values[:window]) / window:>12.4g}{sum(values[-window:]) / window:>12.4g}"
        lines.append(f"{plain(name):<32}{ends}{best:>12}   {steps[0]} → {steps[-1]}{at}")
    return "\n".join(lines)


def single_values(rows: Sequence[Row]) -> str:
    """Return the numbers of an evaluation without a training."""
    last = {name: value for row in rows for name, value in row.items() if name.startswith("eval/")}
    return (
        "\n".join(f"{plain(name):<32}{value:>12.4g}" for name, value in last.items())
        or "no numbers were recorded"
    )


def summary(path: Path) -> str:
    """Return what to tell at the end of a run whose metrics are in ``path``; beside them it draws the picture, writes the
    report."""
    try:
        rows = read_metrics(path)
    except ReportError as error:
        return str(error)
    told = [before_and_after(rows)]
    drawn = {
        ("curves", "picture", path.with_name(PICTURE)): lambda file: plot_training(
            rows, file, _name_of(path)
        ),
        ("report", "report", path.with_name(REPORT)): lambda file: write_report([path], file),
    }
    for (title, kind, file), draw in (
        drawn.items() if len({row["step"] for row in rows}) >= FEWEST_STEPS else ()
    ):
        try:
            draw(file)
            told.append(f"{title}: {file}")
        except ModuleNotFoundError:
            told.append({"picture": NO_MATPLOTLIB, "report": NO_PLOTLY}[kind])
        except (ReportError, OSError) as error:
            told.append(f"no {kind}: {error}")
        except Exception as error:  # the run is trained and saved: a page is no reason to fail it
            told.append(
                f"no {kind}: {type(error).__name__}: {error}; lightppo report {path.parent} shows where"
            )
    return "\n".join(told)


class RunSummary(Callback):
    """Says at the end of a run what it did, and draws it."""

    def __init__(self, run: Any) -> None:
        pass

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if error is not None or not run.keeps or run.only_evaluates or not run.strategy.is_rank_0():
            return
        from lightppo.logging.recorder import metrics_file
        from lightppo.logging.run_folder import upload_records

        run.strategy.print(summary(metrics_file(run.config)))
        upload_records(run.config.checkpoint.save_path)


def draw_training(rows: Sequence[Row], title: str | None = None) -> Figure:
    """Return the panels of ``PANELS`` over steps, or of ``SFT_PANELS``, from rows of :func:`read_metrics`. A panel of which
    nothing was logged is left out, unless there is no other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = SFT_PANELS if series(rows, "train/loss")[0] else PANELS
    panels = [panel for panel in panels if _is_logged(panel, rows)] or panels[:1]
    across = len(panels) if len(panels) < 4 else 2
    down = len(panels) // across
    figure = Figure(figsize=(5.5 * across, 3.5 * down), layout="constrained")
    FigureCanvasAgg(figure)  # its own canvas: pyplot's global state and backend stay as they are
    for axes, panel in zip(figure.subplots(down, across, squeeze=False).flat, panels):
        _draw_panel(axes, panel, rows)
    if title:
        figure.suptitle(title)
    return figure


def _is_logged(panel: Panel, rows: Sequence[Row]) -> bool:
    return any(series(rows, name)[0] for name in (*panel.curves, *panel.points))


def _name_of(metrics: Path) -> str:
    """Return the name of the run with this file of metrics."""
    return metrics.resolve().parent.name


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


# -- what else a run recorded ------------------------------------------------------------------------------------------


def options_of(run: Path, file: str = "run_config.resolved.yaml") -> dict[str, Any]:
    """Return the options of a run, resolved; empty where it kept none."""
    import yaml

    path = run / file
    if path.is_file():
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    return {}


KINDS = {"ppo": PPOConfig, **COMMANDS}


def command_of(options: Mapping[str, Any]) -> str:
    """Return the command whose options a run's are the most like; other versions have some more or fewer."""

    def unlike(name: str) -> tuple[int, int]:
        known = KINDS[name]().flat().keys()
        return len(options.keys() - known), len(known - options.keys())

    return min(KINDS, key=unlike) if options else "ppo"


def recorded_path(run: Path, option: str) -> Path | None:
    """Return the folder that an option of the run names, if it is there; both may have been moved."""
    options = options_of(run)
    if (value := options.get(option)) is None:
        return None
    beside = run / (
        Path(value).name if "://" in value else os.path.relpath(value, options["save_path"])
    )
    return next((path for path in (beside, Path(value)) if path.is_dir()), None)


def starts_of(run: Path) -> list[dict[str, Any]]:
    """Return what ``trainer.run_folder.record_start`` kept of each start of a run."""
    path = run / "run_metadata.jsonl"
    return read_jsonl(path) if path.is_file() else []


def facts_of(run: Path) -> dict[str, str]:
    """Return versions, ranks, device and marks of files of a run; with their steps, where a later start had others."""
    found: dict[str, list[str]] = {}
    for start in starts_of(run):
        content = {
            f"content of --{name}": mark
            for name, mark in start["content"].items()
            if name != "save_path"
        }
        for name, value in {
            **start["versions"],
            "ranks": start["ranks"],
            "device": start["device"],
            **content,
        }.items():
            seen = found.setdefault(name, [str(value)])
            if seen[-1].partition(" from step ")[0] != str(value):
                seen.append(f"{value} from step {start['step'] + 1} on")
    return {name: ", ".join(values) for name, values in found.items()}


# -- report.html -------------------------------------------------------------------------------------------------------

# Title of a chart → its metrics with their labels; where there is one metric, the title says it all.
CHARTS = {
    "Reward": {"rollout/reward": "training", "eval/reward": "held out"},
    "Accuracy": {
        "reward/accuracy": "training",
        "train/accuracy": "training",
        "eval/accuracy": "held out",
    },
    "KL to the reference, nats per token": {
        "rollout/kl": "estimate",
        "rollout/policy_kl": "unbiased",
    },
    "Entropy, nats per token": {"train/entropy": "training"},
    "Response length, tokens": {
        "rollout/response_length": "training",
        "eval/response_length": "held out",
    },
    "Responses cut by the limit, share": {
        "rollout/response_clip_ratio": "training",
        "eval/truncated": "held out",
    },
    "Groups with equal scores, share": {"rollout/equal_groups": "training"},
    "Tool calls that failed, share": {
        "episode/tool_errors": "training",
        "eval/episode/tool_errors": "held out",
    },
    "Loss": {
        **{
            f"train/{n}": n.removesuffix("_loss")
            for n in ("policy_loss", "critic_loss", "kl_loss", "ptx_loss")
        },
        **{"train/loss": "training", "eval/loss": "held out"},
    },
    "Clipped tokens, share": {"train/clip_ratio": "policy", "train/value_clip_ratio": "value"},
    "KL of an update, nats per token": {"train/approx_kl": "training"},
    "Gradient norm": {
        "train/actor_grad_norm": "actor",
        "train/critic_grad_norm": "critic",
        "train/grad_norm": "model",
    },
    "Learning rate": {"train/actor_lr": "actor", "train/critic_lr": "critic", "train/lr": "model"},
    "Log prob, engine against trainer, nats": {"rollout/logp_diff_mean": "mean"},
    "Tokens per second": {
        "perf/rollout_tokens_per_second": "generation",
        "perf/train_tokens_per_second": "training",
    },
}
PHASES = {
    f"perf/time_{phase}": phase for phase in ("rollout", "reward", "experience", "train", "sync")
}


def write_report(runs: Sequence[Path], out: Path, rollouts_mb: float = ROLLOUTS_MB) -> None:
    """Write one page that shows runs, given by their files of metrics, beside one another; it needs no other file.

    What is embedded is gzip in base64, and read only when it is shown.

    Raises:
        ReportError: metrics that cannot be read.
        ModuleNotFoundError: plotly is not installed.
    """
    from plotly.offline import get_plotlyjs

    page = (Path(__file__).with_suffix(".html")).read_text(encoding="utf-8")
    blocks = []
    shown = []
    for number, path in enumerate(runs):
        shown.append(run := _run(path))
        files = _sample_files(path.parent)
        for kind, step in _evenly(files, rollouts_mb * 1e6 / len(runs)):
            run["samples"].setdefault(kind, []).append(step)
            blocks.append(_block(f"{kind}-{number}-{step}", files[kind, step]))
        run["left_out"] = len(files) - sum(map(len, run["samples"].values()))
    data = {
        "version": __version__,
        "time": time.time(),
        "runs": shown,
        "charts": CHARTS,
        "phases": PHASES,
    }
    data["differing"] = {
        what: _differing([run[what] for run in shown])
        for what in ("options", "facts")
        if len(shown) > 1
    }
    blocks.insert(0, _block("data", _packed(json.dumps(data, default=str))))
    blocks.append(_block("plotly", _packed(get_plotlyjs())))
    title = html.escape(", ".join(run["name"] for run in shown))
    write_text(
        out, page.replace("<!--TITLE-->", title, 1).replace("<!--DATA-->", "\n".join(blocks), 1)
    )


def _run(path: Path) -> dict[str, Any]:
    """Return what the page shows of a run, beside its samples."""
    rows = read_metrics(path)
    run = path.parent
    names = sorted({name for row in rows for name in row} - {"step", "time"})
    curves = {name: (steps, [float(f"{x:.6g}") for x in values]) for name in names
              for steps, values in [series(rows, name)] if steps and not name.startswith("alarm/")}  # fmt: skip
    times = [row["time"] for row in rows if isinstance(row.get("time"), float)]
    options = options_of(run)
    given = options_of(run, "run_config.yaml") or options
    command = command_of(given)
    defaults = {one.name: one.default for one in KINDS[command].all_options()}
    plain = {
        name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()
    }
    return {
        "name": run.resolve().name,
        # An evaluation has no command to repeat.
        "command": command if series(rows, "rollout/reward")[0] or command != "ppo" else None,
        "folder": str(run),  # as it was given
        "steps": [rows[0]["step"], rows[-1]["step"]],
        "times": [min(times), max(times)] if times else [],
        "starts": [start["step"] for start in starts_of(run)],
        "series": curves,
        "alarms": list(_alarms(rows)),
        "options": {n: v for n, v in options.items() if v is not None},
        "set": [name for name, value in given.items() if name not in plain or value != plain[name]],
        "facts": facts_of(run),
        "samples": {},
    }


def _alarms(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the alarms that rang, with the first and the last step of each time."""
    for name, alarm in ALARMS.items():
        steps, values = series(rows, f"alarm/{name}")
        rings = [
            [step for step, _ in part]
            for on, part in groupby(zip(steps, values), lambda pair: pair[1] > 0)
            if on
        ]
        if rings:
            yield {"name": name, "metrics": alarm.metrics, "condition": alarm.condition, "remedy": alarm.remedy,
                   "spans": [[part[0], part[-1]] for part in rings]}  # fmt: skip


def _differing(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what is not the same in all runs, by name; None where a run has none."""
    names = dict.fromkeys(name for run in runs for name in run)
    values = {name: [run.get(name) for run in runs] for name in names}
    return {
        name: found for name, found in values.items() if any(value != found[0] for value in found)
    }


def _sample_files(run: Path) -> dict[tuple[str, int], bytes]:
    """By kind and step, what a run kept of its samples, as gzip: those with numbers per token where there are any."""
    found: dict[tuple[str, int], bytes] = {}
    for kind, folder in (
        ("rollouts", recorded_path(run, "rollout_data_dir")),
        ("eval", run / "eval"),
    ):
        for path in folder.glob("step*.jsonl") if folder is not None else ():
            found[kind, _step_of(path)] = gzip.compress(path.read_bytes(), 6)
    for path in (run / "rollouts").glob("step*.jsonl.gz"):
        found["rollouts", _step_of(path)] = path.read_bytes()
    return dict(sorted(found.items()))


def _step_of(path: Path) -> int:
    return int(path.name[4:].partition(".")[0])


def _evenly(files: Mapping[tuple[str, int], bytes], limit: float) -> list[tuple[str, int]]:
    """Return as many files as there is room for, steps left out evenly; the last step of each kind is always there."""
    last = [max(keys) for _, keys in groupby(files, lambda key: key[0])]
    for stride in range(1, len(files) + 1):
        kept = sorted({*list(files)[::stride], *last})
        if sum(len(files[key]) for key in kept) <= limit:
            return kept
    return sorted(last)


def _packed(text: str) -> bytes:
    return gzip.compress(text.encode(), 6)


def _block(name: str, content: bytes) -> str:
    return (
        f'<script type="application/gzip" id="{name}">{base64.b64encode(content).decode()}</script>'
    )


# -- lightppo report ---------------------------------------------------------------------------------------------------


def named_run(path: str) -> str:
    """Return the folder of a run, also where somebody names its file of metrics."""
    folder, _, name = path.rpartition("/")
    return folder or "." if name == "metrics.jsonl" else path


def brought(run: str) -> Path:
    """Return the folder of a run; of a URL its records, brought to a folder that goes at the end."""
    if is_url(run):
        from lightppo.logging.run_paths import RECORDS

        kinds = {name.partition(".")[0] for name in RECORDS} - {"profile"}
        folder = tempfile.mkdtemp(prefix="lightppo-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        read_apart(folder)
        download(run, lambda name: name.partition("/")[0].partition(".")[0] in kinds)
    return local_folder(run)


def main(argv: Sequence[str], prog: str = "lightppo report") -> None:
    """Print the tables of runs, write their report; code 2 where there is no run, as for every wrong argument."""
    parser = CommandParser(
        prog,
        description="Show what runs did: a table per run, and one HTML page that needs no server or network.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=named_run,
        nargs="+",
        help="--save_path of a run (folder or URL) with metrics.jsonl; several are compared",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help=f"file of the page; default: RUN/{REPORT}, for several runs {REPORT} here",
    )
    parser.add_argument(
        "--picture", type=Path, help="also write the curves of one run to this PNG file"
    )
    parser.add_argument("--rollouts_mb", type=float, default=ROLLOUTS_MB, help="maximum MB of samples in the page; if "
                        "there are more, steps are left out evenly; default: %(default)g")  # fmt: skip
    args = parser.parse_args(argv)
    out = (
        args.out
        or (Path() if len(args.runs) > 1 or is_url(args.runs[0]) else local_folder(args.runs[0]))
        / REPORT
    )
    for flag, path, kinds in (
        ("--out", args.out, (".html", ".htm")),
        ("--picture", args.picture, (".png",)),
    ):
        if path is not None and path.suffix.lower() not in kinds:
            what = "a page of HTML" if flag == "--out" else "a PNG picture"
            parser.error(f"{flag} {path}: it is {what}: give a name that ends in {kinds[0]}")
    if args.picture is not None and len(args.runs) > 1:
        parser.error("--picture shows one run: name one, or leave it out")
    if not (math.isfinite(args.rollouts_mb) and args.rollouts_mb >= 0):
        parser.error("--rollouts_mb must be a number of at least 0")
    try:
        paths = [brought(run) / "metrics.jsonl" for run in args.runs]
        for path in paths:
            print(
                *([plain(f"\n{path.parent}")] if len(paths) > 1 else []),
                before_and_after(read_metrics(path)),
                sep="\n",
            )
        if args.picture is not None:
            plot_training(read_metrics(paths[0]), args.picture, title=str(args.runs[0]))
        write_report(paths, out, args.rollouts_mb)
    except (ReportError, StagingError, OSError) as error:
        parser.error(str(error))
    except ModuleNotFoundError as error:
        parser.exit(
            message=f"{NO_PLOTLY if (error.name or '').startswith('plotly') else NO_MATPLOTLIB}\n"
        )
    else:
        print(out)
