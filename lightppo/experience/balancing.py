"""Even numbers of tokens on all ranks: the step takes as long as the rank with most of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from lightppo.data.records import Rollout
from lightppo.ranks import Ranks

TOLERANCE = 0.02  # of the mean: what is left of the difference is not worth another exchange


class Group(NamedTuple):
    """The samples of one prompt on one rank: their tokens and number, and the prompt's index."""

    tokens: int
    samples: int
    index: int


def balance_ranks(rollouts: Sequence[Rollout], strategy: Ranks, *, prompt_once: bool = False) -> list[Rollout]:
    """Swap whole groups between ranks until all hold about as many tokens. Collective.

    Groups are swapped for groups of as many samples, so that every rank keeps its number of samples, and with it every
    optimizer step its batch size. Which groups are swapped follows from their lengths alone.

    Args:
        rollouts: of this rank.
        strategy: gathers over ranks.
        prompt_once: a prompt goes through the models once for all its samples, and counts once.

    Returns:
        this rank's rollouts: those that stay in their order, then those that came.
    """
    if strategy.world_size == 1:
        return list(rollouts)
    mine: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        mine[rollout.prompt.index].append(rollout)
    groups = [Group(_tokens(group, prompt_once), len(group), index) for index, group in mine.items()]
    before: list[list[Group]] = strategy.all_gather_object(groups)
    after = swapped(before)
    if after == before:
        return list(rollouts)
    rank = strategy.get_rank()
    leaving = {group.index for group in before[rank]} - {group.index for group in after[rank]}
    arriving = {group.index for group in after[rank]} - {group.index for group in before[rank]}
    sent = strategy.all_gather_object([r for r in rollouts if r.prompt.index in leaving])
    stay = [r for r in rollouts if r.prompt.index not in leaving]
    return stay + [r for part in sent for r in part if r.prompt.index in arriving]


def swapped(ranks: Sequence[Sequence[Group]], tolerance: float = TOLERANCE) -> list[list[Group]]:
    """The groups of each rank after swaps between the heaviest and the lightest rank.

    Args:
        ranks: groups of each rank. One whose prompt is on several ranks stays where it is: on one rank the two would be
            one group.
        tolerance: no more swaps where the heaviest rank is above the mean by at most this share.
    """
    result = [list(groups) for groups in ranks]
    indices = [group.index for groups in ranks for group in groups]
    shared = {index for index in indices if indices.count(index) > 1} if len(set(indices)) < len(indices) else set()
    loads = [sum(group.tokens for group in groups) for groups in result]
    mean = sum(loads) / len(loads)
    while max(loads) > mean * (1 + tolerance):
        heavy, light = loads.index(max(loads)), loads.index(min(loads))
        pair = _best_swap(result[heavy], result[light], loads[heavy] - loads[light], shared)
        if pair is None:
            break
        given, taken = pair
        result[heavy][result[heavy].index(given)] = taken
        result[light][result[light].index(taken)] = given
        loads[heavy] -= given.tokens - taken.tokens
        loads[light] += given.tokens - taken.tokens
    return result


def _best_swap(heavy: list[Group], light: list[Group], gap: int, shared: set[int]) -> tuple[Group, Group] | None:
    """A group of each whose swap brings the loads nearest to each other; ``None``: none brings them nearer."""
    best: tuple[float, Group, Group] | None = None
    partners: dict[int, list[Group]] = defaultdict(list)
    for group in sorted(light):
        if group.index not in shared:
            partners[group.samples].append(group)
    for given in sorted(heavy):
        candidates = partners.get(given.samples, []) if given.index not in shared else []
        place = bisect_left(candidates, given.tokens - gap / 2, key=lambda group: group.tokens)
        for taken in candidates[max(place - 1, 0) : place + 1]:
            left = abs(gap - 2 * (given.tokens - taken.tokens))
            if left < (gap if best is None else best[0]):
                best = (left, given, taken)
    return None if best is None else best[1:]


def _tokens(group: Sequence[Rollout], prompt_once: bool) -> int:
    prompts = len(group[0].prompt.token_ids) * (1 if prompt_once else len(group))
    return prompts + sum(len(rollout.response_ids) for rollout in group)
