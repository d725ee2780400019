"""What a rank takes of its host: its share of the cores, and memory that tensors have freed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightppo.distributed.distributed import on_cuda
from lightppo.ranks import ranks_on_node


@contextmanager
def host_shared(strategy: Any) -> Iterator[None]:
    """Once the ranks have met, each takes its share of their host. Collective."""
    yield
    share_cores(collectives_on_cpu=not on_cuda())
    if not on_cuda():
        keep_freed_memory()


def share_cores(collectives_on_cpu: bool) -> None:
    """A rank's operators take its share of the host's cores, unless OMP_NUM_THREADS says how many. Collective.

    On a GPU machine these are the optimizer steps of ``--adam_offload``.

    With ``collectives_on_cpu`` each of gloo's two threads takes one: the copies of its gathers would begin an OpenMP
    team beside the rank's own, and where a process has more of OpenMP's threads than cores, they sleep at the end of
    each operator instead of waiting for microseconds. A step takes 1.6 times as long then (docs/performance.md).
    """
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, min(threads, len(os.sched_getaffinity(0)) // ranks_on_node(1)))
    if collectives_on_cpu:
        torch.set_num_threads(1)  # a thread keeps what it finds at its first large copy
        ranks = dist.get_world_size()
        # Four gathers, which last long enough to keep both cores busy.
        own = torch.zeros(max(1 << 16, (1 << 20) // ranks))
        copies = [list(own.new_empty(ranks, len(own))) for _ in range(4)]
        for work in [dist.all_gather(of_ranks, own, async_op=True) for of_ranks in copies]:
            work.wait()
    torch.set_num_threads(threads)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Lets glibc keep up to a GiB that tensors have freed; by default it goes back to the system from 64 MiB on.

    Each micro batch would get its pages from the system anew: 165,000 in a small model's step, 5% of its time.
    Variables of the user's own (MALLOC_…, GLIBC_TUNABLES) stand; other libraries for memory have no such function.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    ):
        return
    # 32 MiB: its highest value
    for parameter, size in ((_M_TRIM_THRESHOLD, 1 << 30), (_M_MMAP_THRESHOLD, 32 << 20)):
        mallopt(parameter, size)
