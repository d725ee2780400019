"""``lightppo watch``: runs in the terminal, from their files alone: curves, phases, alarms, the latest samples."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from lightppo.config.arguments import CommandParser
from lightppo.data.folders import mistyped_path
from lightppo.logging.alarms import ALARMS
from lightppo.logging.report_page import named_run
from lightppo.redaction import plain

_SECONDS = 2.0  # between two frames
_PLOT = (40, 10)  # columns at least, rows
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
_OF_RUNS = ("metrics.jsonl", "run_config.yaml", "run_metadata.jsonl", ".lock")
PHASES = ("rollout", "reward", "experience", "train", "sync", "step")


class Watched:
    """What the files of a run say so far. :meth:`look` reads what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "metrics.jsonl"
        self._from_the_start()

    def _from_the_start(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.end, self.tail = 0, b""  # of what was read, and its last bytes

    def look(self) -> None:
        """Read the new rows; all of them again where a resume has cut the file, or another one is there."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.end - len(self.tail))
                if file.read(len(self.tail)) != self.tail:
                    self._from_the_start()
                    file.seek(0)
                new = file.read()
        except FileNotFoundError:
            return self._from_the_start()
        whole = new[: new.rfind(b"\n") + 1]  # the last row may be under way
        self.end = self.end + len(whole)
        self.tail = (self.tail + whole)[-200:]
        for line in whole.splitlines():
            try:
                self.rows.append(json.loads(line))
            except ValueError:  # torn by a crash; a resume cuts it off
                continue

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric."""
        points = [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    @property
    def step(self) -> int:
        return max((row["step"] for row in self.rows), default=0)

    @property
    def total(self) -> int | None:
        """Steps of the whole run, where it has said so at its last start."""
        lines = _text(self.folder / "run_metadata.jsonl").splitlines() or ["{}"]
        return json.loads(lines[-1]).get("total_steps")

    def holder(self) -> tuple[str, str] | None:
        """Process and machine of the run, by its lock; ``None`` where it has ended. Of another machine nobody knows."""
        found = re.fullmatch(r"process (\d+) on (.*)", _text(self.folder / ".lock"))
        ended = (
            found and found[2] == socket.gethostname() and not os.path.exists(f"/proc/{found[1]}")
        )
        if found is None or ended:
            return None
        return (found[1], found[2])

    def state(self) -> str:
        """Whether it lives, and its last sign of life."""
        if self.rows:
            last = f"last row {_duration(time.time() - self.rows[-1]['time'])} ago"
        else:
            last = "no row yet"
        if holder := self.holder():
            process, host = holder
            if host == socket.gethostname():
                return f"running, process {process}, {last}"
            return f"on {host}, {last}"
        if self.total is not None and self.step >= self.total:
            return f"finished, {last}"
        return f"ended, {last}"

    def pace(self) -> str:
        """``step 12/100 · 0.9 s per step · ETA 1:20``; evaluations and saving count."""
        ends = {row["step"]: row["time"] for row in self.rows if row["step"] > 0}
        last = sorted(ends)[-21:]
        parts = [f"step {self.step}" + (f"/{self.total}" if self.total else "")]
        if len(last) > 1:
            each = median((ends[b] - ends[a]) / (b - a) for a, b in pairwise(last))
            parts.append(f"{each:.2g} s per step")
            if self.total and self.holder():
                left = (
                    (ends[last[-1]] - ends[last[0]])
                    / (last[-1] - last[0])
                    * (self.total - self.step)
                )
                parts.append(f"ETA {_duration(left)}")
        return " · ".join(parts)

    def alarms(self) -> list[str]:
        """Those that ring at the last step which was looked at."""
        seen = next(
            (row for row in reversed(self.rows) if any(n.startswith("alarm/") for n in row)), {}
        )
        ringing = [
            name.partition("/")[2]
            for name, rings in seen.items()
            if name.startswith("alarm/") and rings
        ]
        known = {name: ALARMS[name] for name in ringing if name in ALARMS}
        return [
            f"ALARM {name}: {one.metrics[0]} {one.condition}. Try: {one.remedy}"
            for name, one in known.items()
        ]

    def samples(self) -> list[dict[str, Any]]:
        """Some of the latest step that has a file: the best, the worst and what lies between."""
        options = yaml.safe_load(_text(self.folder / "run_config.resolved.yaml")) or {}
        folders = [
            self.folder / "rollouts",
            *map(Path, filter(None, [options.get("rollout_data_dir")])),
        ]
        files = {int(found[1]): p for folder in folders for p in folder.glob("step*.jsonl*")
                 if (found := re.fullmatch(r"step(\d+)\.jsonl(\.gz)?", p.name))}  # fmt: skip
        if not files:
            return []
        latest = files[max(files)]
        if latest.suffix == ".gz":
            text = gzip.decompress(latest.read_bytes()).decode()
        else:
            text = _text(latest)
        rows = sorted(map(json.loads, text.splitlines()), key=lambda row: -(row.get("score") or 0))
        return [
            rows[i * (len(rows) - 1) // max(1, _SAMPLES - 1)]
            for i in range(min(_SAMPLES, len(rows)))
        ]


def _text(path: Path) -> str:
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return ""


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


# -- on the screen ---------------------------------------------------------------------------------------------------


def frame(runs: Sequence[Watched], width: int, height: int | None = None) -> Any:
    """One picture of the runs, for rich to print; with so many lines, fewer plots, so that samples are seen."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for run in runs:
        parts += [
            Text(plain(line), style="bold") for line in (f"{run.folder}  {run.state()}", run.pace())
        ]
        parts += [Text(line, style="bold red") for line in run.alarms()]
    curves = {
        title: names
        for title, names in CURVES.items()
        if any(run.series(n)[0] for run in runs for n in names)
    }
    columns = max(1, min(len(curves), width // _PLOT[0]))
    grid = Table.grid()
    most = len(curves) if height is None else columns * max(1, (height - 18) // (_PLOT[1] + 1))
    plots = [
        _plot(runs, title, names, width // columns) for title, names in list(curves.items())[:most]
    ]
    for start in range(0, len(plots), columns):
        grid.add_row(*plots[start : start + columns])
    parts.append(grid if plots else Text("waiting for the first step"))
    for run in runs:
        parts += [Text(plain(run.folder), style="bold")] * (len(runs) > 1)
        parts += [
            Text(line, no_wrap=True, overflow="ellipsis")
            for line in (*_phases(run), *_samples(run))
        ]
    return Group(*parts)


def _plot(runs: Sequence[Watched], title: str, names: Sequence[str], width: int) -> Any:
    """A plot of one metric or several, under a line with the colour and the last value of each."""
    import plotext
    from rich.text import Text

    figure = plotext.figure
    caption = Text(f" {title}", style="bold")
    figure.clear()
    figure.theme("simple")
    figure.plot_size(width, _PLOT[1])
    lines = [
        (run, name, *run.series(name)) for run in runs for name in names if run.series(name)[0]
    ]
    for (run, name, steps, values), colour in zip(lines, cycle(_COLOURS)):
        figure.draw(
            figure.signal(steps, values, marker=plotext.marker("braille", pixel=colour)).lines()
        )
        which = f"{plain(run.folder.name)} " * (len(runs) > 1) + name.partition("/")[0] * (
            len(lines) > len(runs)
        )
        caption.append(
            f" ● {which}{' ' * bool(which)}{values[-1]:.3g}".replace("  ", " "),
            style=f"not bold {colour}",
        )
    ends = sorted(
        {min(steps[0] for *_, steps, _ in lines), max(steps[-1] for *_, steps, _ in lines)}
    )
    figure.ruler("x").ticks(ends, list(map(str, ends)))
    caption.truncate(width - 1)
    plot = Text.from_ansi(figure.build().string())
    plot.rstrip()
    return caption.append("\n").append(plot)


def _phases(run: Watched) -> Iterator[str]:
    row = next((row for row in reversed(run.rows) if row.get("perf/time_step")), {})
    for phase in PHASES if row else ():
        if (seconds := row.get(f"perf/time_{phase}")) is not None:
            yield f"{phase:<11}{'█' * round(30 * seconds / row['perf/time_step']):<31}{seconds:.2f} s"


def _samples(run: Watched) -> Iterator[str]:
    for row in run.samples():
        score = row.get("score")
        scored = score if score is None else f"{score:.4g}"
        yield f"[step {row['step']}] score {scored} · label {_one_line(row['ground_truth'])}"
        for name, key in (("prompt", "input"), ("answer", "output")):
            yield f"  {name}: {_one_line(row[key][-300:])}"


def _one_line(text: object) -> str:
    return " ".join(plain(text).split())


def _may_be_a_run(folder: Path) -> bool:
    """Whether a run writes here, or may have begun to: an empty folder, or one with its lock, has no rows yet."""
    names = {path.name for path in folder.iterdir()}
    return not names or not names.isdisjoint(_OF_RUNS)


def main(argv: Sequence[str], prog: str = "lightppo watch") -> None:
    """Show the runs until Ctrl-C; exit code 2 where there is none, or a package is missing."""
    parser = CommandParser(prog, description="Watch runs in the terminal, from their files.")
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=lambda path: Path(named_run(path)),
        nargs="+",
        help="the --save_path of a run",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    args = parser.parse_args(argv)
    try:
        import plotext  # noqa: F401
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        parser.error(f"{error.name} is missing: pip install 'lightppo[watch]'")
    if missing := [run for run in args.runs if not run.is_dir()]:
        parser.error(
            f"{missing[0]}: no such folder{mistyped_path(str(missing[0]))}; give the --save_path of a run"
        )
    if others := [run for run in args.runs if not _may_be_a_run(run)]:
        parser.error(
            f"{others[0]} is no run: it has no metrics.jsonl and no run_config.yaml; give a --save_path"
        )
    runs = [Watched(run) for run in args.runs]
    console = Console()

    def look() -> Any:
        for run in runs:
            run.look()
        return frame(runs, console.width, None if args.once else console.height)

    if args.once:
        return console.print(look())
    try:
        with Live(look(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(_SECONDS)
                live.update(look(), refresh=True)
    except KeyboardInterrupt:
        pass
