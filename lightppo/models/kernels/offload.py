"""``--activation_offload``: what the backward pass needs waits in CPU memory, on a GPU by a stream of copies.

Two queues work at a time: the compute stream, and one stream that copies. They wait for each other by events:

- a copy to the CPU begins when the activation is there; its memory on the GPU is kept until the copy has ended;
- a copy back begins when the compute stream no longer uses the memory that it goes to; what needs it waits for its end.

The host waits for neither. CPU memory needs no event: copies follow one another in one stream, so that a place which is
free again is read before it is written.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from lightppo.errors import ModelLoadError

logger = logging.getLogger(__name__)

SMALLEST = 1 << 18  # bytes: less stays where it is
LEAVING = 1 << 29  # bytes on the GPU whose copies to the CPU need not have ended
AHEAD = 1 << 28  # bytes that come back before they are needed
SLAB = 1 << 28  # bytes of CPU memory that are taken at once
ALIGNED = 256  # places in a slab are multiples of this


def offload_activations(model: Any, device: torch.device) -> None:
    """Have passes with gradients of a :class:`~lightppo.models.wrapper.PretrainedWrapper` keep activations on the CPU."""
    if device.type == "cpu":
        raise ModelLoadError(
            "--activation_offload moves activations off a GPU, and there is no GPU: leave it out"
        )
    model.around_pass = offloading


def offloading(weights: Iterable[nn.Parameter], device: torch.device) -> AbstractContextManager:
    """In it, activations but no weights are kept in CPU memory until the backward pass."""
    own = OwnWeights(weights)
    offload = offload_of(device)
    if offload is None:
        return plainly(own)
    return offload.around(own)


class OwnWeights:
    """A model's weights, by what autograd saves of them."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._by_numel: dict[int, list[nn.Parameter]] = defaultdict(list)
        for weight in weights:
            self._by_numel[getattr(weight, "ds_numel", weight.numel())].append(weight)

    def reference(self, saved: Tensor) -> tuple[nn.Parameter, torch.Size, tuple[int, ...]] | None:
        """To a weight, or a transposed view of it; None for anything else."""
        if saved.layout is not torch.strided:  # it has no memory of its own
            return None
        for weight in self._by_numel.get(saved.numel(), ()):
            if weight.data_ptr() == saved.data_ptr():
                return weight, saved.size(), saved.stride()
        return None

    @staticmethod
    def read(weight: nn.Parameter, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """What was saved; of ZeRO-3 the weight is gathered again and perhaps elsewhere."""
        return weight.detach().as_strided(size, stride, weight.storage_offset())


def plainly(own: OwnWeights) -> AbstractContextManager:
    """Copies in the order of the computation, page-locked if there is a GPU."""

    def pack(saved: Tensor) -> tuple[Any, ...]:
        if weight := own.reference(saved):
            return weight
        kept = torch.empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
        # The host does not wait, unlike in torch's save_on_cpu.
        return saved.device, kept.copy_(saved, non_blocking=True)

    def unpack(packed: tuple[Any, ...]) -> Tensor:
        if isinstance(packed[0], nn.Parameter):
            return own.read(*packed)
        device, kept = packed
        return kept.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# -- streams ----------------------------------------------------------------------------------------------------------


class Stream(Protocol):
    """What is used of ``torch.cuda.Stream``."""

    def record_event(self) -> Any: ...

    def wait_event(self, event: Any) -> None: ...


class Streams(Protocol):
    """A device, the stream that copies, and memory that it can copy from and to."""

    device: torch.device
    copying: Stream

    def computing(self) -> Stream:
        """The stream to which the next operation goes."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Put a copy into the queue of the copying stream."""

    def host_memory(self, size: int) -> Tensor:
        """(size,) uint8, page-locked."""


class CUDAStreams:
    """The :class:`Streams` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copying = torch.cuda.Stream(device)

    def computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.copying):
            target.copy_(source, non_blocking=True)

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


# -- CPU memory -------------------------------------------------------------------------------------------------------


class Slab:
    """CPU memory that is filled from its start, and empty again when all in it is."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.end = 0
        self.tenants = 0

    def fits(self, size: int) -> bool:
        return self.end + size <= len(self.memory)

    def place(self, size: int) -> Tensor:
        start = self.end
        self.end += -(-size // ALIGNED) * ALIGNED
        self.tenants += 1
        return self.memory[start : start + size]

    def leave(self) -> None:
        self.tenants -= 1
        if not self.tenants:
            self.end = 0


class HostMemory:
    """Slabs that stay: a training step takes none that the largest one before it did not need."""

    def __init__(self, take: Callable[[int], Tensor], slab_size: int) -> None:
        self._take = take
        self._slab_size = slab_size
        self.slabs: list[Slab] = []

    def place(self, size: int) -> tuple[Slab, Tensor]:
        """Room for as many bytes."""
        slab = next((slab for slab in self.slabs if slab.fits(size)), None)
        if slab is None:
            # torch rounds page-locked memory up to powers of two
            slab = Slab(self._take(max(self._slab_size, 1 << (size - 1).bit_length())))
            self.slabs.append(slab)
        return slab, slab.place(size)


# -- activations ------------------------------------------------------------------------------------------------------


class OnDevice:
    """A tensor on the device that a queued copy reads or writes: its memory must stay until that has ended."""

    def __init__(self, tensor: Tensor, computing: Stream, copied: Any) -> None:
        self.tensor = tensor
        self.computing = computing  # to which the memory belongs
        self.copied = copied

    def wait(self) -> None:
        """What is computed from now on comes after the copy."""
        self.computing.wait_event(self.copied)


class Activation:
    """A saved tensor in CPU memory, and on the device while copies run."""

    def __init__(self, saved: Tensor, number: int, computing: Stream, memory: HostMemory) -> None:
        self.number = number
        self.computing = computing
        self.size = saved.size()
        self.nbytes = saved.nbytes
        dense = torch.empty_like(saved, device="meta").stride()
        # None: a view with gaps, or repeated rows; it comes back without them
        self.strides = dense if dense == saved.stride() else None
        self.slab, place = memory.place(self.nbytes)
        self.host = place.view(saved.dtype)  # (numel,)

    def copied_to(self) -> Tensor:
        """The place in CPU memory, in the shape of :meth:`copied_from`."""
        if self.strides is None:
            return self.host.view(self.size)
        return self.host

    def copied_from(self, saved: Tensor) -> Tensor:
        """All of its memory as one row, if it is dense: the fastest copy."""
        if self.strides is None:
            return saved
        return saved.as_strided(self.host.shape, (1,))

    def shaped(self, row: Tensor) -> Tensor:
        """(numel,) as what was saved."""
        if self.strides is None:
            return row.view(self.size)
        return row.as_strided(self.size, self.strides)


class Ticket:
    """What autograd keeps in the place of an activation."""

    def __init__(self, number: int, gone: deque[int]) -> None:
        self.number = number
        self._gone = gone

    def __del__(self) -> None:
        # This may run at any time, in any thread. So it only leaves a note, and the next activation clears up.
        self._gone.append(self.number)


class ActivationOffload:
    """Keeps activations of a device in CPU memory; they are copied while the device computes.

    The device holds at most ``leaving`` bytes (or two activations) whose copies need not have ended, and ``ahead``
    bytes (or one activation) that are back early. CPU memory that was taken once stays with the process.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        smallest: int = SMALLEST,
        leaving: int = LEAVING,
        ahead: int = AHEAD,
        slab: int = SLAB,
    ) -> None:
        self.streams = streams
        self.memory = HostMemory(streams.host_memory, slab)
        self.smallest = max(smallest, 1)
        self.most_leaving = leaving
        self.most_ahead = ahead
        self._count = 0
        self._kept: dict[int, Activation] = {}  # by number, the newest last
        self._leaving: dict[int, OnDevice] = {}
        self._ahead: dict[int, OnDevice] = {}
        self._gone: deque[int] = deque()

    @contextmanager
    def around(self, own: OwnWeights) -> Iterator[None]:
        """A forward pass."""
        self._clear_up()
        hooks = torch.autograd.graph.saved_tensors_hooks(partial(self._pack, own), self._unpack)
        try:
            with hooks:
                yield
        except BaseException:
            self._let_leave(0)  # its graph may stay with the traceback
            raise

    def on_device(self) -> int:
        """Bytes that are there for copies to end, or early."""
        kept = {**self._leaving, **self._ahead}
        return sum(self._kept[number].nbytes for number in kept)

    def _takes(self, saved: Tensor) -> bool:
        if saved.device != self.streams.device or saved.layout is not torch.strided:
            return False
        # Where rows repeat (expand), the memory is smaller than the tensor.
        nbytes = min(saved.nbytes, saved.untyped_storage().nbytes())
        return type(saved) is Tensor and nbytes >= self.smallest

    def _pack(self, own: OwnWeights, saved: Tensor) -> Any:
        if weight := own.reference(saved):
            return weight
        if not self._takes(saved):
            return saved
        self._clear_up()
        self._count += 1
        computing = self.streams.computing()
        activation = Activation(saved, self._count, computing, self.memory)
        target = activation.copied_to()
        source = activation.copied_from(saved)
        self.streams.copying.wait_event(computing.record_event())
        self.streams.copy(target, source)
        copied = self.streams.copying.record_event()
        self._kept[activation.number] = activation
        self._leaving[activation.number] = OnDevice(saved, computing, copied)
        self._let_leave(self.most_leaving, fewest=2)
        return Ticket(activation.number, self._gone)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, tuple):
            return OwnWeights.read(*packed)
        self._clear_up()
        activation = self._kept[packed.number]
        computing = self.streams.computing()
        if leaving := self._leaving.get(activation.number):
            saved = leaving.tensor
        else:
            self._let_leave(0)
            back = self._ahead.pop(activation.number, None) or self._bring(activation, computing)
            computing.wait_event(back.copied)
            saved = activation.shaped(back.tensor)
        self._bring_ahead(activation.number, computing)
        return saved

    def _bring(self, activation: Activation, computing: Stream) -> OnDevice:
        target = torch.empty(
            activation.host.shape, dtype=activation.host.dtype, device=self.streams.device
        )
        # Work in this stream may have used this memory until now.
        self.streams.copying.wait_event(computing.record_event())
        self.streams.copy(target, activation.host)
        return OnDevice(target, computing, self.streams.copying.record_event())

    def _bring_ahead(self, number: int, computing: Stream) -> None:
        """What was kept before is what the backward pass reads next."""
        nbytes = sum(self._kept[each].nbytes for each in self._ahead)
        for activation in reversed(self._kept.values()):
            here = activation.number in self._leaving or activation.number in self._ahead
            if activation.number >= number or here or activation.computing != computing:
                continue
            if nbytes and nbytes + activation.nbytes > self.most_ahead:
                return
            self._ahead[activation.number] = self._bring(activation, computing)
            nbytes += activation.nbytes

    def _let_leave(self, most: int, fewest: int = 0) -> None:
        """The oldest ones give up their memory, which is for what is computed behind their copies."""
        nbytes = sum(self._kept[number].nbytes for number in self._leaving)
        while len(self._leaving) > fewest and nbytes > most:
            number = next(iter(self._leaving))
            nbytes -= self._kept[number].nbytes
            self._leaving.pop(number).wait()

    def _clear_up(self) -> None:
        """Give back what activations had that nobody can read any more."""
        while self._gone:
            number = self._gone.popleft()
            for there in (self._leaving.pop(number, None), self._ahead.pop(number, None)):
                if there is not None:
                    there.wait()
            self._kept.pop(number).slab.leave()


# -- which of the two -------------------------------------------------------------------------------------------------


@cache  # once per process: it takes CPU memory, and looks whether it is right
def offload_of(device: torch.device) -> ActivationOffload | None:
    """That of a GPU; None where activations are copied plainly."""
    if device.type != "cuda":
        return None
    offload = ActivationOffload(CUDAStreams(device))
    if is_exact(offload):
        return offload
    logger.warning(
        "--activation_offload copies in the order of the computation, which takes longer: on %s a stream of copies "
        "gave other gradients",
        torch.cuda.get_device_name(device),
    )
    return None


def is_exact(offload: ActivationOffload, rows: int = 1024, layers: int = 8) -> bool:
    """Whether gradients of a few layers are those without it, to the last bit; all leave early and come back late."""
    device = offload.streams.device
    generator = torch.Generator(device).manual_seed(0)
    shape = layers, rows, rows
    weights = [
        nn.Parameter(weight / rows**0.5)
        for weight in torch.randn(shape, generator=generator, device=device)
    ]

    def gradients(around: AbstractContextManager) -> list[Tensor]:
        hidden = weights[0].detach() * rows**0.5
        with around:
            for weight in weights:
                hidden = hidden + silu(hidden @ weight)
            loss = hidden.square().mean()
        return list(torch.autograd.grad(loss, weights))

    bounds = offload.smallest, offload.most_leaving, offload.most_ahead
    offload.smallest = 1
    offload.most_leaving = 0
    offload.most_ahead = 0
    try:
        with torch.enable_grad():
            plain = gradients(nullcontext())
            # Twice, because the second pass uses the places of the first.
            turns = [gradients(offload.around(OwnWeights(weights))) for _ in range(2)]
    finally:
        offload.smallest, offload.most_leaving, offload.most_ahead = bounds
    return all(torch.equal(one, other) for turn in turns for one, other in zip(turn, plain))
