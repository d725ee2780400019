"""Which rows go through a model together: little padding, at most so many samples or tokens, even loads."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from lightppo.config.micro_batches import MicroBatchSpec


def micro_batches(
    lengths: Sequence[tuple[int, int]],
    spec: MicroBatchSpec,
    *,
    packed: bool,
    at_least: int = 0,
    prompts: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Split rows into micro batches; every row is in exactly one.

    By samples: rows of like lengths together, longest first (a lack of memory shows at once). By tokens: a packed
    micro batch holds at most so many real tokens, and all hold about the same number; a padded one at most so many
    with its padding. A row of more tokens than the budget is a micro batch of its own.

    Rows that share a prompt stay together, and its tokens count once. Only a group of more tokens than the budget is
    cut, into parts that each hold the prompt; by samples, also one at the border of a micro batch.

    Args:
        lengths: prompt and response tokens of each row.
        spec: the most that one micro batch holds.
        packed: rows take their real tokens only; else all of a micro batch are padded to its longest prompt and
            longest response.
        at_least: so many micro batches where there are as many rows (or groups of a prompt) and the split is by tokens
            of packed rows: what other ranks need anyway.
        prompts: of packed rows; those with the same one share it. None: no row shares its prompt.

    Returns:
        numbers of the rows of each micro batch; none for no rows.
    """
    total = [prompt + response for prompt, response in lengths]
    if spec.unit == "tokens" and not packed:
        return _padded(sorted(range(len(lengths)), key=lambda i: (-total[i], i)), lengths, spec.size)
    groups = _groups(lengths, prompts if packed and prompts is not None else range(len(lengths)))
    if spec.unit == "samples":
        order = [i for group in groups for i in group]
        return [order[i : i + spec.size] for i in range(0, len(order), spec.size)]
    units = [unit for group in groups for unit in _cut(group, lengths, spec.size)]
    parts = _fitting([_tokens(unit, lengths) for unit in units], spec.size, at_least)
    return [[i for unit in part for i in units[unit]] for part in parts]


def _groups(lengths: Sequence[tuple[int, int]], prompts: Sequence[Hashable]) -> list[list[int]]:
    """Rows of each prompt, most tokens first; so are the rows of one."""
    found: dict[Hashable, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: (-sum(lengths[i]), i)):
        found.setdefault(prompts[i], []).append(i)
    return sorted(found.values(), key=lambda group: -_tokens(group, lengths))


def _tokens(group: Sequence[int], lengths: Sequence[tuple[int, int]]) -> int:
    """Of rows with one prompt, which counts once."""
    return lengths[group[0]][0] + sum(lengths[i][1] for i in group)


def _cut(group: list[int], lengths: Sequence[tuple[int, int]], budget: int) -> list[list[int]]:
    """Rows of one prompt in as few parts as fit the budget, each with the prompt."""
    parts = _fitting([lengths[i][1] for i in group], max(1, budget - lengths[group[0]][0]))
    return [[group[i] for i in part] for part in parts]


def _fitting(tokens: Sequence[int], budget: int, at_least: int = 0) -> list[list[int]]:
    """Few parts of about equal sums within the budget; what is above it is a part of its own."""
    if not tokens:
        return []
    count = max(1, -(-sum(tokens) // budget), min(at_least, len(tokens)))
    while True:  # ends: at as many parts as there are to share out, every part is one
        parts = _even(tokens, count)
        if all(len(part) == 1 or sum(tokens[i] for i in part) <= budget for part in parts):
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


def _even(tokens: Sequence[int], count: int) -> list[list[int]]:
    """So many parts of about equal sums: the most that is left goes to the lightest part (Graham 1969, LPT)."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, part) for part in range(count)]
    for i in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        load, part = heapq.heappop(loads)
        parts[part].append(i)
        heapq.heappush(loads, (load + tokens[i], part))
    return [part for part in parts if part]
