"""Simulated ranks: threads whose ``all_reduce_sum`` really waits for the others and sums."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

RankFn = Callable[[int, Callable[[Tensor], Tensor]], Any]


@pytest.fixture
def simulate_ranks() -> Callable[[int, RankFn], list[Any]]:
    """``simulate_ranks(world, fn)`` runs ``fn(rank, all_reduce_sum)`` on every rank and returns the results by rank."""

    def run(world: int, fn: RankFn) -> list[Any]:
        barrier = threading.Barrier(world, timeout=120)
        slots: list[Tensor | None] = [None] * world

        def all_reduce_sum(rank: int, tensor: Tensor) -> Tensor:
            slots[rank] = tensor.detach().clone()
            barrier.wait()
            total = sum(slots[1:], start=slots[0])
            barrier.wait()
            return total

        with ThreadPoolExecutor(world) as pool:
            futures = [pool.submit(fn, rank, lambda t, rank=rank: all_reduce_sum(rank, t)) for rank in range(world)]
            return [future.result() for future in futures]

    return run
