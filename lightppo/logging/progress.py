"""The line of a step, and progress bars on a terminal."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from shutil import get_terminal_size
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from lightppo.experience.experience import Experience
from lightppo.metric_names import ON_BARS, SHOWN
from lightppo.ranks import Ranks


def shown_status(status: Mapping[str, float]) -> str:
    """Return what the line of a step shows of its metrics: ``reward 0.61 · kl 0.04 · entropy 1.3 · len 3.4``."""
    shown = SHOWN | {"len": "rollout/response_length"}
    return " · ".join(
        f"{short} {round(status[name], 4) + 0.0:.3g}"
        for short, name in shown.items()
        if name in status
    )


class Pace:
    """One line per step, with the time that the last steps took and that the others will."""

    def __init__(self, start_step: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.ends = deque([(start_step, clock())], maxlen=21)  # number and end of the last steps

    def line(self, step: int, total: int | None, status: Mapping[str, float]) -> str:
        """``step 12/100 · reward 0.61 · … · 0.9 s · ETA 1:20``; the time left counts evaluations and saving too."""
        (last, before), now = self.ends[-1], self.clock()
        self.ends.append((step, now))
        first, start = self.ends[0]
        parts = [f"step {step}" if total is None else f"step {step}/{total}", shown_status(status)]
        parts.append(f"{status.get('perf/time_step', (now - before) / max(step - last, 1)):.1f} s")
        if total is not None and step > first:
            minutes, seconds = divmod(round((now - start) / (step - first) * (total - step)), 60)
            hours, minutes = divmod(minutes, 60)
            parts.append(
                f"ETA {hours}:{minutes:02}:{seconds:02}" if hours else f"ETA {minutes}:{seconds:02}"
            )
        return " · ".join(filter(None, parts))


def progress_bar(items: Iterable | None, desc: str, *, shown: bool = True, **options: Any) -> tqdm:
    """Return a bar as wide as the terminal, with numbers behind it; silent elsewhere."""
    layout = "{desc} {n_fmt}/{total_fmt} |{bar:10}| {elapsed}<{remaining}{postfix}"
    columns = get_terminal_size().columns
    return tqdm(
        items,
        desc=desc,
        ncols=columns,
        bar_format=layout,
        disable=None if shown else True,
        **options,
    )


def bar_of_steps(steps: Iterable[tuple[int, Any]], run: Any) -> Iterator[tuple[int, Any]]:
    """Yield the steps of a run, with a bar; how many there are may change with each episode."""
    shown = run.strategy.is_rank_0()
    done = run.state.global_step
    with progress_bar(None, run.unit, shown=shown, initial=done) as run.bar:
        for step in steps:
            run.bar.total = run.total_steps
            yield step
            run.bar.update()


def bar_of_part(items: Iterable, text: str, ranks: Ranks) -> Iterable:
    """Return the items of a part of a step, with a bar that goes when it ends."""
    return progress_bar(items, text, shown=ranks.is_rank_0(), leave=False)


def on_bar(status: Mapping[str, float]) -> dict[str, float]:
    """Return what a progress bar shows of a status, by the names there."""
    return {short: status[name] for short, name in ON_BARS.items() if name in status}


def minibatch_on_bar(
    samples: Sequence[Experience], statuses: Iterable[Mapping[str, float]]
) -> dict[str, float]:
    """Return the same of one optimizer step on this rank alone; a KL is the mean over tokens."""
    numbers: dict[str, list[float]] = defaultdict(list)
    for status in statuses:
        for name, value in status.items():
            numbers[name].append(value)
    means = {name: fmean(values) for name, values in numbers.items()}
    lengths = [experience.response_lengths.double() for experience in samples]
    for name in set(ON_BARS.values()) & set.intersection(*(set(e.info) for e in samples)):
        weights = torch.cat([n if name == "kl" else torch.ones_like(n) for n in lengths])
        values = torch.cat([experience.info[name].double() for experience in samples])
        means[name] = (values @ weights / weights.sum()).item()
    return on_bar(means)
