"""Which rows go through a model together: little padding, at most so many samples or tokens, even loads."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lightppo.config.micro_batches import MicroBatchSpec


def micro_batches(
    lengths: Sequence[tuple[int, int]], spec: MicroBatchSpec, *, packed: bool, at_least: int = 0
) -> list[list[int]]:
    """Split rows into micro batches; every row is in exactly one.

    By samples: rows of like lengths together, longest first (a lack of memory shows at once). By tokens: a packed
    micro batch holds at most so many real tokens, and all hold about the same number; a padded one at most so many
    with its padding. A row of more tokens than the budget is a micro batch of its own.

    Args:
        lengths: prompt and response tokens of each row.
        spec: the most that one micro batch holds.
        packed: rows take their real tokens only; else all of a micro batch are padded to its longest prompt and
            longest response.
        at_least: so many micro batches where there are as many rows and the split is by tokens of packed rows: what
            other ranks need anyway.

    Returns:
        numbers of the rows of each micro batch; none for no rows.
    """
    total = [prompt + response for prompt, response in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-total[i], i))
    if spec.unit == "samples":
        return [order[i : i + spec.size] for i in range(0, len(order), spec.size)]
    if not packed:
        return _padded(order, lengths, spec.size)
    count = max(-(-sum(total) // spec.size), min(at_least, len(order)))
    while True:  # ends: at as many parts as rows, every part is one row
        parts = _even(order, total, count)
        if all(len(part) == 1 or sum(total[i] for i in part) <= spec.size for part in parts):
            return parts
        count += 1


def _padded(order: list[int], lengths: Sequence[tuple[int, int]], budget: int) -> list[list[int]]:
    """Rows one after the other, as long as rows × (longest prompt + longest response) stays within the budget."""
    parts: list[list[int]] = []
    width = (0, 0)
    for i in order:
        wider = (max(width[0], lengths[i][0]), max(width[1], lengths[i][1]))
        if parts and (len(parts[-1]) + 1) * sum(wider) <= budget:
            parts[-1].append(i)
            width = wider
        else:
            parts.append([i])
            width = lengths[i]
    return parts


def _even(order: list[int], total: Sequence[int], count: int) -> list[list[int]]:
    """So many parts of about equal sums: the longest row left goes to the lightest part (Graham 1969, LPT)."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, part) for part in range(count)]
    for i in order:
        load, part = heapq.heappop(loads)
        parts[part].append(i)
        heapq.heappush(loads, (load + total[i], part))
    return [part for part in parts if part]
