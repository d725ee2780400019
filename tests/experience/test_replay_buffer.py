"""ReplayBuffer: rows in, batches out, whitening over ranks."""

from __future__ import annotations

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
    buffer = ReplayBuffer()
    experience = Experience.from_rollouts([make_rollout([1], [2, 3, 4]), make_rollout([5, 6], [7])])
    buffer.append(experience)
    buffer.fill([batch(8), batch(9)])
    assert len(buffer) == 4
    assert [item.sequences.tolist() for item in buffer.items[:2]] == [[[1, 2, 3, 4]], [[5, 6, 7]]]


@pytest.mark.parametrize(("offload", "moves"), [(True, ["cpu"]), (False, [])])
def test_offload_moves_what_is_put_in_to_the_cpu(offload, moves, monkeypatch):
    seen = []
    monkeypatch.setattr(
        Experience, "to_device", lambda self, device: seen.append(str(device)) or self
    )
    ReplayBuffer(cpu_offload=offload).append(batch(1, 2))
    assert seen == moves


def test_batches_come_out_on_the_training_device():
    buffer = ReplayBuffer(device="meta")
    buffer.append(batch(1, 2))
    sample = buffer.collate_fn(buffer.items)
    assert sample.sequences.device.type == sample.info["response_length"].device.type == "meta"
    assert buffer.items[0].sequences.device.type == "cpu"


# Trained tokens 1 2 3 6: mean 12/4 = 3, deviations -2 -1 0 3, variance (4 + 1 + 0 + 9)/4 = 3.5.
WHITENED = {1.0: -2 / 3.5**0.5, 2.0: -1 / 3.5**0.5, 3.0: 0.0, 6.0: 3 / 3.5**0.5}


def test_advantages_are_whitened_over_the_trained_tokens_of_all_rows():
    buffer = ReplayBuffer()
    buffer.items = with_advantages([[1, 999, 2], [3], [6, -999]], [[1, 0, 1], [1], [1, 0]])
    buffer.whiten(FakeStrategy())
    expected = [[WHITENED[1], 0, WHITENED[2]], [WHITENED[3]], [WHITENED[6], 0]]
    for item, row in zip(buffer.items, expected):
        torch.testing.assert_close(item.advantages, torch.tensor([row]))


def test_whitening_is_over_all_ranks_also_one_without_samples():
    shares = [[[1.0], [2.0]], [], [[3.0, 6.0]]]

    def whiten(strategy: FakeStrategy) -> list[float]:
        buffer = ReplayBuffer()
        buffer.items = with_advantages(shares[strategy.rank])
        buffer.whiten(strategy)
        return [x for item in buffer.items for x in item.advantages.flatten().tolist()]

    whitened = on_ranks(3, whiten)
    assert whitened[0] == pytest.approx([WHITENED[1], WHITENED[2]])
    assert whitened[1] == []
    assert whitened[2] == pytest.approx([WHITENED[3], WHITENED[6]])


def test_whitening_can_leave_the_scale_alone():
    buffer = ReplayBuffer()
    buffer.items = with_advantages([[1, 2], [3, 6]])
    buffer.whiten(FakeStrategy(), divide_std=False)
    assert [item.advantages.tolist() for item in buffer.items] == [[[-2, -1]], [[0, 3]]]


def test_repeated_rows_come_after_all_others():
    buffer = ReplayBuffer()
    buffer.fill([batch(1, 2), batch(3)], repeated=[0, 2])
    assert names(buffer) == [1, 2, 3, 1, 3]
    assert buffer.items[3] is not buffer.items[0]
    buffer.clear()
    assert len(buffer) == 0
