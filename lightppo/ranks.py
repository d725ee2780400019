"""What a part needs of the ranks, for a single process; and what a process is at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from lightppo.redaction import without_secrets

T = TypeVar("T")


def ranks_on_node(otherwise: int) -> int:
    """Return how many ranks share this host, as the launcher says: torchrun by LOCAL_WORLD_SIZE, deepspeed by LOCAL_SIZE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or otherwise)


def cores_of_rank() -> int:
    """Return this rank's share of the available cores, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(cores // ranks_on_node(1), 1)


class Ranks:
    """One rank among others: here the only one, whose collectives return their argument.

    Strategies have the same methods. Every one but ``get_rank``, ``is_rank_0`` and ``print`` is collective.
    """

    device: Any  # where the tensors of this rank live
    # those that hold a row together, see ``distributed.sequence_parallel``; None: each rank has rows of its own
    sequence_group: Any | None = None
    together: AbstractContextManager = nullcontext()  # of experience and training: it is the group

    def __init__(self, device: Any = "cpu") -> None:
        self.device = device

    @property
    def world_size(self) -> int:
        return 1

    @property
    def data_parallel(self) -> Ranks:
        """Return those that train on different rows: sequence groups, or the ranks themselves."""
        return self

    def get_rank(self) -> int:
        return 0

    def is_rank_0(self) -> bool:
        """Tell whether this is the rank that prints, logs and writes."""
        return self.get_rank() == 0

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Reduce a tensor, a number or a dictionary of them; ``op`` is mean, sum, max or min."""
        return data

    def all_gather(self, data: Any) -> Any:
        """Concatenate tensors along their first dimension, which may differ, in rank order."""
        return data

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Collect a picklable object from every rank, in rank order."""
        return [obj]

    def gather_object(self, obj: Any) -> list[Any] | None:
        """Do the same for rank 0 alone: what only it writes need not travel to the others, which get ``None``."""
        return [obj]

    def exchange_objects(self, parts: Mapping[int, Any]) -> list[Any]:
        """Send each rank (a key) its own picklable object; return what came here, in the senders' order."""
        return list(parts.values())

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s object on every rank."""
        return obj

    def same_count(self, count: int) -> int:
        """Return the largest ``count`` of all ranks: how often each must run a collective."""
        return count

    def on_rank_0(self, action: Callable[[], T], what: str) -> T:
        """Return what ``action`` returns on rank 0; if it fails, every rank raises."""
        return action()

    def barrier(self) -> None:
        pass

    def print(self, *parts: Any) -> None:
        """Print on rank 0."""
        print(*(without_secrets(str(part)) for part in parts), flush=True)


Alone = Ranks  # where it is said that there is one rank


class Heartbeat:
    """What this process is at and whether it moves: the parts tell, ``trainer.watchdog`` looks."""

    def __init__(self) -> None:
        # signs of life: a micro batch, a decoding step, a scored sample, a collective that ended
        self.beats = 0
        self.phase = "start"
        self.phases = 0  # begun so far, by all ranks in the same order
        self.step = 0
        # seconds without a sign of life that are a hang; None: ranks have not met
        self.limit: float | None = None

    def beat(self) -> None:
        self.beats += 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        previous_phase = self.phase
        self.phase = phase
        self.phases += 1
        try:
            yield
        finally:
            self.phase = previous_phase
            self.beats += 1


heartbeat = Heartbeat()  # of this process

stop_signs: list[Callable[[], object]] = []  # each says whether this process is asked to stop


def asked_to_stop() -> bool:
    """Tell whether something, such as a signal, asks this process to stop."""
    return any(sign() for sign in stop_signs)


def level(parts: Sequence[T], ranks: Ranks, filler: Callable[[], T]) -> list[T]:
    """Return fillers, then this rank's parts: equally many on every rank, so that collectives match. Collective."""
    return [*(filler() for _ in range(ranks.same_count(len(parts)) - len(parts))), *parts]
