"""Processes that this rank starts: how many, and how they end with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from lightppo.ranks import ranks_on_node

_PR_SET_PDEATHSIG = 1


def default_processes() -> int:
    """Return how many worker processes suit this rank: its share of the available cores, from 1 to 16."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(max(cores // ranks_on_node(1), 1), 16)


def end_with(parent: int | None) -> None:
    """Have the kernel kill this process when the thread that started it ends; ``None``: not any more.

    Without the parent, which may have ended already, this process ends at once.
    """
    if sys.platform == "linux":
        ending = 0 if parent is None else signal.SIGKILL
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ending)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
