"""The filter of prompts at the end of an episode: which leave, how many, and what is remembered."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
from support.fakes import FakeStrategy, on_ranks

from lightppo.errors import ConfigError
from lightppo.trainer.loop import TrainerState
from lightppo.trainer.prompts import PromptFilter, RolloutBatchSampler, too_well_solved


def loader(rows: list[int]) -> SimpleNamespace:
    """A dataloader whose prompts come from these rows."""
    dataset = SimpleNamespace(positions_of=lambda indices: [rows.index(i) for i in indices])
    return SimpleNamespace(
        dataset=dataset, batch_sampler=RolloutBatchSampler(len(rows), 2, shuffle=False)
    )


def test_the_highest_go_first_and_at_most_the_share():
    scores = {7: 0.9, 1: 1.0, 4: 0.8, 9: 0.95, 2: 0.1}
    assert too_well_solved(scores, 0.85, 0.99, 5) == [1, 9, 7]
    assert too_well_solved(scores, 0.85, 0.5, 5) == [1, 9]  # half of 5, rounded down
    assert too_well_solved(scores, 0.9, 0.99, 5) == [1, 9]  # 0.9 is not above itself
    assert too_well_solved(scores, 0.85, 0.1, 5) == []
    assert too_well_solved({5: 1.0, 3: 1.0, 4: 1.0}, 0.5, 0.5, 4) == [3, 4]
    assert too_well_solved({}, 0.5, 0.5, 4) == []


def test_prompts_leave_at_the_end_of_the_episode():
    rows = [10, 20, 30, 40]
    prompts, state = loader(rows), TrainerState()
    own = PromptFilter(0.5, 0.5, FakeStrategy())
    assert own.after_step(prompts, state, {10: 1.0, 20: 0.0}, False) == {"left_out_prompts": 0}
    assert state.episode_scores == {10: 1.0, 20: 0.0}
    assert prompts.batch_sampler.epoch_size == 4
    assert own.after_step(prompts, state, {30: 0.75, 40: 0.9}, True) == {"left_out_prompts": 2}
    assert state.left_out_prompts == [10, 40]  # at most half
    assert prompts.batch_sampler.order() == [1, 2]
    state.finish_step(2, True)
    assert state.episode_scores == {}
    # the share is of those that are left
    assert own.after_step(prompts, state, {20: 1.0, 30: 1.0}, True) == {"left_out_prompts": 3}
    assert prompts.batch_sampler.order() == [2]
    assert own.strategy.printed[-1] == (
        "--dataset_filter_threshold 0.5: 1 prompts left out after episode 2, 1 stay"
    )

    again = loader(rows)
    own.restore(again, TrainerState(**asdict(state)))
    assert again.batch_sampler.order() == [2]


def test_ranks_put_their_scores_together():
    def run(strategy):
        prompts, state = loader([10, 20, 30, 40]), TrainerState()
        scores = {10: 1.0, 30: 0.0} if strategy.rank == 0 else {20: 0.9, 40: 0.8}
        PromptFilter(0.5, 0.5, strategy).after_step(prompts, state, scores, True)
        return state.left_out_prompts, prompts.batch_sampler.order()

    assert on_ranks(2, run) == [([10, 20], [2, 3])] * 2


def test_without_a_threshold_nothing_is_asked_of_the_dataloader():
    own, state = PromptFilter(None, 0.1, FakeStrategy()), TrainerState()
    own.restore([["a"]], state)
    assert own.after_step([["a"]], state, {0: 1.0}, True) == {}
    assert (state.episode_scores, own.strategy.collectives) == ({}, 0)


def test_a_dataloader_that_cannot_leave_prompts_out_is_refused():
    with pytest.raises(ConfigError, match="--dataset_filter_threshold"):
        PromptFilter(0.5, 0.1, FakeStrategy()).restore([["a"]], TrainerState())
