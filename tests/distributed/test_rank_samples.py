"""Who gets which sample of a data set."""

from __future__ import annotations

import pytest

from lightppo.distributed.distributed import RankSampler


def samplers(size: int, ranks: int, **options) -> list[RankSampler]:
    return [RankSampler(range(size), ranks, rank, **options) for rank in range(ranks)]


def test_every_sample_once_when_the_size_divides():
    shares = [list(sampler) for sampler in samplers(12, 3, seed=1)]
    assert sorted(index for share in shares for index in share) == list(range(12))
    assert [len(share) for share in shares] == [4, 4, 4]


def test_the_remainder_wraps_around_or_is_dropped():
    # 5 samples on 2 ranks, in order: 0 1 2 3 4 and 0 again
    assert [list(s) for s in samplers(5, 2, shuffle=False)] == [[0, 2, 4], [1, 3, 0]]
    assert [list(s) for s in samplers(5, 2, shuffle=False, drop_last=True)] == [[0, 2], [1, 3]]
    # fewer samples than ranks: 0 1 0 1 0
    assert [list(s) for s in samplers(2, 5, shuffle=False)] == [[0], [1], [0], [1], [0]]


def test_epochs_differ_and_repeat_with_the_seed():
    first, again, other_seed = (RankSampler(range(20), 1, 0, seed=seed) for seed in (3, 3, 4))
    epoch_0 = list(first)
    assert epoch_0 == list(again)
    assert epoch_0 != list(other_seed)
    first.set_epoch(1)
    assert list(first) != epoch_0
    assert sorted(first) == list(range(20))


def test_resuming_gives_exactly_the_rest():
    whole = [list(sampler) for sampler in samplers(12, 2, seed=5)]
    rest = samplers(12, 2, seed=5, consumed_samples=8)  # 4 of each rank's 6
    assert [list(sampler) for sampler in rest] == [share[4:] for share in whole]
    assert [len(sampler) for sampler in rest] == [2, 2]
    rest[0].set_epoch(1)
    assert len(rest[0]) == 6
    assert list(samplers(12, 2, consumed_samples=12)[0]) == []


def test_bad_input():
    with pytest.raises(ValueError, match="0 samples on 1 ranks"):
        RankSampler([], 1, 0)
    with pytest.raises(ValueError, match="3 samples on 4 ranks"):
        RankSampler(range(3), 4, 0, drop_last=True)
    with pytest.raises(ValueError, match="consumed_samples=14 is more than one epoch of 12"):
        RankSampler(range(12), 2, 0, consumed_samples=14)
