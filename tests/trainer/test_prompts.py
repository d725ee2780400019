"""The order of the prompts of an episode; where it starts."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from lightppo.plugins.supervised.rank_samples import RankSampler
from lightppo.trainer.prompts import EpisodePrompts, RolloutBatchSampler


def episode(dataloader, number: int, consumed_prompts: int) -> list[tuple[list, bool]]:
    """Its batches, each with whether it is the last."""
    prompts = EpisodePrompts(dataloader, number, consumed_prompts, list)
    found = []
    while not prompts.exhausted:
        batch = prompts.take()
        found.append((batch, prompts.exhausted))
    assert prompts.taken == sum(len(batch) for batch, _ in found)
    return found


def loader(
    batch_size: int = 4, rank: int = 0, world_size: int = 1, samples: int = 10
) -> DataLoader:
    sampler = RolloutBatchSampler(samples, batch_size, rank=rank, world_size=world_size, seed=1)
    return DataLoader(range(samples), batch_sampler=sampler, collate_fn=list)


def test_the_last_batch_is_marked():
    batches = episode(loader(), 0, 0)
    assert [(len(batch), last) for batch, last in batches] == [(4, False), (4, False), (2, True)]
    assert sorted(i for batch, _ in batches for i in batch) == list(range(10))
    assert episode([["only"]], 0, 0) == [(["only"], True)]


def test_an_episode_goes_on_where_it_was_left():
    whole = episode(loader(), 3, 0)
    assert episode(loader(), 3, 4) == whole[1:]
    assert episode(loader(), 3, 8) == whole[2:]
    again = loader()
    episode(again, 2, 8)
    assert episode(again, 3, 0) == whole  # a resumed position counts once


def test_episodes_have_orders_of_their_own():
    first, second, again = (episode(loader(), number, 0) for number in (0, 1, 0))
    assert first == again != second


def test_a_resumed_run_may_share_the_prompts_out_over_other_ranks():
    def rest(world_size: int) -> list[set[int]]:
        shares = [episode(loader(rank=r, world_size=world_size), 1, 4) for r in range(world_size)]
        return [{i for batch, _ in step for i in batch} for step in zip(*shares)]

    assert rest(1) == rest(2)


def test_position_goes_to_a_sampler_too():
    sampler = RankSampler(range(10), 2, 0, seed=1)
    batches = DataLoader(range(10), batch_size=2, sampler=sampler, collate_fn=list)
    whole = episode(batches, 1, 0)
    assert [len(batch) for batch, _ in whole] == [2, 2, 1]
    assert episode(batches, 1, 4) == whole[1:]  # 4 prompts over 2 ranks: one batch of 2 here


def test_torchs_own_sampler_is_reshuffled_and_cannot_resume():
    sampler = DistributedSampler(range(6), num_replicas=2, rank=0, seed=1)
    batches = DataLoader(range(6), batch_size=3, sampler=sampler, collate_fn=list)
    first, second, again = (episode(batches, number, 0) for number in (0, 1, 0))
    assert first == again != second
    with pytest.raises(ValueError, match="set_epoch"):
        episode(batches, 0, 3)


def test_any_iterable_of_batches_starts_from_its_beginning_only():
    assert episode([["a"], ["b"]], 5, 0) == [(["a"], False), (["b"], True)]
    with pytest.raises(ValueError, match=r"strategy\.setup_dataloader"):
        episode([["a"], ["b"]], 0, 1)


def test_an_empty_dataloader_is_an_error():
    with pytest.raises(ValueError, match="episode 3"):
        episode([], 2, 0)
