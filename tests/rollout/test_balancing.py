"""Groups change ranks until all hold about as many tokens; nothing is lost and no rank's number of samples changes."""

from __future__ import annotations

import random
from types import SimpleNamespace

from support.fakes import FakeStrategy, on_ranks

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt, Rollout
from lightppo.rollout.balancing import Balancing, Group, balance_ranks, swapped
from lightppo.rollout.sampler import CollectedStep
from lightppo.trainer.run_callbacks import of_rollouts


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
        ranks = [
            [Group(draw.randint(20, 900), 4, 100 * r + i) for i in range(16)]
            for r in range(world_size)
        ]
        after = swapped(ranks)
        assert sorted(g for groups in after for g in groups) == sorted(
            g for groups in ranks for g in groups
        )
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
            result.append(
                Rollout(
                    prompt, sample, [5] * length, "r", "stop", [-1.0] * length, reward=float(rank)
                )
            )
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
    assert sorted((r for part in after for r in part), key=key) == sorted(
        before[0] + before[1], key=key
    )


def test_nothing_moves_on_one_rank_or_where_ranks_are_even() -> None:
    assert balance_ranks(rollouts_of(0), FakeStrategy()) == rollouts_of(0)
    assert on_ranks(2, lambda s: balance_ranks(rollouts_of(1), s)) == [rollouts_of(1)] * 2


def test_a_rank_without_samples_goes_along() -> None:
    before = rollouts_of(0)
    assert on_ranks(2, lambda s: balance_ranks(before if s.get_rank() == 0 else [], s)) == [
        before,
        [],
    ]


def test_a_shared_prompt_counts_once() -> None:
    # Two samples of each prompt. All tokens: 22 and 14, 20 and 18, 36 against 38: the swap of 22 for 20 would leave 34
    # and 40. With each prompt once: 12 and 8, 18 and 17, 20 against 35: 12 for 18 leaves 26 and 29, 8 for 17 leaves 29
    # and 26, the others 30 and 25; the first of the two best by size is 8 for 17.
    lengths = ([(10, 1), (6, 1)], [(2, 8), (1, 8)])

    def rollouts(rank: int) -> list[Rollout]:
        return [
            Rollout(
                Prompt("p", [1] * p, index=10 * rank + g),
                sample,
                [5] * r,
                "r",
                "stop",
                [-1.0] * r,
                reward=0.0,
            )
            for g, (p, r) in enumerate(lengths[rank])
            for sample in range(2)
        ]

    def held(once: bool) -> list[set[int]]:
        after = on_ranks(2, lambda s: balance_ranks(rollouts(s.get_rank()), s, prompt_once=once))
        return [{r.prompt.index for r in part} for part in after]

    assert held(once=False) == [{0, 1}, {10, 11}]
    assert held(once=True) == [{0, 11}, {10, 1}]


def run_of(strategy: FakeStrategy, **options: bool) -> SimpleNamespace:
    maker = SimpleNamespace(batching=SimpleNamespace(packed=False))
    config = PPOConfig.from_flat(**options)
    return SimpleNamespace(strategy=strategy, config=config, experience_maker=maker)


def test_groups_are_balanced_by_all_ranks_or_by_none() -> None:
    """Rank 0 alone repeats a group, which is named by its place: then no rank moves any."""

    def moved(strategy: FakeStrategy, repeated: list[int]) -> bool:
        before = rollouts_of(strategy.rank)
        own = repeated if strategy.rank == 0 else []
        step = CollectedStep(before, 6, {}, before, repeated=own)
        Balancing().on_rollouts(run_of(strategy), 1, step)
        return step.rollouts != before

    assert on_ranks(2, lambda strategy: moved(strategy, [0, 1])) == [False, False]
    assert on_ranks(2, lambda strategy: moved(strategy, [])) == [True, True]


def test_only_several_ranks_are_balanced() -> None:
    assert of_rollouts(run_of(FakeStrategy())) == []
    (callback,) = of_rollouts(run_of(FakeStrategy(0, 2)))
    assert isinstance(callback, Balancing)
    assert of_rollouts(run_of(FakeStrategy(0, 2), balance_ranks=False)) == []
