"""Tensors as bytes: a header in JSON and one block for several of them. Knows no connection."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 32 << 20
"""Tensors that travel together; a larger one travels alone."""

_ALIGNED = 16  # bytes; a view of another type must begin at a multiple of its size


class Bucket:
    """Tensors that travel together.

    Args:
        tensors: names and tensors, of any types and shapes.
    """

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._tensors = [(name, tensor.detach()) for name, tensor in tensors]
        self._places, self._bytes = [], 0
        for _, tensor in self._tensors:
            self._places.append(self._bytes)
            self._bytes += math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED
        self._payloads: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def header(self) -> bytes:
        """JSON: name, type, shape and place of each."""
        described = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), place]
            for (name, tensor), place in zip(self._tensors, self._places)
        ]
        return json.dumps(described).encode()

    def payload(self, device: torch.device) -> Tensor:
        """All bytes, uint8, on a device; made once for all receivers."""
        if device not in self._payloads:
            packed = torch.empty(self._bytes, dtype=torch.uint8, device=device)
            for (_, tensor), place in zip(self._tensors, self._places):
                packed[place : place + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
            self._payloads[device] = packed
        return self._payloads[device]


def buckets(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Tensors in buckets of up to ``BUCKET_BYTES``, one tensor at least, in their order."""
    held: list[tuple[str, Tensor]] = []
    held_bytes = 0
    for name, tensor in tensors:
        if held and held_bytes + tensor.nbytes > BUCKET_BYTES:
            yield Bucket(held)
            held, held_bytes = [], 0
        held.append((name, tensor))
        held_bytes += tensor.nbytes
    if held:
        yield Bucket(held)


def unpacked(header: bytes, payload: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of its bytes.

    Raises:
        ValueError: the header is none, or does not fit the bytes.
    """
    try:
        for name, dtype_name, shape, place in json.loads(header):
            dtype = getattr(torch, dtype_name)
            n_bytes = math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or not 0 <= place <= place + n_bytes <= payload.numel():
                raise ValueError(f"{name} is not within the {payload.numel()} bytes that came")
            yield name, payload[place : place + n_bytes].view(dtype).view(shape)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"the header that came is none: {error}") from error
