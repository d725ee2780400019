"""Keys and values of conversations between two turns, so that a follow-up runs its new tokens alone.

A row that has ended stays in its slot as long as nobody needs the slot. Environments mostly answer sooner: then there
is nothing to copy, as the conversation has ended or goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PretrainedConfig

from lightppo.rollout.decoding import SlotCache

SHARE = 4  # copies take at most one such part of the memory that is free or theirs


@dataclass(frozen=True)
class SlotRow:
    """A row where it was decoded."""

    cache: SlotCache
    slot: int
    start: int  # its first column
    length: int  # tokens

    def states(self) -> list[Tensor]:
        """Return views of each layer's keys, then values, (heads, tokens, head width)."""
        columns = slice(self.start, self.start + self.length)
        layers = self.cache.layers
        return [buffer[self.slot, :, columns] for layer in layers for buffer in layer.buffers]


@dataclass(frozen=True)
class CopiedRow:
    """A row whose slot was needed."""

    tensors: list[Tensor]  # as of SlotRow.states
    length: int

    def states(self) -> list[Tensor]:
        return self.tensors


@dataclass
class KeptRows:
    """Rows that have ended, by their numbers. The oldest copies go when there is no room for more."""

    free: Callable[[], int]  # bytes of memory that nobody has now
    goes_on: Callable[[int], bool]  # whether a row may still be needed
    in_slots: dict[int, SlotRow] = field(default_factory=dict)
    copies: dict[int, CopiedRow] = field(default_factory=dict)
    bytes: int = 0  # of the copies

    def add(self, number: int, row: SlotRow) -> None:
        """Keep a row in its slot."""
        if self.goes_on(number):
            self.in_slots[number] = row

    def give_way(self, slots: range) -> None:
        """Copy what is still needed of these slots."""
        leaving = [number for number, row in self.in_slots.items() if row.slot in slots]
        rows = [self.in_slots.pop(number) for number in leaving]
        needed = [(number, row) for number, row in zip(leaving, rows) if self.goes_on(number)]
        if needed:
            for number in [number for number in self.copies if not self.goes_on(number)]:
                self.remove(number)
        for number, row in needed:
            self._copy(number, row)

    def _copy(self, number: int, row: SlotRow) -> None:
        states = row.states()
        size = _bytes(states)
        limit = (self.bytes + self.free()) // SHARE  # anew each time: the slots' cache grows
        while self.copies and self.bytes + size > limit:
            self.remove(next(iter(self.copies)))
        if size <= limit:
            self.copies[number] = CopiedRow([x.clone() for x in states], row.length)
            self.bytes += size

    def remove(self, number: int) -> None:
        """Forget a row, if there is one."""
        self.in_slots.pop(number, None)
        copy = self.copies.pop(number, None)
        if copy is not None:
            self.bytes -= _bytes(copy.tensors)

    def _find(self, number: int) -> SlotRow | CopiedRow | None:
        return self.in_slots.get(number) or self.copies.get(number)

    def length(self, number: int) -> int:
        """Return tokens of a row; 0 if there is none."""
        row = self._find(number)
        return row.length if row else 0

    def cache(
        self, config: PretrainedConfig, numbers: Sequence[int], used: list[int]
    ) -> DynamicCache:
        """Return a cache of the first ``used`` tokens of rows, zeros on the left of shorter ones."""
        cache = DynamicCache(config=config)
        past = [
            self._find(number).states() if count else [] for number, count in zip(numbers, used)
        ]
        width = max(used)
        for i in range(len(cache.layers) if width else 0):
            states = []
            for kind in range(2):  # keys, values
                some = next(row for row in past if row)[2 * i + kind]
                block = some.new_zeros(len(numbers), some.shape[0], width, some.shape[2])
                for b, (row, count) in enumerate(zip(past, used)):
                    if count:
                        block[b, :, width - count :] = row[2 * i + kind][:, :count]
                states.append(block)
            cache.update(*states, layer_idx=i)
        return cache


def _bytes(states: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in states)


def new_tokens(
    prompts: list[list[int]], known: list[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return what prompts run of which the first ``known`` tokens are known: equally many tokens each, so that no row has a
    hole between what is known and what is new.

    Returns:
        ids (P, M), 0 on the left of shorter prompts; the mask of known and new columns (P, W + M); positions (P, M);
        how many known tokens each uses, at most W.
    """
    new = max(len(prompt) - count for prompt, count in zip(prompts, known))  # M
    used = [max(0, len(prompt) - new) for prompt in prompts]
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    last = [torch.tensor(prompt[-new:]) for prompt in prompts]
    ids = torch.stack([pad(x, (new - len(x), 0)) for x in last]).to(device)
    total = max(used) + new
    columns = torch.arange(total, device=device)
    mask = (columns >= total - lengths).long()
    positions = (columns[-new:] - (total - lengths)).clamp_(min=0)
    return ids, mask, positions, used


def free_bytes(device: torch.device) -> int:
    """Memory that nobody has."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return psutil.virtual_memory().available
