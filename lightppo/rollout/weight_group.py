"""A process group for one push of weights, beside the default one of torch.distributed, which is never touched."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

CONNECT_SECONDS = 30.0
"""For those that have met already."""

_GRACE_SECONDS = 60.0  # NCCL's own time-out comes after ours


class PushGroup:
    """Broadcasts from rank 0, which do not block.

    Args:
        store: where all its members are.
        rank: of this process.
        size: of the group.
        backend: "gloo" or "nccl".
        device: of this process; with gloo tensors go through CPU memory whatever it is.
        address: of this machine; gloo listens there and nowhere else.
        seconds: how long each operation may last.

    Attributes:
        device: where tensors have to be.

    Raises:
        RuntimeError: as of every method: a connection failed, or a time-out.
    """

    def __init__(
        self, store: Any, rank: int, size: int, backend: str, device: torch.device, address: str, seconds: float
    ) -> None:
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._limit = timedelta(seconds=seconds)
        self._under_way: list[tuple[Any, Tensor]] = []
        place = distributed.PrefixStore("group", store)
        if backend == "nccl":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=seconds + _GRACE_SECONDS)
            # NCCL's watchdog would end the trainer when a server dies; here that server is lost, and no more.
            with _variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), self._on_device():
                self._group: Any = distributed.ProcessGroupNCCL(place, rank, size, options)
        else:
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=min(CONNECT_SECONDS, seconds))
            self._group = distributed.ProcessGroupGloo(place, rank, size, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Begins to send it from rank 0, or to fill it elsewhere. An empty one is left out."""
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        options.timeout = self._limit
        if tensor.numel():
            tensor = tensor.to(self.device)
            with self._on_device():
                self._under_way.append((self._group.broadcast([tensor], options), tensor))

    def is_done(self) -> bool:
        """Whether everything that was begun has ended well."""
        if not all(work.is_completed() for work, _ in self._under_way):
            return False
        for work, _ in self._under_way:
            if self.device.type == "cuda" and not work.is_success():  # NCCL's wait would not say so
                raise RuntimeError("NCCL failed; NCCL_DEBUG=WARN in the environment of both sides says more")
            work.wait()
        self._under_way.clear()
        return True

    def close(self) -> None:
        """Ends the group, without waiting for what is under way. It may be called again."""
        held = [self._group, self._under_way]
        is_hanging = not all(work.is_completed() for work, _ in self._under_way)
        self._group, self._under_way = None, []
        if self.device.type == "cuda" and held[0] is not None:
            held[0].abort()
        elif is_hanging:
            # gloo's end waits for its operations, which end at their time-outs if the other side hangs
            threading.Thread(target=held.clear, name="weight-group", daemon=True).start()

    def _on_device(self) -> Any:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def gpu_of(device: torch.device) -> str | None:
    """Which GPU that is, the same in all processes; ``None`` where NCCL cannot be used."""
    if device.type != "cuda" or not distributed.is_nccl_available():
        return None
    number = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if number is None else str(number)


def backend_of(gpus: list[str | None]) -> str:
    """NCCL where every member has a GPU of its own, for it refuses two on one; otherwise gloo."""
    return "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """An environment variable for as long as the block lasts."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
