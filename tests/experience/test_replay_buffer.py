"""ReplayBuffer: rows in, limit, batches out, whitening over ranks."""

from __future__ import annotations

import random

import pytest
import torch
from support.fakes import FakeStrategy, make_rollout, on_ranks

from lightppo.experience.batching import ReplayBuffer
from lightppo.experience.experience import Experience


def batch(*first_ids: int, length: int = 2) -> Experience:
    """A row per number, with which its response begins."""
    return Experience.from_rollouts(
        [make_rollout([1, 2], [first, *range(length - 1)]) for first in first_ids]
    )


def names(buffer: ReplayBuffer) -> list[int]:
    return [int(item.sequences[0, -item.num_actions]) for item in buffer.items]


def with_advantages(
    rows: list[list[float]], masks: list[list[int]] | None = None
) -> list[Experience]:
    items = []
    for i, row in enumerate(rows):
        item = batch(i, length=len(row))
        item.advantages = torch.tensor([row])
        if masks is not None:
            item.action_mask = torch.tensor([masks[i]]).bool()
        items.append(item)
    return items


def test_batches_become_rows_without_padding():
    buffer = ReplayBuffer(2)
    experience = Experience.from_rollouts([make_rollout([1], [2, 3, 4]), make_rollout([5, 6], [7])])
    buffer.append(experience)
    buffer.extend([batch(8), batch(9)])
    assert len(buffer) == 4
    assert [item.sequences.tolist() for item in buffer.items[:2]] == [[[1, 2, 3, 4]], [[5, 6, 7]]]
    assert buffer[1] is buffer.items[1]


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


@pytest.mark.parametrize(("offload", "moves"), [(True, ["cpu"]), (False, [])])
def test_offload_moves_what_is_put_in_to_the_cpu(offload, moves, monkeypatch):
    seen = []
    monkeypatch.setattr(
        Experience, "to_device", lambda self, device: seen.append(str(device)) or self
    )
    ReplayBuffer(1, cpu_offload=offload).append(batch(1, 2))
    assert seen == moves


def test_batches_come_out_on_the_training_device():
    buffer = ReplayBuffer(2, device="meta")
    buffer.append(batch(1, 2))
    sample = buffer.sample()
    assert sample.sequences.device.type == sample.info["response_length"].device.type == "meta"
    assert buffer[0].sequences.device.type == "cpu"


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


# Trained tokens 1 2 3 6: mean 12/4 = 3, deviations -2 -1 0 3, variance (4 + 1 + 0 + 9)/4 = 3.5.
WHITENED = {1.0: -2 / 3.5**0.5, 2.0: -1 / 3.5**0.5, 3.0: 0.0, 6.0: 3 / 3.5**0.5}


def test_advantages_are_whitened_over_the_trained_tokens_of_all_rows():
    buffer = ReplayBuffer(1)
    buffer.items = with_advantages([[1, 999, 2], [3], [6, -999]], [[1, 0, 1], [1], [1, 0]])
    buffer.normalize("advantages", FakeStrategy())
    expected = [[WHITENED[1], 0, WHITENED[2]], [WHITENED[3]], [WHITENED[6], 0]]
    for item, row in zip(buffer.items, expected):
        torch.testing.assert_close(item.advantages, torch.tensor([row]))


def test_whitening_is_over_all_ranks_also_one_without_samples():
    shares = [[[1.0], [2.0]], [], [[3.0, 6.0]]]

    def whiten(strategy: FakeStrategy) -> list[float]:
        buffer = ReplayBuffer(1)
        buffer.items = with_advantages(shares[strategy.rank])
        buffer.normalize("advantages", strategy)
        return [x for item in buffer.items for x in item.advantages.flatten().tolist()]

    whitened = on_ranks(3, whiten)
    assert whitened[0] == pytest.approx([WHITENED[1], WHITENED[2]])
    assert whitened[1] == []
    assert whitened[2] == pytest.approx([WHITENED[3], WHITENED[6]])


def test_whitening_can_leave_the_scale_alone():
    buffer = ReplayBuffer(1)
    buffer.items = with_advantages([[1, 2], [3, 6]])
    buffer.normalize("advantages", FakeStrategy(), divide_std=False)
    assert [item.advantages.tolist() for item in buffer.items] == [[[-2, -1]], [[0, 3]]]


def test_only_advantages_are_whitened():
    buffer = ReplayBuffer(1)
    with pytest.raises(ValueError, match="'returns'"):
        buffer.normalize("returns", FakeStrategy())
