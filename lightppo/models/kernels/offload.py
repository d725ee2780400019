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
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

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
    """Keep activations, but no weights, in CPU memory until the backward pass."""
    own_weights = OwnWeights(weights)
    offload = offload_of(device)
    if offload is None:
        return plainly(own_weights)
    return offload.around(own_weights)


class OwnWeights:
    """A model's weights, by what autograd saves of them."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._by_numel: dict[int, list[nn.Parameter]] = defaultdict(list)
        for weight in weights:
            self._by_numel[getattr(weight, "ds_numel", weight.numel())].append(weight)

    def reference(
        self, saved_tensor: Tensor
    ) -> tuple[nn.Parameter, torch.Size, tuple[int, ...]] | None:
        """Return a reference to a weight, or to a transposed view of it; None for anything else."""
        if saved_tensor.layout is not torch.strided:  # it has no memory of its own
            return None
        for weight in self._by_numel.get(saved_tensor.numel(), ()):
            if weight.data_ptr() == saved_tensor.data_ptr():
                return weight, saved_tensor.size(), saved_tensor.stride()
        return None

    @staticmethod
    def read(weight: nn.Parameter, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Return what was saved; of ZeRO-3 the weight is gathered again and perhaps elsewhere."""
        return weight.detach().as_strided(size, stride, weight.storage_offset())


def plainly(own_weights: OwnWeights) -> AbstractContextManager:
    """Copy in the order of the computation, page-locked if there is a GPU."""

    def pack(saved_tensor: Tensor) -> tuple[Any, ...]:
        if weight := own_weights.reference(saved_tensor):
            return weight
        host_copy = torch.empty_like(saved_tensor, device="cpu", pin_memory=saved_tensor.is_cuda)
        # The host does not wait, unlike in torch's save_on_cpu.
        return saved_tensor.device, host_copy.copy_(saved_tensor, non_blocking=True)

    def unpack(packed_tensor: tuple[Any, ...]) -> Tensor:
        if isinstance(packed_tensor[0], nn.Parameter):
            return own_weights.read(*packed_tensor)
        device, host_copy = packed_tensor
        return host_copy.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# -- streams ----------------------------------------------------------------------------------------------------------


class CUDAStreams:
    """A GPU, the stream that copies, and memory that it can copy from and to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copying = torch.cuda.Stream(device)

    def computing(self) -> torch.cuda.Stream:
        """Return the stream to which the next operation goes."""
        return torch.cuda.current_stream(self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Put a copy into the queue of the copying stream."""
        with torch.cuda.stream(self.copying):
            target.copy_(source, non_blocking=True)

    def host_memory(self, size: int) -> Tensor:
        """Return (size,) uint8, page-locked."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


# -- CPU memory -------------------------------------------------------------------------------------------------------


@dataclass
class Slab:
    """CPU memory that is filled from its start, and empty again when all in it is."""

    memory: Tensor
    end: int = 0
    tenants: int = 0

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
        """Return room for as many bytes."""
        slab = next((slab for slab in self.slabs if slab.fits(size)), None)
        if slab is None:
            # torch rounds page-locked memory up to powers of two
            slab = Slab(self._take(max(self._slab_size, 1 << (size - 1).bit_length())))
            self.slabs.append(slab)
        return slab, slab.place(size)


# -- activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnDevice:
    """A tensor on the device that a queued copy reads or writes: its memory must stay until that has ended."""

    tensor: Tensor
    computing: torch.cuda.Stream  # to which the memory belongs
    copied: torch.cuda.Event

    def wait(self) -> None:
        """Put what is computed from now on behind the copy."""
        self.computing.wait_event(self.copied)


class Activation:
    """A saved tensor in CPU memory, and on the device while copies run."""

    def __init__(
        self, saved_tensor: Tensor, number: int, computing: torch.cuda.Stream, memory: HostMemory
    ) -> None:
        self.number = number
        self.computing = computing
        self.size = saved_tensor.size()
        self.nbytes = saved_tensor.nbytes
        dense_strides = torch.empty_like(saved_tensor, device="meta").stride()
        # None: a view with gaps, or repeated rows; it comes back without them
        self.strides = dense_strides if dense_strides == saved_tensor.stride() else None
        self.slab, host_place = memory.place(self.nbytes)
        self.host = host_place.view(saved_tensor.dtype)  # (numel,)

    def copied(self, saved_tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return target and source of the copy: one row, the fastest copy, if the memory is dense."""
        if self.strides is None:
            return self.host.view(self.size), saved_tensor
        return self.host, saved_tensor.as_strided(self.host.shape, (1,))

    def shaped(self, row: Tensor) -> Tensor:
        """Shape (numel,) as what was saved."""
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
        streams: CUDAStreams,
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
    def around(self, own_weights: OwnWeights) -> Iterator[None]:
        """Offload a forward pass."""
        self._clear_up()
        hooks = torch.autograd.graph.saved_tensors_hooks(
            partial(self._pack, own_weights), self._unpack
        )
        try:
            with hooks:
                yield
        except BaseException:
            self._let_leave(0)  # its graph may stay with the traceback
            raise

    def on_device(self) -> int:
        """Return the bytes that are there for copies to end, or early."""
        present_numbers = {**self._leaving, **self._ahead}
        return sum(self._kept[number].nbytes for number in present_numbers)

    def _takes(self, saved_tensor: Tensor) -> bool:
        if saved_tensor.device != self.streams.device or saved_tensor.layout is not torch.strided:
            return False
        # Where rows repeat (expand), the memory is smaller than the tensor.
        nbytes = min(saved_tensor.nbytes, saved_tensor.untyped_storage().nbytes())
        return type(saved_tensor) is Tensor and nbytes >= self.smallest

    def _pack(self, own_weights: OwnWeights, saved_tensor: Tensor) -> Any:
        if weight := own_weights.reference(saved_tensor):
            return weight
        if not self._takes(saved_tensor):
            return saved_tensor
        self._clear_up()
        self._count += 1
        computing = self.streams.computing()
        activation = Activation(saved_tensor, self._count, computing, self.memory)
        target, source = activation.copied(saved_tensor)
        self.streams.copying.wait_event(computing.record_event())
        self.streams.copy(target, source)
        copied = self.streams.copying.record_event()
        self._kept[activation.number] = activation
        self._leaving[activation.number] = OnDevice(saved_tensor, computing, copied)
        self._let_leave(self.most_leaving, fewest_tensors=2)
        return Ticket(activation.number, self._gone)

    def _unpack(self, packed_tensor: Any) -> Tensor:
        if isinstance(packed_tensor, Tensor):
            return packed_tensor
        if isinstance(packed_tensor, tuple):
            return OwnWeights.read(*packed_tensor)
        self._clear_up()
        activation = self._kept[packed_tensor.number]
        computing = self.streams.computing()
        if leaving := self._leaving.get(activation.number):
            saved_tensor = leaving.tensor
        else:
            self._let_leave(0)
            back = self._ahead.pop(activation.number, None) or self._bring(activation, computing)
            computing.wait_event(back.copied)
            saved_tensor = activation.shaped(back.tensor)
        self._bring_ahead(activation.number, computing)
        return saved_tensor

    def _bring(self, activation: Activation, computing: torch.cuda.Stream) -> OnDevice:
        target = torch.empty(
            activation.host.shape, dtype=activation.host.dtype, device=self.streams.device
        )
        # Work in this stream may have used this memory until now.
        self.streams.copying.wait_event(computing.record_event())
        self.streams.copy(target, activation.host)
        return OnDevice(target, computing, self.streams.copying.record_event())

    def _bring_ahead(self, number: int, computing: torch.cuda.Stream) -> None:
        """Bring what was kept before: the backward pass reads it next."""
        nbytes = sum(self._kept[ahead_number].nbytes for ahead_number in self._ahead)
        for activation in reversed(self._kept.values()):
            is_on_device = activation.number in self._leaving or activation.number in self._ahead
            if activation.number >= number or is_on_device or activation.computing != computing:
                continue
            if nbytes and nbytes + activation.nbytes > self.most_ahead:
                return
            self._ahead[activation.number] = self._bring(activation, computing)
            nbytes += activation.nbytes

    def _let_leave(self, most_bytes: int, fewest_tensors: int = 0) -> None:
        """Free the oldest ones' memory for what is computed behind their copies."""
        nbytes = sum(self._kept[number].nbytes for number in self._leaving)
        while len(self._leaving) > fewest_tensors and nbytes > most_bytes:
            number = next(iter(self._leaving))
            nbytes -= self._kept[number].nbytes
            self._leaving.pop(number).wait()

    def _clear_up(self) -> None:
        """Give back what activations had that nobody can read any more."""
        while self._gone:
            number = self._gone.popleft()
            for device_copy in (self._leaving.pop(number, None), self._ahead.pop(number, None)):
                if device_copy is not None:
                    device_copy.wait()
            self._kept.pop(number).slab.leave()


# -- which of the two -------------------------------------------------------------------------------------------------


@cache  # once per process: it takes CPU memory, and looks whether it is right
def offload_of(device: torch.device) -> ActivationOffload | None:
    """Return that of a GPU; None where activations are copied plainly."""
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


def is_exact(offload: ActivationOffload, row_count: int = 1024, layer_count: int = 8) -> bool:
    """Tell whether gradients of a few layers are the same to the last bit; all leave early and come back late."""
    device = offload.streams.device
    generator = torch.Generator(device).manual_seed(0)
    shape = layer_count, row_count, row_count
    weights = [
        nn.Parameter(weight / row_count**0.5)
        for weight in torch.randn(shape, generator=generator, device=device)
    ]

    def gradients(hooks: AbstractContextManager) -> list[Tensor]:
        hidden = weights[0].detach() * row_count**0.5
        with hooks:
            for weight in weights:
                hidden = hidden + silu(hidden @ weight)
            loss = hidden.square().mean()
        return list(torch.autograd.grad(loss, weights))

    previous_bounds = offload.smallest, offload.most_leaving, offload.most_ahead
    offload.smallest = 1
    offload.most_leaving = 0
    offload.most_ahead = 0
    try:
        with torch.enable_grad():
            plain_gradients = gradients(nullcontext())
            # Twice, because the second pass uses the places of the first.
            offloaded_gradients = [gradients(offload.around(OwnWeights(weights))) for _ in range(2)]
    finally:
        offload.smallest, offload.most_leaving, offload.most_ahead = previous_bounds
    return all(
        torch.equal(gradient, expected)
        for turn in offloaded_gradients
        for gradient, expected in zip(turn, plain_gradients)
    )
