"""Prompts that wait for a slot: each different one goes through the model once, however many samples it gets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from lightppo.rollout.decoding import CachedForward, left_pad

# What a forward costs beside its positions, in positions.
CALL_COST = {"cpu": 64, "other": 2048}


@dataclass
class Prefilled:
    """Some prompts after their forward.

    Attributes:
        prompts: the token ids.
        cache: keys and values of the left-padded prompts.
        logits: (P, V) behind the last token of each.
        waiting: (row of the prompt, number of the request) of samples without a slot yet.
    """

    prompts: list[list[int]]
    cache: Cache
    logits: Tensor
    waiting: deque[tuple[int, int]]


class PromptQueue:
    """The requests of one call in their order, requests with equal prompts together.

    Args:
        forward: the model.
        requests: token ids of each request.
        max_prompts: in one forward.
        device: of the model.

    Attributes:
        waiting: requests without a slot.
        forwards, positions: forward passes made and positions computed in them, padding included.
    """

    def __init__(
        self, forward: CachedForward, requests: list[list[int]], max_prompts: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._device = device
        self._max_prompts = max_prompts
        self._call_cost = CALL_COST["cpu" if device.type == "cpu" else "other"]
        same: dict[tuple[int, ...], list[int]] = {}
        for number, ids in enumerate(requests):
            same.setdefault(tuple(ids), []).append(number)
        self._groups = deque((list(ids), numbers) for ids, numbers in same.items())
        self._parts: deque[list[tuple[list[int], list[int]]]] = deque()  # each for one forward
        self._block: Prefilled | None = None
        self.waiting = len(requests)
        self.forwards = 0
        self.positions = 0

    @property
    def at_hand(self) -> bool:
        """Whether a request waits whose prompt has been through the model, or was to go with others that have."""
        return self._block is not None or bool(self._parts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that waits; 0 where none does."""
        block = [] if self._block is None else [len(self._block.prompts[row]) for row, _ in self._block.waiting]
        groups = (len(ids) for part in (*self._parts, self._groups) for ids, _ in part)
        return max((*block, *groups), default=0)

    def take(self, count: int) -> tuple[Prefilled, list[int], list[int]]:
        """The next requests, at least one and at most ``count``: with their prompts, as rows of it, and their
        numbers."""
        if not self.at_hand:
            self._divide(count)
        block = self._block or self._through_the_model(self._parts.popleft())
        rows, numbers = map(list, zip(*(block.waiting.popleft() for _ in range(min(count, len(block.waiting))))))
        self._block = block if block.waiting else None
        self.waiting -= len(rows)
        return block, rows, numbers

    def _divide(self, count: int) -> None:
        """Makes parts of the prompts of the next ``count`` requests."""
        groups: list[tuple[list[int], list[int]]] = []
        while self._groups and count > 0 and len(groups) < self._max_prompts:
            groups.append(self._groups.popleft())
            count -= len(groups[-1][1])
        parts = cheapest_parts([len(ids) for ids, _ in groups], self._call_cost)
        self._parts.extend(groups[first:end] for first, end in parts)

    def _through_the_model(self, groups: list[tuple[list[int], list[int]]]) -> Prefilled:
        prompts = [ids for ids, _ in groups]
        padded = left_pad(prompts, self._device)  # (P, L)
        mask = (padded >= 0).long()
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)
        cache = self._forward.new_cache()
        logits = self._forward(padded.clamp(min=0), mask, positions, cache)
        self.forwards += 1
        self.positions += padded.numel()
        waiting = deque((row, number) for row, (_, numbers) in enumerate(groups) for number in numbers)
        return Prefilled(prompts, cache, logits, waiting)


def cheapest_parts(lengths: list[int], call_cost: int) -> list[tuple[int, int]]:
    """Cuts a list of prompts into forwards so that their positions, padding included, and calls cost least.

    Args:
        lengths: of the prompts.
        call_cost: of a forward, in positions.

    Returns:
        First and end of each part.
    """
    least, cut = [0], [0]  # of the first k prompts: their cost, and where the last part begins
    for end in range(1, len(lengths) + 1):
        best, longest = (float("inf"), 0), 0
        for first in range(end - 1, -1, -1):
            longest = max(longest, lengths[first])
            best = min(best, (least[first] + call_cost + longest * (end - first), first))
        least.append(best[0])
        cut.append(best[1])
    parts, end = [], len(lengths)
    while end:
        parts.append((cut[end], end))
        end = cut[end]
    return parts[::-1]
