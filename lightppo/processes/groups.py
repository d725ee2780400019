"""What all worker processes share: how many there are, how they end with this one, what they may answer."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from lightppo.ranks import ranks_on_node

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
MOST_BYTES = 16 << 20  # of an answer
_PR_SET_PDEATHSIG = 1


def default_processes() -> int:
    """Return how many worker processes suit this rank: its share of the available cores, from 1 to 16."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
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


def stay_at_sigterm() -> None:
    """Go on after a SIGTERM: launchers signal what ranks have started, too, while the trainer ends its step."""
    # Not ignored: programs that the user's code starts would inherit that.
    signal.signal(signal.SIGTERM, lambda *_: None)


def closer_of(owner: Any, parts: Sequence[Any]) -> weakref.finalize:
    """Return what closes these parts once: when it is called, the owner is collected, or the program ends.

    A forked child closes none of them: they are its parent's.
    """
    return weakref.finalize(owner, _close_all, parts, os.getpid())


def _close_all(parts: Sequence[Any], process: int) -> None:
    if os.getpid() == process:
        for part in parts:
            part.close()


def as_json(answer: Any, who: str) -> str:
    """Return an answer as text, with numbers and arrays of numpy and torch: the trainer unpickles nothing of a worker.

    Raises:
        TypeError: JSON cannot hold a value; ValueError: the answer is too long.
    """
    text = json.dumps(answer, default=partial(_plain, who))
    if len(text) > MOST_BYTES:
        raise ValueError(f"the answer has {len(text)} bytes")
    return text


def _plain(who: str, value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{who} cannot return {type(value).__name__} from a worker process")
