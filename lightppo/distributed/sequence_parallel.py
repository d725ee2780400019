"""``--sequence_parallel_size``: the ranks that hold a micro batch together, and those that hold different ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightppo.ranks import Ranks

T = TypeVar("T")


@dataclass
class SequenceGroup:
    """Ranks that hold a packed row together, a piece of its positions each.

    As a context: in it they hold the same rows, models run pieces of them, and a loss is one that all of them have made.
    Outside, each rank runs rows of its own, as while sampling.
    """

    size: int
    rank: int  # of the group, the number of its piece
    group: dist.ProcessGroup
    is_active: bool = field(default=False, init=False)

    def __enter__(self) -> Self:
        self.is_active = True
        return self

    def __exit__(self, *error: object) -> None:
        self.is_active = False

    @classmethod
    def of_rank(cls, size: int, timeout: timedelta) -> SequenceGroup:
        """Join the group of this rank, of ``size`` neighbours. Collective over all ranks."""
        groups = [
            dist.new_group(range(first, first + size), timeout=timeout)
            for first in range(0, dist.get_world_size(), size)
        ]
        number, rank = divmod(dist.get_rank(), size)
        return cls(size, rank, groups[number])

    def to_heads(self, *states: Tensor) -> list[Tensor]:
        """Exchange positions for heads: each (1, H, T / S, D) of all heads -> (1, H' / S, T, D) of all positions.

        Heads of keys are repeated where there are fewer than ranks: H' is the least multiple of H that S divides.
        All go in one message, as on short pieces the number of messages is what takes time.
        """
        parts = []  # of each: (S, H' / S, T / S, D)
        for state in states:
            heads = state.shape[1]
            state = state.repeat_interleave(math.lcm(heads, self.size) // heads, 1)
            parts.append(state[0].unflatten(0, (self.size, -1)))
        joined = torch.cat([part.flatten(1) for part in parts], 1)
        received = _AllToAll.apply(joined, self.group)  # the same, of each piece
        lengths = [part[0].numel() for part in parts]
        return [
            of_pieces.view(part.shape).transpose(0, 1).flatten(1, 2)[None]
            for of_pieces, part in zip(received.split(lengths, 1), parts)
        ]

    def to_positions(self, states: Tensor) -> Tensor:
        """Exchange heads for positions: (1, T, H / S, D) -> (1, T / S, H, D)."""
        parts = states[0].unflatten(0, (self.size, -1))  # (S, T / S, H / S, D)
        parts = _AllToAll.apply(parts, self.group)  # the same, of the heads of each rank
        return parts.transpose(0, 1).flatten(1, 2)[None]

    def sum_of_pieces(self, values: Tensor) -> Tensor:
        """Add up what is 0 but for this rank's piece. The gradient of each piece stays on its rank."""
        return _SumOfPieces.apply(values, self.group)

    def joined_pieces(self, values: Tensor) -> Tensor:
        """Return (T / S, …) of each piece, one behind the other, (T, …); without gradient. Collective in the group."""
        pieces = values.new_empty(self.size, *values.shape)
        dist.all_gather_into_tensor(
            pieces.flatten(0, 1).view(torch.uint8), values.view(torch.uint8), group=self.group
        )
        return pieces.flatten(0, 1)

    def gather_object(self, obj: T) -> list[T]:
        """Return a picklable object of every rank of the group, in order. Collective in the group."""
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, obj, group=self.group)
        return objects


class _AllToAll(torch.autograd.Function):
    """Send part i of the first dimension to rank i; what comes from rank i is part i. Its own transpose."""

    @staticmethod
    def forward(context: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient, context.group), None


class _SumOfPieces(torch.autograd.Function):
    """All ranks go on with the same sum, so that each has its whole gradient: nothing is exchanged backwards."""

    @staticmethod
    def forward(context: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class DataParallelRanks(Ranks):
    """Sequence groups in place of ranks: the ranks of a group hold the same rows, which count once.

    Everything goes over all ranks, so that all get the same numbers to the last bit, and decide alike.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        super().__init__(ranks.device)
        self.ranks = ranks
        self.size = size

    @property
    def world_size(self) -> int:
        return self.ranks.world_size // self.size

    def get_rank(self) -> int:
        return self.ranks.get_rank() // self.size

    def is_rank_0(self) -> bool:
        return self.ranks.is_rank_0()

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        total = self.ranks.all_reduce(data, op)
        return self._once(total) if op == "sum" else total

    def _once(self, total: Any) -> Any:
        if isinstance(total, Mapping):
            return {key: self._once(value) for key, value in total.items()}
        if isinstance(total, int) or (isinstance(total, Tensor) and not total.is_floating_point()):
            return total // self.size
        return total / self.size

    def all_gather(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {key: self.all_gather(value) for key, value in data.items()}
        precise = torch.float64 if isinstance(data, float) else None
        values = data if isinstance(data, Tensor) else torch.tensor(data, dtype=precise)
        values = values.reshape(1) if values.dim() == 0 else values
        is_first = self.ranks.get_rank() % self.size == 0
        return self.ranks.all_gather(values if is_first else values[:0])

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.ranks.all_gather_object(obj)[:: self.size]

    def gather_object(self, obj: Any) -> list[Any] | None:
        objects = self.ranks.gather_object(obj)
        return None if objects is None else objects[:: self.size]

    def exchange_objects(self, parts: Mapping[int, Any]) -> list[Any]:
        piece = self.ranks.get_rank() % self.size
        return self.ranks.exchange_objects(
            {rank * self.size + piece: part for rank, part in parts.items()}
        )

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self.ranks.broadcast_object(obj, src * self.size)

    def same_count(self, count: int) -> int:
        return self.ranks.same_count(count)

    def on_rank_0(self, action: Callable[[], T], what: str) -> T:
        return self.ranks.on_rank_0(action, what)

    def barrier(self) -> None:
        self.ranks.barrier()

    def print(self, *parts: Any) -> None:
        self.ranks.print(*parts)
