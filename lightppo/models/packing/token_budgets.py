"""Micro batches of packed rows: a budget of real tokens, about the same load for all, a prompt once for its rows."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import count

from lightppo.config.rules import MicroBatchSpec


def packed_micro_batches(
    lengths: Sequence[tuple[int, int]],
    spec: MicroBatchSpec,
    prompts: Sequence[Hashable] = (),
    *,
    at_least: int = 0,
) -> list[list[int]]:
    """Split rows with ``lengths`` (prompt, response) into micro batches: lists of row numbers, each row in one.

    By samples: rows of similar length together, longest first, so that a lack of memory shows at once. By tokens: a
    micro batch holds at most the budget in real tokens, and all hold about the same number (``at_least`` is how many
    other ranks need). A row above the budget is alone.

    Rows with equal ``prompts`` stay together, and the prompt's tokens count once; without ``prompts`` each counts. Only
    a group above the budget is cut, into parts that each hold the prompt; by samples, also a group at the border of a
    micro batch.
    """
    of_prompt: dict[Hashable, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -sum(lengths[i])):
        of_prompt.setdefault(prompts[i] if prompts else i, []).append(i)
    groups = sorted(of_prompt.values(), key=lambda group: -_tokens(group, lengths))
    if spec.unit == "samples":
        order = [i for group in groups for i in group]
        return [order[i : i + spec.size] for i in range(0, len(order), spec.size)]
    units = []  # rows of one prompt, cut into as few parts as fit the budget
    for group in groups:
        cuts = _fitting([lengths[i][1] for i in group], max(1, spec.size - lengths[group[0]][0]))
        units += [[group[i] for i in cut] for cut in cuts]
    parts = _fitting([_tokens(unit, lengths) for unit in units], spec.size, at_least)
    return [[i for unit in part for i in units[unit]] for part in parts]


def _tokens(group: Sequence[int], lengths: Sequence[tuple[int, int]]) -> int:
    """Tokens of rows with one prompt, which counts once."""
    return lengths[group[0]][0] + sum(lengths[i][1] for i in group)


def _fitting(tokens: Sequence[int], budget: int, at_least: int = 0) -> list[list[int]]:
    """Few parts of about equal sums within the budget; an item above the budget is a part of its own."""
    if not tokens:
        return []
    least = max(1, -(-sum(tokens) // budget), min(at_least, len(tokens)))
    # They fit at the latest when every part has one item.
    tries = (_even(tokens, n) for n in count(least))
    return next(
        t
        for t in tries
        if all(len(part) == 1 or sum(tokens[i] for i in part) <= budget for part in t)
    )


def _even(tokens: Sequence[int], number: int) -> list[list[int]]:
    """``number`` parts of about equal sums: the largest remaining item goes to the lightest part (Graham 1969, LPT)."""
    parts: list[list[int]] = [[] for _ in range(number)]
    loads = [(0, part) for part in range(number)]
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        load, part = heapq.heappop(loads)
        parts[part].append(i)
        heapq.heappush(loads, (load + tokens[i], part))
    return [part for part in parts if part]
