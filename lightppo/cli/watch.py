"""``lightppo watch``: runs in the terminal, from their files alone: curves, phases, alarms, the latest samples."""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from tqdm import tqdm

from lightppo.config.cli import CommandParser
from lightppo.data.folders import mistyped_path
from lightppo.logging.alarms import ALARMS
from lightppo.logging.report_page import named_run, options_of, series
from lightppo.redaction import plain

_SECONDS = 2.0  # between two frames
_PLOT_COLUMNS = 40  # at least
_PLOT_ROWS = 10
_SAMPLES = 3
_COLOURS = ("cyan", "magenta", "yellow", "green", "red", "blue")
CURVES = {  # title: metrics, each a line where it is there
    "reward": ("rollout/reward", "eval/reward"),
    "KL per token": ("rollout/kl",),
    "length": ("rollout/response_length", "eval/response_length"),
    "loss": ("train/loss", "eval/loss", "train/policy_loss"),
    "accuracy": ("reward/accuracy", "reward/acc", "train/accuracy", "eval/accuracy"),
    "margin": ("train/margin", "eval/margin"),
    "entropy": ("train/entropy",),
    "gradient norm": ("train/actor_grad_norm", "train/grad_norm"),
    "equal groups": ("rollout/equal_groups",),
    "tool errors": ("episode/tool_errors", "eval/episode/tool_errors"),
}
_RUN_FILES = ("metrics.jsonl", "run_config.yaml", "run_metadata.jsonl", ".lock")
PHASES = ("rollout", "reward", "experience", "train", "sync", "step")


class Watched:
    """What the files of a run say so far. :meth:`look` reads what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "metrics.jsonl"
        self._start_again()

    def _start_again(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.end = 0  # of what was read
        self.tail = b""  # its last bytes

    def look(self) -> None:
        """Read the new rows; all of them again where a resume has cut the file, or another one is there."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.end - len(self.tail))
                if file.read(len(self.tail)) != self.tail:
                    self._start_again()
                    file.seek(0)
                content = file.read()
        except FileNotFoundError:
            return self._start_again()
        content = content[: content.rfind(b"\n") + 1]  # the last row may be under way
        self.end += len(content)
        self.tail = (self.tail + content)[-200:]
        for json_line in content.splitlines():
            try:
                self.rows.append(json.loads(json_line))
            except ValueError:  # torn by a crash; a resume cuts it off
                continue

    @property
    def step(self) -> int:
        return max((row["step"] for row in self.rows), default=0)

    @property
    def total(self) -> int | None:
        """Return the steps of the whole run, where it has said so at its last start."""
        lines = _text(self.folder / "run_metadata.jsonl").splitlines() or ["{}"]
        return json.loads(lines[-1]).get("total_steps")

    def holder(self) -> tuple[str, str] | None:
        """Return process and machine of the run, by its lock; ``None`` if it has ended. Of another machine nobody knows."""
        lock_match = re.fullmatch(r"process (\d+) on (.*)", _text(self.folder / ".lock"))
        if lock_match is None:
            return None
        process, host = lock_match.groups()
        if host == socket.gethostname() and not psutil.pid_exists(int(process)):
            return None
        return process, host

    def state(self) -> str:
        """Return whether it lives, and its last sign of life."""
        last_row = "no row yet"
        if self.rows:
            last_row = f"last row {_duration(time.time() - self.rows[-1]['time'])} ago"
        if holder := self.holder():
            process, host = holder
            if host == socket.gethostname():
                return f"running, process {process}, {last_row}"
            return f"on {host}, {last_row}"
        if self.total is not None and self.step >= self.total:
            return f"finished, {last_row}"
        return f"ended, {last_row}"

    def pace(self) -> str:
        """Return ``step 12/100 · 0.9 s per step · ETA 1:20``; evaluations and saving count."""
        times = {row["step"]: row["time"] for row in self.rows if row["step"] > 0}
        steps = sorted(times)[-21:]
        pace_texts = [f"step {self.step}" + (f"/{self.total}" if self.total else "")]
        if len(steps) > 1:
            seconds = [(times[b] - times[a]) / (b - a) for a, b in pairwise(steps)]
            pace_texts.append(f"{median(seconds):.2g} s per step")
            if self.total and self.holder():
                mean_seconds = (times[steps[-1]] - times[steps[0]]) / (steps[-1] - steps[0])
                pace_texts.append(f"ETA {_duration(mean_seconds * (self.total - self.step))}")
        return " · ".join(pace_texts)

    def alarms(self) -> list[str]:
        """Return those that ring at the last step which was looked at."""
        alarm_lines = []
        for metric_row in reversed(self.rows):
            ringing = {
                alarm_name: value
                for alarm_name, value in metric_row.items()
                if alarm_name.startswith("alarm/")
            }
            for alarm_name, alarm in ALARMS.items():
                if ringing.get(f"alarm/{alarm_name}"):
                    alarm_lines.append(
                        f"ALARM {alarm_name}: {alarm.metrics[0]} {alarm.condition}. Try: {alarm.remedy}"
                    )
            if ringing:
                break
        return alarm_lines

    def samples(self) -> list[dict[str, Any]]:
        """Return some of the latest step that has a file: the best, the worst and what lies between."""
        folders = [self.folder / "rollouts"]
        if folder := options_of(self.folder).get("rollout_data_dir"):
            folders.append(Path(folder))
        files_by_step = {}
        for sample_path in (
            sample_path for folder in folders for sample_path in folder.glob("step*.jsonl*")
        ):
            if name_match := re.fullmatch(r"step(\d+)\.jsonl(\.gz)?", sample_path.name):
                files_by_step[int(name_match[1])] = sample_path
        if not files_by_step:
            return []
        latest = files_by_step[max(files_by_step)]
        content = latest.read_bytes()
        if latest.suffix == ".gz":
            content = gzip.decompress(content)
        sample_rows = sorted(
            map(json.loads, content.decode().splitlines()), key=lambda row: -(row.get("score") or 0)
        )
        sample_count = min(_SAMPLES, len(sample_rows))
        return [
            sample_rows[i * (len(sample_rows) - 1) // (_SAMPLES - 1)] for i in range(sample_count)
        ]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _duration(seconds: float) -> str:
    return tqdm.format_interval(round(max(0, seconds))).removeprefix("0")


# -- on the screen ---------------------------------------------------------------------------------------------------


def frame(watched_runs: Sequence[Watched], width: int, height: int | None = None) -> Any:
    """Return one picture of the runs, for rich to print; with so many lines, fewer plots, so that samples are seen."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    frame_parts: list[Any] = []
    for run in watched_runs:
        frame_parts.append(Text(plain(f"{run.folder}  {run.state()}"), style="bold"))
        frame_parts.append(Text(plain(run.pace()), style="bold"))
        frame_parts += [Text(shown_line, style="bold red") for shown_line in run.alarms()]
    curves = [
        (plot_title, metrics)
        for plot_title, metrics in CURVES.items()
        if any(series(run.rows, metric)[0] for run in watched_runs for metric in metrics)
    ]
    columns = max(1, min(len(curves), width // _PLOT_COLUMNS))
    if height is not None:
        curves = curves[: columns * max(1, (height - 18) // (_PLOT_ROWS + 1))]
    plots = [
        _plot(watched_runs, plot_title, metrics, width // columns) for plot_title, metrics in curves
    ]
    grid = Table.grid()
    for start in range(0, len(plots), columns):
        grid.add_row(*plots[start : start + columns])
    frame_parts.append(grid if plots else Text("waiting for the first step"))
    for run in watched_runs:
        if len(watched_runs) > 1:
            frame_parts.append(Text(plain(run.folder), style="bold"))
        for shown_line in (*_phases(run), *_samples(run)):
            frame_parts.append(Text(shown_line, no_wrap=True, overflow="ellipsis"))
    return Group(*frame_parts)


def _plot(watched_runs: Sequence[Watched], title: str, metrics: Sequence[str], width: int) -> Any:
    """Return a plot of one metric or several, under a line with the colour and the last value of each."""
    import plotext
    from rich.text import Text

    figure = plotext.figure
    caption = Text(f" {title}", style="bold")
    figure.clear()
    figure.theme("simple")
    figure.plot_size(width, _PLOT_ROWS)
    curves = [
        (run, metric, *series(run.rows, metric)) for run in watched_runs for metric in metrics
    ]
    curves = [line for line in curves if line[2]]
    for (run, metric, steps, values), colour in zip(curves, cycle(_COLOURS)):
        marker = plotext.marker("braille", pixel=colour)
        figure.draw(figure.signal(steps, values, marker=marker).lines())
        caption_words = ["●", f"{values[-1]:.3g}"]
        if len(curves) > len(watched_runs):
            caption_words.insert(1, metric.partition("/")[0])
        if len(watched_runs) > 1:
            caption_words.insert(1, plain(run.folder.name))
        caption.append(f" {' '.join(caption_words)}", style=f"not bold {colour}")
    first_step = min(steps[0] for *_, steps, _ in curves)
    last_step = max(steps[-1] for *_, steps, _ in curves)
    end_steps = sorted({first_step, last_step})
    figure.ruler("x").ticks(end_steps, list(map(str, end_steps)))
    caption.truncate(width - 1)
    plot = Text.from_ansi(figure.build().string())
    plot.rstrip()
    return caption.append("\n").append(plot)


def _phases(run: Watched) -> Iterator[str]:
    for metric_row in reversed(run.rows):
        if step_seconds := metric_row.get("perf/time_step"):
            for phase in PHASES:
                if (seconds := metric_row.get(f"perf/time_{phase}")) is not None:
                    yield f"{phase:<11}{'█' * round(30 * seconds / step_seconds):<31}{seconds:.2f} s"
            return


def _samples(run: Watched) -> Iterator[str]:
    for sample_row in run.samples():
        score_text = sample_row.get("score")
        if score_text is not None:
            score_text = f"{score_text:.4g}"
        yield f"[step {sample_row['step']}] score {score_text} · label {_one_line(sample_row['ground_truth'])}"
        for name, column in (("prompt", "input"), ("answer", "output")):
            yield f"  {name}: {_one_line(sample_row[column][-300:])}"


def _one_line(text: object) -> str:
    return " ".join(plain(text).split())


def _may_be_a_run(folder: Path) -> bool:
    """Tell whether a run writes here, or may have begun to: an empty folder, or one with its lock, has no rows yet."""
    names = {path.name for path in folder.iterdir()}
    return not names or not names.isdisjoint(_RUN_FILES)


def main(arguments: Sequence[str], program: str = "lightppo watch") -> None:
    """Show the runs until Ctrl-C; exit code 2 where there is none, or a package is missing."""
    parser = CommandParser(program, description="Watch runs in the terminal, from their files.")
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=lambda path: Path(named_run(path)),
        nargs="+",
        help="the --save_path of a run",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    options = parser.parse_args(arguments)
    try:
        import plotext  # noqa: F401
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        parser.error(f"{error.name} is missing: pip install 'lightppo[watch]'")
    for folder in options.runs:
        if not folder.is_dir():
            parser.error(
                f"{folder}: no such folder{mistyped_path(str(folder))}; give the --save_path of a run"
            )
    for folder in options.runs:
        if not _may_be_a_run(folder):
            parser.error(
                f"{folder} is no run: it has no metrics.jsonl and no run_config.yaml; give a --save_path"
            )
    runs = [Watched(folder) for folder in options.runs]
    console = Console()

    def look() -> Any:
        for run in runs:
            run.look()
        return frame(runs, console.width, None if options.once else console.height)

    if options.once:
        return console.print(look())
    try:
        with Live(look(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(_SECONDS)
                live.update(look(), refresh=True)
    except KeyboardInterrupt:
        pass
