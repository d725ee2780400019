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
from lightppo.config.cli import CommandParser
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
REPORT = "report.html"
INSTALL = "pip install 'lightppo[plots]'"
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
    json_rows = []
    json_lines = text.splitlines()
    for number, json_line in enumerate(json_lines, start=1):
        try:
            json_row = json.loads(json_line)
        except ValueError as error:
            if number == len(json_lines) and not text.endswith("\n"):
                break
            raise ReportError(
                f"{path}, line {number}: is not JSON ({error}); was the run killed while writing?"
            ) from error
        if not isinstance(json_row, dict):
            raise ReportError(
                f"{path}, line {number}: must be an object, not a {type(json_row).__name__}"
            )
        json_rows.append(json_row)
    if not json_rows:
        raise ReportError(f"{path} is empty")
    return json_rows


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return rows of a run's metrics.jsonl: ``step``, ``time`` and what was logged at that step.

    Raises:
        ReportError: as :func:`read_jsonl`, or a row without a step.
    """
    metric_rows = read_jsonl(path)
    for number, metric_row in enumerate(metric_rows, start=1):
        if not isinstance(metric_row.get("step"), int):
            raise ReportError(f'{path}, line {number}: has no "step"; is this a metrics.jsonl?')
    return metric_rows


def series(metric_rows: Sequence[Row], metric: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a metric was logged, and its values; rows without a finite one are left out."""
    logged = [
        (metric_row["step"], metric_row[metric])
        for metric_row in metric_rows
        if metric_row.get(metric) is not None
    ]
    return [step for step, _ in logged], [value for _, value in logged]


def evaluations(metric_rows: Sequence[Row], metric: str = "eval/accuracy") -> list[Row]:
    """Return rows of evaluations, in order: the first is before training, the last after it.

    Raises:
        ReportError: fewer than two steps with an evaluation.
    """
    evaluated = [metric_row for metric_row in metric_rows if metric_row.get(metric) is not None]
    if len({metric_row["step"] for metric_row in evaluated}) < 2:
        raise ReportError(
            f"{len(evaluated)} evaluations in the metrics, two are needed: run with --eval_data and --val_before_train"
        )
    return evaluated


def before_and_after(rows: Sequence[Row]) -> str:
    """Return a table: the evaluations, if there are two, and of the training the first and last tenth of steps, the best."""
    evaluated = sorted(
        {metric for metric_row in rows for metric in metric_row if metric.startswith("eval/")}
    )
    metrics = [metric for metric in evaluated if not metric.endswith("/samples")]
    metrics = [metric for metric in metrics if len(series(rows, metric)[0]) > 1]
    metrics += [metric for panel in (*PANELS, *SFT_PANELS) for metric in panel.curves]
    metrics = [metric for metric in metrics if series(rows, metric)[0]]
    if not metrics:  # an evaluation
        return single_values(rows)
    table_lines = [f"{'':<32}{'first':>12}{'last':>12}{'best':>12}   steps"]
    for metric in metrics:
        steps, values = series(rows, metric)
        # One step alone is noise.
        window = 1 if metric.startswith("eval/") else max(1, len(steps) // 10)
        first_mean = sum(values[:window]) / window
        last_mean = sum(values[-window:]) / window
        best_value = best_step = ""
        if metric.endswith(("reward", "accuracy", "loss")):
            value = min(values) if metric.endswith("loss") else max(values)
            best_value = f"{value:.4g}"
            best_step = f", best at {steps[values.index(value)]}"
        table_lines.append(
            f"{plain(metric):<32}{first_mean:>12.4g}{last_mean:>12.4g}{best_value:>12}   {steps[0]} → {steps[-1]}{best_step}"
        )
    return "\n".join(table_lines)


def single_values(rows: Sequence[Row]) -> str:
    """Return the numbers of an evaluation without a training."""
    values = {
        metric: number
        for metric_row in rows
        for metric, number in metric_row.items()
        if metric[:5] == "eval/"
    }
    table_lines = [f"{plain(metric):<32}{number:>12.4g}" for metric, number in values.items()]
    return "\n".join(table_lines) or "no numbers were recorded"


def summary(metrics_path: Path) -> str:
    """Return what to tell at the end of a run whose metrics are in ``metrics_path``.

    Beside them it draws the picture and writes the report.
    """
    try:
        metric_rows = read_metrics(metrics_path)
    except ReportError as error:
        return str(error)
    summary_lines = [before_and_after(metric_rows)]
    if len({metric_row["step"] for metric_row in metric_rows}) < FEWEST_STEPS:
        return summary_lines[0]
    picture_path = metrics_path.with_name(PICTURE)
    page_path = metrics_path.with_name(REPORT)

    def write_kind(kind: str) -> str:
        if kind == "picture":
            plot_training(metric_rows, picture_path, metrics_path.resolve().parent.name)
            return f"curves: {picture_path}"
        write_report([metrics_path], page_path)
        return f"report: {page_path}"

    for kind in ("picture", "report"):
        try:
            summary_lines.append(write_kind(kind))
        except ModuleNotFoundError:
            summary_lines.append(f"no {kind}: {INSTALL}")
        except (ReportError, OSError) as error:
            summary_lines.append(f"no {kind}: {error}")
        except Exception as error:  # the run is trained and saved: a page is no reason to fail it
            summary_lines.append(
                f"no {kind}: {type(error).__name__}: {error}; lightppo report {metrics_path.parent} shows where"
            )
    return "\n".join(summary_lines)


class RunSummary(Callback):
    """Says at the end of a run what it did, and draws it."""

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if (
            error is not None
            or not run.keeps_files
            or run.only_evaluates
            or not run.strategy.is_rank_0()
        ):
            return
        from lightppo.logging.recorder import metrics_file
        from lightppo.logging.run_folder import upload_run_files

        run.strategy.print(summary(metrics_file(run.config)))
        upload_run_files(run.config.checkpoint.save_path)


def draw_training(rows: Sequence[Row], title: str | None = None) -> Figure:
    """Return the panels of ``PANELS`` over steps, or of ``SFT_PANELS``, from rows of :func:`read_metrics`. A panel of which
    nothing was logged is left out, unless there is no other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = SFT_PANELS if series(rows, "train/loss")[0] else PANELS
    logged = [
        panel
        for panel in panels
        if any(series(rows, metric)[0] for metric in (*panel.curves, *panel.points))
    ]
    logged = logged or panels[:1]
    across = 2 if len(logged) == 4 else len(logged)
    down = len(logged) // across
    figure = Figure(figsize=(5.5 * across, 3.5 * down), layout="constrained")
    FigureCanvasAgg(figure)  # its own canvas: pyplot's global state and backend stay as they are
    for axes, panel in zip(figure.subplots(down, across, squeeze=False).flat, logged):
        _draw_panel(axes, panel, rows)
    if title:
        figure.suptitle(title)
    return figure


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[Row]) -> None:
    for metrics, style in ((panel.curves, {"linewidth": 1}), (panel.points, {"marker": "o"})):
        for metric, label in metrics.items():
            steps, values = series(rows, metric)
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


def plot_training(rows: Sequence[Row], picture_path: str | Path, title: str | None = None) -> None:
    """Draw the run (see :func:`draw_training`) into a PNG file."""
    draw_training(rows, title).savefig(picture_path, format="png", dpi=100)


# -- what else a run recorded ------------------------------------------------------------------------------------------


def options_of(run: Path, file_name: str = "run_config.resolved.yaml") -> dict[str, Any]:
    """Return the options of a run, resolved; empty where it kept none."""
    import yaml

    config_path = run / file_name
    if config_path.is_file():
        return yaml.safe_load(config_path.read_text(encoding="utf-8")) or {}
    return {}


KINDS = {"ppo": PPOConfig, **COMMANDS}


def command_of(options: Mapping[str, Any]) -> str:
    """Return the command whose options a run's are the most like; other versions have some more or fewer."""

    def differences(name: str) -> tuple[int, int]:
        option_names = KINDS[name]().flat().keys()
        return len(options.keys() - option_names), len(option_names - options.keys())

    return min(KINDS, key=differences) if options else "ppo"


def recorded_path(run: Path, option: str) -> Path | None:
    """Return the folder that an option of the run names, if it is there; both may have been moved."""
    options = options_of(run)
    recorded = options.get(option)
    if recorded is None:
        return None
    if "://" in recorded:
        folder_name = Path(recorded).name
    else:
        folder_name = os.path.relpath(recorded, options["save_path"])
    return next(
        (candidate for candidate in (run / folder_name, Path(recorded)) if candidate.is_dir()), None
    )


def starts_of(run: Path) -> list[dict[str, Any]]:
    """Return what ``trainer.run_folder.record_start`` kept of each start of a run."""
    metadata_path = run / "run_metadata.jsonl"
    return read_jsonl(metadata_path) if metadata_path.is_file() else []


def facts_of(run: Path) -> dict[str, str]:
    """Return versions, ranks, device and marks of files of a run; with their steps, where a later start had others."""
    fact_texts: dict[str, list[str]] = {}
    for recorded_start in starts_of(run):
        facts = recorded_start["versions"] | {
            "ranks": recorded_start["ranks"],
            "device": recorded_start["device"],
        }
        for fact_name, content_mark in recorded_start["content"].items():
            if fact_name != "save_path":
                facts[f"content of --{fact_name}"] = content_mark
        for fact_name, fact in facts.items():
            previous = fact_texts.setdefault(fact_name, [str(fact)])
            if previous[-1].partition(" from step ")[0] != str(fact):
                previous.append(f"{fact} from step {recorded_start['step'] + 1} on")
    return {fact_name: ", ".join(values) for fact_name, values in fact_texts.items()}


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

    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    data_blocks = []
    contents = []
    for number, metrics_path in enumerate(runs):
        content = _run(metrics_path)
        files = _sample_files(metrics_path.parent)
        chosen = _evenly(files, rollouts_mb * 1e6 / len(runs))
        for sample_kind, step in chosen:
            content["samples"].setdefault(sample_kind, []).append(step)
            data_blocks.append(_block(f"{sample_kind}-{number}-{step}", files[sample_kind, step]))
        content["left_out"] = len(files) - len(chosen)
        contents.append(content)
    data = {
        "version": __version__,
        "time": time.time(),
        "runs": contents,
        "charts": CHARTS,
        "phases": PHASES,
        "differing": {},
    }
    if len(runs) > 1:
        for part in ("options", "facts"):
            data["differing"][part] = _differing([content[part] for content in contents])
    data_blocks.insert(0, _block("data", _packed(json.dumps(data, default=str))))
    data_blocks.append(_block("plotly", _packed(get_plotlyjs())))
    title = html.escape(", ".join(content["name"] for content in contents))
    page = page.replace("<!--TITLE-->", title, 1)
    write_text(out, page.replace("<!--DATA-->", "\n".join(data_blocks), 1))


def _run(metrics_path: Path) -> dict[str, Any]:
    """Return what the page shows of a run, beside its samples."""
    metric_rows = read_metrics(metrics_path)
    run_folder = metrics_path.parent
    curves = {}
    for metric in sorted({metric for row in metric_rows for metric in row} - {"step", "time"}):
        steps, values = series(metric_rows, metric)
        if steps and not metric.startswith("alarm/"):
            curves[metric] = (steps, [float(f"{value:.6g}") for value in values])
    times = [row["time"] for row in metric_rows if isinstance(row.get("time"), float)]
    options = options_of(run_folder)
    set_options = dict(options_of(run_folder, "run_config.yaml") or options)
    command = command_of(set_options)
    for option in KINDS[command].all_options():
        default = option.default
        if isinstance(default, tuple):
            default = list(default)
        if option.name in set_options and set_options[option.name] == default:
            del set_options[option.name]
    is_evaluation = command == "ppo" and not series(metric_rows, "rollout/reward")[0]
    return {
        "name": run_folder.resolve().name,
        "command": None if is_evaluation else command,  # one to repeat
        "folder": str(run_folder),  # as it was given
        "steps": [metric_rows[0]["step"], metric_rows[-1]["step"]],
        "times": [min(times), max(times)] if times else [],
        "starts": [recorded_start["step"] for recorded_start in starts_of(run_folder)],
        "series": curves,
        "alarms": list(_alarms(metric_rows)),
        "options": {name: value for name, value in options.items() if value is not None},
        "set": list(set_options),
        "facts": facts_of(run_folder),
        "samples": {},
    }


def _alarms(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the alarms that rang, with the first and the last step of each time."""
    for alarm_name, alarm in ALARMS.items():
        points = zip(*series(rows, f"alarm/{alarm_name}"))
        ringing_spans = []
        for rings, equal_points in groupby(points, lambda point: point[1] > 0):
            ringing_steps = [step for step, _ in equal_points]
            if rings:
                ringing_spans.append([ringing_steps[0], ringing_steps[-1]])
        if ringing_spans:
            yield {
                "name": alarm_name,
                "metrics": alarm.metrics,
                "condition": alarm.condition,
                "remedy": alarm.remedy,
                "spans": ringing_spans,
            }


def _differing(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what is not the same in all runs, by name; None where a run has none."""
    entry_names = dict.fromkeys(entry_name for run in runs for entry_name in run)
    values_of_runs = {
        entry_name: [run.get(entry_name) for run in runs] for entry_name in entry_names
    }
    return {
        entry_name: values
        for entry_name, values in values_of_runs.items()
        if any(value != values[0] for value in values)
    }


def _sample_files(run: Path) -> dict[tuple[str, int], bytes]:
    """Return what a run kept of its samples, as gzip, by kind and step: with numbers per token where there are any."""
    rollouts = recorded_path(run, "rollout_data_dir") or run / "rollouts"
    sample_files: dict[tuple[str, int], bytes] = {}
    for sample_kind, folder in (("rollouts", rollouts), ("eval", run / "eval")):
        for sample_path in folder.glob("step*.jsonl"):
            sample_files[sample_kind, _step_of(sample_path)] = gzip.compress(
                sample_path.read_bytes(), 6
            )
    for sample_path in (run / "rollouts").glob("step*.jsonl.gz"):
        sample_files["rollouts", _step_of(sample_path)] = sample_path.read_bytes()
    return dict(sorted(sample_files.items()))


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step").partition(".")[0])


def _evenly(files: Mapping[tuple[str, int], bytes], limit: float) -> list[tuple[str, int]]:
    """Return as many files as there is room for, steps left out evenly; the last step of each kind is always there."""
    last_keys = [max(keys) for _, keys in groupby(files, lambda key: key[0])]
    for stride in range(1, len(files) + 1):
        keys = sorted({*list(files)[::stride], *last_keys})
        if sum(len(files[key]) for key in keys) <= limit:
            return keys
    return sorted(last_keys)


def _packed(text: str) -> bytes:
    return gzip.compress(text.encode(), 6)


def _block(name: str, content: bytes) -> str:
    text = base64.b64encode(content).decode()
    return f'<script type="application/gzip" id="{name}">{text}</script>'


# -- lightppo report ---------------------------------------------------------------------------------------------------


def named_run(path: str) -> str:
    """Return the folder of a run, also where somebody names its file of metrics."""
    folder, _, file_name = path.rpartition("/")
    if file_name != "metrics.jsonl":
        return path
    return folder or "."


def downloaded(run: str) -> Path:
    """Return the folder of a run; of a URL its records, brought to a folder that goes at the end."""
    if is_url(run):
        from lightppo.logging.run_paths import RECORDS

        record_prefixes = {file_name.partition(".")[0] for file_name in RECORDS} - {"profile"}
        folder = tempfile.mkdtemp(prefix="lightppo-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        read_apart(folder)
        download(
            run, lambda file_name: file_name.partition("/")[0].partition(".")[0] in record_prefixes
        )
    return local_folder(run)


def main(arguments: Sequence[str], program: str = "lightppo report") -> None:
    """Print the tables of runs, write their report; code 2 where there is no run, as for every wrong argument."""
    parser = CommandParser(
        program,
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
    options = parser.parse_args(arguments)
    runs = options.runs
    for flag_name, output_path, kind, endings in (
        ("--out", options.out, "a page of HTML", (".html", ".htm")),
        ("--picture", options.picture, "a PNG picture", (".png",)),
    ):
        if output_path is not None and output_path.suffix.lower() not in endings:
            parser.error(
                f"{flag_name} {output_path}: it is {kind}: give a name that ends in {endings[0]}"
            )
    if options.picture is not None and len(runs) > 1:
        parser.error("--picture shows one run: name one, or leave it out")
    if not 0 <= options.rollouts_mb < math.inf:
        parser.error("--rollouts_mb must be a number of at least 0")
    page_path = options.out
    if page_path is None:
        page_path = Path(REPORT)
        if len(runs) == 1 and not is_url(runs[0]):
            page_path = local_folder(runs[0]) / REPORT
    try:
        metrics_paths = [downloaded(run) / "metrics.jsonl" for run in runs]
        for metrics_path in metrics_paths:
            if len(metrics_paths) > 1:
                print(plain(f"\n{metrics_path.parent}"))
            print(before_and_after(read_metrics(metrics_path)))
        if options.picture is not None:
            plot_training(read_metrics(metrics_paths[0]), options.picture, title=str(runs[0]))
        write_report(metrics_paths, page_path, options.rollouts_mb)
    except (ReportError, StagingError, OSError) as error:
        parser.error(str(error))
    except ModuleNotFoundError as error:
        kind = "report" if (error.name or "").startswith("plotly") else "picture"
        parser.exit(message=f"no {kind}: {INSTALL}\n")
    else:
        print(page_path)
