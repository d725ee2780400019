"""How much of a GPU's memory each step took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightppo.callbacks import Callback


class GPUMemory(Callback):
    """The most memory that a rank's tensors had in the step, and the most that torch held for them."""

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        peaks = {
            "perf/gpu_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
            "perf/gpu_memory_reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        }
        torch.cuda.reset_peak_memory_stats()
        return run.strategy.all_reduce(peaks, op="max")


def gpu_memory(run: Any) -> GPUMemory | None:
    """Where the run is on GPUs."""
    return GPUMemory() if run.strategy.device.type == "cuda" else None
