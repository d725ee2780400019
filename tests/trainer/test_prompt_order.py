"""Each prompt once per episode, on every number of ranks, from every position."""

from __future__ import annotations

import random

import pytest
from torch.utils.data import DataLoader

from lightppo.trainer.prompts import RolloutBatchSampler


def ranks(n: int, batch: int, world: int, **options) -> list[RolloutBatchSampler]:
    return [
        RolloutBatchSampler(n, batch, rank=r, world_size=world, **options) for r in range(world)
    ]


def interleave(shares: list[list[int]]) -> list[int]:
    """Undo batch[rank::world]: the global batch, in its order."""
    out = [-1] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        out[rank :: len(shares)] = share
    return out


def global_batches(samplers: list[RolloutBatchSampler]) -> list[list[int]]:
    per_rank = [list(s) for s in samplers]
    assert len({len(b) for b in per_rank}) == 1  # equally many batches, or a collective would hang
    return [interleave(list(shares)) for shares in zip(*per_rank)]


CASES = [(n, b, w) for n in (1, 2, 5, 7, 16, 33) for b in (1, 2, 3, 8, 40) for w in (1, 2, 3, 4, 8)]


@pytest.mark.parametrize(("n", "batch", "world"), CASES)
def test_each_prompt_once_and_the_same_batches_at_every_world_size(
    n: int, batch: int, world: int
) -> None:
    alone = global_batches(ranks(n, batch, 1))
    assert global_batches(ranks(n, batch, world)) == alone
    assert sorted(i for b in alone for i in b) == list(range(n))
    assert [len(b) for b in alone[:-1]] == [batch] * (len(alone) - 1)
    assert len(ranks(n, batch, world)[0]) == len(alone)


def test_resume_anywhere_continues_the_same_order_at_another_world_and_batch_size() -> None:
    rng = random.Random(0)
    for _ in range(200):
        n, batch, world = rng.randint(1, 40), rng.randint(1, 12), rng.randint(1, 6)
        epoch, consumed = rng.randint(0, 3), rng.randint(0, n)
        whole = RolloutBatchSampler(n, n, seed=7)
        whole.set_epoch(epoch)
        samplers = ranks(n, batch, world, seed=7)
        for sampler in samplers:
            sampler.set_epoch(epoch, consumed)
        lengths = {len(s) for s in samplers}
        batches = global_batches(samplers)
        assert lengths == {len(batches)}
        assert [i for b in batches for i in b] == next(iter(whole))[consumed:]


def test_the_last_share_may_be_empty_and_a_dataloader_carries_it() -> None:
    # 5 prompts, batches of 4 over 2 ranks: the last batch has one prompt, rank 1 gets none of it.
    first, second = (list(s) for s in ranks(5, 4, 2, shuffle=False))
    assert first == [[0, 2], [4]]
    assert second == [[1, 3], []]
    sampler = RolloutBatchSampler(5, 4, rank=1, world_size=2, shuffle=False)
    loader = DataLoader(list("abcde"), batch_sampler=sampler, collate_fn=list)
    assert list(loader) == [["b", "d"], []]


def test_a_resumed_position_counts_for_one_pass() -> None:
    whole = list(RolloutBatchSampler(10, 4, seed=3))
    resumed = RolloutBatchSampler(10, 4, seed=3)
    resumed.set_epoch(0, 8)
    assert len(resumed) == 1
    assert list(resumed) == whole[2:]
    # At the end of an epoch: nothing is left of it, and the pass after that is a whole one.
    resumed.set_epoch(0, 10)
    assert list(resumed) == []
    assert len(list(resumed)) == len(resumed) == 3


def test_seeds_and_epochs_differ_and_repeat() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = RolloutBatchSampler(50, 50, seed=seed)
        sampler.set_epoch(epoch)
        return sampler.order()

    assert order(42, 1) == order(42, 1)
    # also (42, 1) and (43, 0)
    assert len({tuple(order(s, e)) for s in (42, 43) for e in (0, 1)}) == 4
    assert RolloutBatchSampler(4, 2, shuffle=False).order() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("numbers", "options", "message"),
    [
        ((0, 4), {}, "num_samples 0"),
        ((4, 0), {}, "--rollout_batch_size 0"),
        ((4, 2), {"rank": 2, "world_size": 2}, "rank 2 one of 2"),
    ],
)
def test_bad_numbers(numbers, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutBatchSampler(*numbers, **options)
    with pytest.raises(ValueError, match="consumed_samples is 5"):
        RolloutBatchSampler(4, 2).set_epoch(0, 5)


def test_prompts_that_are_left_out_come_no_more():
    def passes(world_size: int) -> list[int]:
        found = []
        for rank in range(world_size):
            sampler = RolloutBatchSampler(10, 4, rank=rank, world_size=world_size, seed=3)
            sampler.left_out = {2, 7, 9}
            sampler.set_epoch(1)
            assert (len(sampler), sampler.epoch_size) == (2, 7)
            found += [position for batch in sampler for position in batch]
        return sorted(found)

    assert passes(1) == passes(2) == passes(3) == [0, 1, 3, 4, 5, 6, 8]


def test_a_position_in_a_shortened_epoch_is_resumed():
    sampler = RolloutBatchSampler(10, 4, seed=3)
    sampler.left_out = {2, 7, 9}
    whole = list(sampler)
    sampler.set_epoch(0, 4)
    assert list(sampler) == whole[1:]
    with pytest.raises(ValueError, match="consumed_samples is 8"):
        sampler.set_epoch(0, 8)


def test_the_others_keep_their_order():
    sampler = RolloutBatchSampler(10, 4, seed=3)
    order = sampler.order()
    sampler.left_out = set(order[:3])
    assert sampler.order() == order[3:]
