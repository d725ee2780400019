"""Streams without a GPU: copies run as late as they may, so that a wait that is missing gives wrong numbers."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Computed:
    """An event of the compute stream: as many operations had been queued."""

    clock: int


@dataclass(frozen=True)
class Copied:
    """An event of the copying stream: as many copies had been queued."""

    copies: int


class _Pending:
    """A queued copy. It keeps nothing on the device alive, as a queued kernel does not."""

    def __init__(self, target: Tensor, source: Tensor, to_host: bool, too_early: bool) -> None:
        near = source if to_host else target
        self.host = target if to_host else source
        self.to_host = to_host
        self.too_early = too_early
        self.weak = StorageWeakRef(near.untyped_storage())
        self.kind = near.dtype
        self.view = near.storage_offset(), near.size(), near.stride()

    def near(self) -> Tensor | None:
        if self.weak.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return torch.empty(0, dtype=self.kind).set_(storage, *self.view)


class LateStreams(TorchDispatchMode):
    """``Streams`` of the CPU. The computation runs at once; a copy runs when the compute stream waits for its end.

    Inside the context all operations are counted: a copy that was queued without a wait for the newest one copies
    garbage, as does one whose tensor on the device is gone. ``wrongs`` says what happened.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0
        self.quiet = False
        self.slabs: list[Tensor] = []
        self.pending: list[_Pending] = []
        self.begun: list[int] = []  # of each copy, the clock when it was queued
        self.run = 0
        self.wrongs: list[str] = []
        self.counts: Counter[str] = Counter()
        self.head_starts: list[
            int
        ] = []  # of each copy back, the operations before it was waited for
        self.left_out: tuple[str, int] | None = None  # the line whose wait does nothing
        self.lines: set[tuple[str, int]] = set()  # that wait
        self.compute = _Compute(self)
        self.copying = _Copying(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.clock += not self.quiet
        return func(*args, **(kwargs or {}))

    def computing(self) -> _Compute:
        return self.compute

    def host_memory(self, size: int) -> Tensor:
        self.counts["taken"] += 1
        self.slabs.append(torch.zeros(size, dtype=torch.uint8))
        return self.slabs[-1]

    def copy(self, target: Tensor, source: Tensor) -> None:
        to_host = any(_place(target) == _place(slab) for slab in self.slabs)
        self.counts["to the CPU" if to_host else "back"] += 1
        too_early = self.copying.seen < self.clock
        self.pending.append(_Pending(target, source, to_host, too_early))
        self.begun.append(self.clock)
        if not to_host:
            self._spoil(target)  # what stood there

    def run_until(self, copies: int) -> None:
        """The first ``copies`` of all copies."""
        self.quiet = True
        with torch.no_grad():
            while self.run < copies:
                self._run(self.pending[self.run])
                self.run += 1
        self.quiet = False

    def finish(self) -> list[str]:
        """Runs what is left; what went wrong."""
        self.run_until(len(self.pending))
        return self.wrongs

    def _run(self, copy: _Pending) -> None:
        near = copy.near()
        target, source = (copy.host, near) if copy.to_host else (near, copy.host)
        if near is not None and not copy.too_early:
            target.copy_(source)
            return
        if target is not None:
            self._spoil(target)
        direction = "to the CPU" if copy.to_host else "back"
        self.wrongs.append(
            f"memory was given away before a copy {direction} had ended"
            if near is None
            else f"a copy {direction} did not wait for the computation"
        )

    def _spoil(self, tensor: Tensor) -> None:
        quiet, self.quiet = self.quiet, True
        with torch.no_grad():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        self.quiet = quiet

    def leaves_out(self) -> bool:
        """Whether the wait that is asked for is the one left out."""
        frame = sys._getframe(2)
        line = frame.f_code.co_name, frame.f_lineno
        if line[0] == "wait":  # a helper: its caller is what counts
            line = frame.f_back.f_code.co_name, frame.f_back.f_lineno
        self.lines.add(line)
        return line == self.left_out


class _Compute:
    def __init__(self, streams: LateStreams) -> None:
        self.streams = streams

    def record_event(self) -> Computed:
        return Computed(self.streams.clock)

    def wait_event(self, event: Copied) -> None:
        streams = self.streams
        if streams.leaves_out():
            return
        newest = event.copies - 1
        if newest >= streams.run and not streams.pending[newest].to_host:
            streams.head_starts.append(streams.clock - streams.begun[newest])
        streams.run_until(event.copies)


class _Copying:
    def __init__(self, streams: LateStreams) -> None:
        self.streams = streams
        self.seen = -1

    def record_event(self) -> Copied:
        return Copied(len(self.streams.pending))

    def wait_event(self, event: Computed) -> None:
        if not self.streams.leaves_out():
            self.seen = max(self.seen, event.clock)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
