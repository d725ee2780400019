"""Keys and values of conversations between two turns, so that a follow-up runs its new tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PretrainedConfig

SHARE = 4  # a pool has at most one such part of the memory that is free or its own


@dataclass
class KeptRows:
    """A pool of rows that have ended, by the numbers of their requests; the oldest ones go when it is full.

    ``follows`` names the request that another one goes on from: its prompt begins with the other's prompt and tokens.
    """

    free: Callable[[], int]  # bytes of memory that nobody has now
    follows: dict[int, int] = field(default_factory=dict)
    final: set[int] = field(default_factory=set)  # requests that none goes on from
    # of each layer keys, then values, each (heads, tokens, head width)
    rows: dict[int, list[Tensor]] = field(default_factory=dict)
    bytes: int = 0

    def add(self, number: int, states: Sequence[Tensor]) -> None:
        """Keeps a copy of a row's keys and values."""
        if number in self.final:
            return
        size = sum(x.numel() * x.element_size() for x in states)
        limit = (self.bytes + self.free()) // SHARE  # anew each time: the slots' cache grows
        while self.rows and self.bytes + size > limit:
            self.remove(next(iter(self.rows)))
        if size <= limit:
            self.rows[number] = [x.clone() for x in states]
            self.bytes += size

    def remove(self, number: int) -> None:
        """Forgets a row."""
        gone = self.rows.pop(number, ())
        self.bytes -= sum(x.numel() * x.element_size() for x in gone)

    def length(self, number: int) -> int:
        """Tokens at the beginning of a request that need not run again."""
        row = self.rows.get(self.follows.get(number, -1))
        return row[0].shape[1] if row else 0

    def cache(
        self, config: PretrainedConfig, numbers: Sequence[int], used: list[int]
    ) -> DynamicCache:
        """A cache of the first ``used`` tokens of requests, zeros on the left of shorter ones."""
        cache = DynamicCache(config=config)
        past = [self.rows.get(self.follows.get(number, -1)) for number in numbers]
        width = max(used)
        for i in range(len(cache.layers) if width else 0):
            states = []
            for kind in range(2):  # keys, values
                some = next(row for row, count in zip(past, used) if count)[2 * i + kind]
                block = some.new_zeros(len(numbers), some.shape[0], width, some.shape[2])
                for b, (row, count) in enumerate(zip(past, used)):
                    if count:
                        block[b, :, width - count :] = row[2 * i + kind][:, :count]
                states.append(block)
            cache.update(*states, layer_idx=i)
        return cache

    def forget(self, numbers: Sequence[int]) -> None:
        """Removes what requests went on from."""
        for number in numbers:
            self.remove(self.follows.pop(number, -1))


def new_tokens(
    prompts: list[list[int]], known: list[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """What prompts run of which the first ``known`` tokens are known: equally many tokens each, so that no row has a
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
