"""The filter of prompts at the end of an episode: which leave, how many, and what is remembered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.fakes import FakeStrategy, make_rollout, on_ranks

from lightppo.checkpoint.run_checkpointer import with_present_names
from lightppo.config import PPOConfig
from lightppo.errors import ConfigError
from lightppo.trainer.loop import TrainerState
from lightppo.trainer.prompts import (
    PromptFilter,
    RolloutBatchSampler,
    leave_out,
    prompt_filter,
    too_well_solved,
)


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


class Run(SimpleNamespace):
    """A trainer as far as the filter looks at it."""

    def step(self, own: PromptFilter, scores: dict[int, float], ends: bool = False) -> float:
        scored = [make_rollout(index=index, reward=score) for index, score in scores.items()]
        own.on_rollouts(self, 1, SimpleNamespace(scored=scored))
        self.state.finish_step(2, ends)
        return own.on_step_end(self, 1, {})["rollout/left_out_prompts"]


def run_of(prompts, strategy=None) -> Run:
    strategy = strategy or FakeStrategy()
    return Run(prompts=prompts, state=TrainerState(), strategy=strategy, only_evaluates=False)


def test_prompts_leave_at_the_end_of_the_episode():
    rows = [10, 20, 30, 40]
    own, run = PromptFilter(0.5, 0.5), run_of(loader(rows))
    sampler = run.prompts.batch_sampler
    own.on_start(run)
    assert run.step(own, {10: 1.0, 20: 0.0}) == 0
    assert own.scores == {10: 1.0, 20: 0.0}
    assert sampler.epoch_size == 4
    assert run.step(own, {30: 0.75, 40: 0.9}, ends=True) == 2
    assert own.state_dict() == {"scores": {}, "left_out": [10, 40]}  # at most half
    assert sampler.order() == [1, 2]
    # the share is of those that are left
    assert run.step(own, {20: 1.0, 30: 1.0}, ends=True) == 3
    assert sampler.order() == [2]
    assert run.strategy.printed[-1] == (
        "--dataset_filter_threshold 0.5: 1 prompts left out after episode 2, 1 stay"
    )

    again, resumed = PromptFilter(0.5, 0.5), run_of(loader(rows))
    again.load_state_dict(own.state_dict())
    again.on_start(resumed)
    assert resumed.prompts.batch_sampler.order() == [2]


def test_ranks_put_their_scores_together():
    def steps(strategy):
        own, run = PromptFilter(0.5, 0.5), run_of(loader([10, 20, 30, 40]), strategy)
        own.on_start(run)
        run.step(own, {10: 1.0, 30: 0.0} if strategy.rank == 0 else {20: 0.9, 40: 0.8}, ends=True)
        return own.left_out, run.prompts.batch_sampler.order()

    assert on_ranks(2, steps) == [([10, 20], [2, 3])] * 2


def test_a_run_without_a_threshold_has_no_filter():
    assert prompt_filter(SimpleNamespace(config=PPOConfig())) is None


def test_a_dataloader_that_cannot_leave_prompts_out_is_refused():
    with pytest.raises(ConfigError, match="--dataset_filter_threshold"):
        PromptFilter(0.5, 0.1).on_start(run_of([["a"]]))


def test_an_older_checkpoint_has_its_state_in_that_of_the_trainer():
    older = {"trainer": {"episode": 1, "episode_scores": {3: 1.0}, "left_out_prompts": [4]}}
    saved = with_present_names(older)
    assert saved["trainer"] == {"episode": 1}
    assert saved["prompt_filter"] == {"scores": {3: 1.0}, "left_out": [4]}


def test_what_is_left_out_stays_out():
    sampler = RolloutBatchSampler(10, 4)
    leave_out(sampler, [2, 7])
    leave_out(sampler, [2, 9])
    assert sampler.left_out == {2, 7, 9}


@pytest.mark.parametrize(
    ("positions", "message"), [([10], r"of 10: \[10\]"), (range(10), "10 prompts")]
)
def test_what_cannot_be_left_out(positions, message):
    with pytest.raises(ValueError, match=message):
        leave_out(RolloutBatchSampler(10, 4), positions)
