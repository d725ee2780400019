"""The replay buffer of scripts: a limit, samples, whitening by its name."""

from __future__ import annotations

import random

import pytest
from support.fakes import FakeStrategy, make_rollout

from lightppo import ReplayBuffer
from lightppo.experience.experience import Experience


def batch(*first_ids: int, length: int = 2) -> Experience:
    """A row per number, with which its response begins."""
    return Experience.from_rollouts(
        [make_rollout([1, 2], [first, *range(length - 1)]) for first in first_ids]
    )


def names(buffer: ReplayBuffer) -> list[int]:
    return [int(item.sequences[0, -item.num_actions]) for item in buffer.items]


def test_the_oldest_rows_leave_a_full_buffer():
    buffer = ReplayBuffer(1, limit=3)
    buffer.append(batch(10, 11))
    assert names(buffer) == [10, 11]
    buffer.append(batch(12, 13))
    assert names(buffer) == [11, 12, 13]
    buffer.append(batch(14, 15, 16, 17))  # one batch larger than the limit
    assert names(buffer) == [15, 16, 17]


def test_limit_0_keeps_all_and_clear_forgets_all():
    buffer = ReplayBuffer(1)
    buffer.extend(batch(i) for i in range(30))
    assert names(buffer) == list(range(30))
    buffer.clear()
    assert len(buffer) == 0


def test_samples_are_different_rows_in_one_padded_batch():
    buffer = ReplayBuffer(3)
    buffer.extend([batch(10, 11, length=1), batch(12, length=4)])
    random.seed(0)
    for _ in range(5):
        sample = buffer.sample()
        assert sample.sequences.shape == (3, 2 + 4)
        assert sorted(sample.sequences[:, -4].tolist()) == [10, 11, 12]


def test_sampling_from_too_few_rows_says_so():
    buffer = ReplayBuffer(3)
    buffer.append(batch(1, 2))
    with pytest.raises(ValueError, match="holds 2 samples, fewer than 3"):
        buffer.sample()


def test_only_advantages_are_whitened():
    buffer = ReplayBuffer(1)
    with pytest.raises(ValueError, match="'returns'"):
        buffer.normalize("returns", FakeStrategy())


def test_rows_are_found_by_their_number():
    buffer = ReplayBuffer(1)
    buffer.append(batch(1, 2))
    assert buffer[1] is buffer.items[1]
