"""``--balance_ranks``: groups change ranks, so that all ranks train on about as many tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightppo.callbacks import Callback
from lightppo.data.records import Rollout
from lightppo.ranks import Ranks
from lightppo.rollout.sampler import CollectedStep

TOLERANCE = 0.02  # of the mean: a smaller difference is not worth another exchange


class Group(NamedTuple):
    """The samples of one prompt on one rank."""

    tokens: int
    samples: int  # their number
    index: int  # the prompt's


def balance_ranks(
    rollouts: Sequence[Rollout], strategy: Ranks, *, prompt_once: bool = False
) -> list[Rollout]:
    """Swap whole groups between ranks until all hold about the same number of tokens. Collective.

    Only groups of equally many samples are swapped, so every rank keeps its number of samples. With ``prompt_once`` a
    prompt counts once for all its samples, as it goes through the models once.
    """
    token_counts: Counter[int] = Counter()
    sample_counts: Counter[int] = Counter()
    for rollout in rollouts:
        prompt_index = rollout.prompt.index
        token_counts[prompt_index] += len(rollout.response_ids)
        if not prompt_once or sample_counts[prompt_index] == 0:
            token_counts[prompt_index] += len(rollout.prompt.token_ids)
        sample_counts[prompt_index] += 1
    groups_of_ranks: list[list[Group]] = strategy.all_gather_object(
        [
            Group(token_counts[prompt_index], sample_counts[prompt_index], prompt_index)
            for prompt_index in sample_counts
        ]
    )
    balanced_groups = swapped(groups_of_ranks)
    if balanced_groups == groups_of_ranks:
        return list(rollouts)
    rank_of = {group.index: rank for rank, groups in enumerate(balanced_groups) for group in groups}
    staying: list[Rollout] = []
    leaving: dict[int, list[Rollout]] = defaultdict(list)  # by the rank that they go to
    staying_indices = {group.index for group in balanced_groups[strategy.get_rank()]}
    for rollout in rollouts:
        prompt_index = rollout.prompt.index
        if prompt_index in staying_indices:
            staying.append(rollout)
        else:
            leaving[rank_of[prompt_index]].append(rollout)
    for arrived in strategy.exchange_objects(leaving):  # only to the ranks that train on them
        staying += arrived
    return staying


def swapped(ranks: Sequence[Sequence[Group]], tolerance: float = TOLERANCE) -> list[list[Group]]:
    """Return the groups of each rank after swaps, which end when the heaviest rank is at most ``tolerance`` above the mean.

    A group whose prompt is on several ranks stays: on one rank the two would become one group.
    """
    result = [list(groups) for groups in ranks]
    holders = Counter(group.index for groups in ranks for group in groups)
    shared_prompts = {index for index, count in holders.items() if count > 1}
    token_loads = [sum(group.tokens for group in groups) for groups in result]
    mean_load = sum(token_loads) / len(token_loads)
    while max(token_loads) > mean_load * (1 + tolerance):
        heaviest_rank = token_loads.index(max(token_loads))
        lightest_rank = token_loads.index(min(token_loads))
        best_pair = _best_swap(
            result[heaviest_rank],
            result[lightest_rank],
            token_loads[heaviest_rank] - token_loads[lightest_rank],
            shared_prompts,
        )
        if best_pair is None:
            break
        heavy_group, light_group = best_pair
        result[heaviest_rank][result[heaviest_rank].index(heavy_group)] = light_group
        result[lightest_rank][result[lightest_rank].index(light_group)] = heavy_group
        token_loads[heaviest_rank] -= heavy_group.tokens - light_group.tokens
        token_loads[lightest_rank] += heavy_group.tokens - light_group.tokens
    return result


def _best_swap(
    heavy_groups: list[Group], light_groups: list[Group], gap: int, shared_prompts: set[int]
) -> tuple[Group, Group] | None:
    """Return the pair of groups whose swap narrows the gap most; ``None`` if no swap narrows it."""
    best: tuple[float, Group, Group] | None = None
    partners: dict[int, list[Group]] = defaultdict(list)
    for group in sorted(light_groups):
        if group.index not in shared_prompts:
            partners[group.samples].append(group)
    for heavy_group in sorted(heavy_groups):
        candidates = (
            partners.get(heavy_group.samples, []) if heavy_group.index not in shared_prompts else []
        )
        position = bisect_left(
            candidates, heavy_group.tokens - gap / 2, key=lambda group: group.tokens
        )
        for light_group in candidates[max(position - 1, 0) : position + 1]:
            remaining_gap = abs(gap - 2 * (heavy_group.tokens - light_group.tokens))
            if remaining_gap < (gap if best is None else best[0]):
                best = (remaining_gap, heavy_group, light_group)
    return None if best is None else best[1:]


class Balancing(Callback):
    """Move groups before anything else looks at the rollouts of a step."""

    def on_rollouts(self, run: Any, step: int, collected: CollectedStep) -> None:
        # Repeated groups are named by their place on this rank, so with any of them nothing moves.
        if not collected.groups or run.strategy.same_count(len(collected.repeated)):
            return
        in_groups = run.config.training.shuffle == "groups"
        collected.rollouts = balance_ranks(
            collected.rollouts,
            run.strategy,
            prompt_once=in_groups and run.experience_maker.layout.shares_prompts,
        )
