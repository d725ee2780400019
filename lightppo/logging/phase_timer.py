"""Seconds of the phases of a step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lightppo.logging.step_metrics import Phases
from lightppo.ranks import heartbeat


@dataclass
class PhaseTimer(Phases):
    """Seconds per phase of a step; on a GPU between two marks in its stream, so that no phase waits for it."""

    passed: list[tuple[str, Any, Any]] = field(default_factory=list)  # phase, start and end

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        # CUDA marks take memory of the GPU, so a run on the CPU of a GPU machine uses the clock.
        now = _mark if torch.cuda.is_initialized() else time.perf_counter
        start = now()
        with torch.profiler.record_function(phase), heartbeat.during(phase):  # its name in a trace
            yield
        self.passed.append((phase, start, now()))

    def reset(self) -> dict[str, float]:
        """The seconds since the last reset, as ``time_<phase>``. Waits for a GPU."""
        passed, self.passed, seconds = self.passed, [], Counter()
        for phase, start, end in passed:
            if not isinstance(end, float):
                end.synchronize()
            seconds[f"time_{phase}"] += (
                end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
            )
        return dict(seconds)


def _mark() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark
