"""Metrics of a GPU's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightppo.logging.performance import GPUMemory


def test_the_largest_peak_of_all_ranks_in_each_step(monkeypatch):
    peaks = iter([(3e9, 5e9), (1e9, 5e9)])
    now = {}

    def begin() -> None:
        now["allocated"], now["reserved"] = next(peaks)

    begin()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: int(now["allocated"]))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: int(now["reserved"]))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", begin)

    def all_reduce(data: dict[str, float], op: str) -> dict[str, float]:
        assert op == "max"
        other_rank = zip(data, (2.0, 6.0))
        return {name: max(data[name], value) for name, value in other_rank}

    strategy = SimpleNamespace(device=torch.device("cuda"), all_reduce=all_reduce)
    run = SimpleNamespace(strategy=strategy)
    callback = GPUMemory()
    assert callback.on_step_end(run, 1, {}) == {
        "perf/gpu_memory_gb": 3.0,
        "perf/gpu_memory_reserved_gb": 6.0,
    }
    peaks = iter([(0, 0)])
    assert callback.on_step_end(run, 2, {})["perf/gpu_memory_gb"] == 2.0


@pytest.mark.gpu
def test_on_a_gpu():
    strategy = SimpleNamespace(device=torch.device("cuda"), all_reduce=lambda data, op: data)
    run = SimpleNamespace(strategy=strategy)
    callback = GPUMemory()
    held = torch.zeros(1_000_000_000, dtype=torch.uint8, device="cuda")
    assert callback.on_step_end(run, 1, {})["perf/gpu_memory_gb"] >= held.nbytes / 1e9
