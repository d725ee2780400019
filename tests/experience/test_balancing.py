"""Groups change ranks until all hold about as many tokens; nothing is lost and no rank's number of samples changes."""

from __future__ import annotations

import random

from support.fakes import FakeStrategy, on_ranks

from lightppo.data.records import Prompt, Rollout
from lightppo.experience.balancing import Group, balance_ranks, swapped


def loads(ranks: list[list[Group]]) -> list[int]:
    return [sum(group.tokens for group in groups) for groups in ranks]


def test_by_hand() -> None:
    # 30 against 14: the swap of 10 for 2 leaves 22 and 22
    ranks = [[Group(20, 1, 0), Group(10, 1, 1)], [Group(12, 1, 2), Group(2, 1, 3)]]
    assert swapped(ranks) == [[Group(20, 1, 0), Group(2, 1, 3)], [Group(12, 1, 2), Group(10, 1, 1)]]
    assert loads(swapped(ranks)) == [22, 22]


def test_only_groups_of_as_many_samples_are_swapped() -> None:
    ranks = [[Group(20, 2, 0)], [Group(2, 1, 1)]]
    assert swapped(ranks) == ranks


def test_a_prompt_on_two_ranks_stays() -> None:
    ranks = [[Group(20, 1, 0), Group(10, 1, 1)], [Group(12, 1, 1), Group(2, 1, 0)]]
    assert swapped(ranks) == ranks


def test_random_ranks_come_close() -> None:
    draw = random.Random(0)
    for world_size in (2, 3, 8):
        ranks = [[Group(draw.randint(20, 900), 4, 100 * r + i) for i in range(16)] for r in range(world_size)]
        after = swapped(ranks)
        assert sorted(g for groups in after for g in groups) == sorted(g for groups in ranks for g in groups)
        assert [len(groups) for groups in after] == [16] * world_size
        mean = sum(loads(ranks)) / world_size
        assert max(loads(ranks)) > 1.05 * mean
        assert max(loads(after)) <= 1.02 * mean


def rollouts_of(rank: int) -> list[Rollout]:
    """Two groups of two samples on each rank; those of rank 0 are ten times as long."""
    result = []
    for group in range(2):
        prompt = Prompt("p", [1] * 3, index=10 * rank + group)
        for sample in range(2):
            length = (10 if rank == 0 else 1) * (group + sample + 1)
            result.append(Rollout(prompt, sample, [5] * length, "r", "stop", [-1.0] * length, reward=float(rank)))
    return result


def test_whole_groups_arrive_with_all_they_have() -> None:
    def balance(strategy: FakeStrategy) -> list[Rollout]:
        return balance_ranks(rollouts_of(strategy.get_rank()), strategy)

    before = [rollouts_of(rank) for rank in range(2)]
    after = on_ranks(2, balance)
    # tokens of the groups: 36, 56 and 9, 11: 92 against 20; 36 for 11 leaves 67 and 45, 36 for 9 leaves 65 and 47,
    # 56 for 11 leaves 47 and 65, 56 for 9 leaves 45 and 67; the first of the two best by size is 36 for 9
    assert [[r.prompt.index for r in part] for part in after] == [[1, 1, 10, 10], [11, 11, 0, 0]]
    key = lambda r: (r.prompt.index, r.sample_index)  # noqa: E731
    assert sorted((r for part in after for r in part), key=key) == sorted(before[0] + before[1], key=key)


def test_nothing_moves_on_one_rank_or_where_ranks_are_even() -> None:
    assert balance_ranks(rollouts_of(0), FakeStrategy()) == rollouts_of(0)
    assert on_ranks(2, lambda s: balance_ranks(rollouts_of(1), s)) == [rollouts_of(1)] * 2


def test_a_rank_without_samples_goes_along() -> None:
    before = rollouts_of(0)
    assert on_ranks(2, lambda s: balance_ranks(before if s.get_rank() == 0 else [], s)) == [before, []]
