"""BatchCollector: a step trains on its generation batch, or is left out on all ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.fakes import FakeEngine, FakeReward, FakeStrategy, on_ranks

from lightppo.data.records import Prompt
from lightppo.errors import RewardError
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampler import BatchCollector, RolloutSampler


def collector(scores, strategy=None, **options) -> BatchCollector:
    sampler = RolloutSampler(FakeEngine(), FakeReward(scores), SamplingParams(n=2))
    return BatchCollector(sampler, strategy or FakeStrategy(), **options)


def batch(*indices: int) -> SimpleNamespace:
    """The prompts of an episode of one batch."""
    return SimpleNamespace(take=lambda: [Prompt(f"p{i}", [i + 1], index=i) for i in indices])


def scores_of(*indices: int) -> dict[tuple[int, int], float]:
    return {(i, j): float(j) for i in indices for j in (0, 1)}


def test_a_step_trains_on_its_batch():
    own = collector(scores_of(0, 1, 2))
    step = own.collect(batch(0, 1, 2), 1)
    assert [r.prompt.index for r in step.rollouts] == [0, 0, 1, 1, 2, 2]
    assert (step.groups, step.surplus, step.repeated) == (3, 0, [])
    assert step.scored == step.rollouts
    counts = {"unscored": 0, "small_group": 0, "generated_samples": 6, "generated_tokens": 12}
    assert step.counts == counts | {"reward/failures": 0, "reward/timeouts": 0}
    assert own.strategy.collectives == 1


def test_functions_stand_around_sampling_each_around_those_before_it():
    calls = []

    def inner(prompts, step, number, sample):
        calls.append(("inner", [prompt.index for prompt in prompts], step, number))
        return sample()

    def outer(prompts, step, number, sample):
        calls.append("outer")
        return sample()[:2]  # of the first prompt

    step = collector(scores_of(0, 1), around=[inner, outer]).collect(batch(0, 1), 7)
    assert [r.prompt.index for r in step.rollouts] == [0, 0]
    assert calls == ["outer", ("inner", [0, 1], 7, 0)]


def test_an_engine_with_weights_of_its_own_sleeps_when_all_is_collected():
    own, slept = collector(scores_of(0)), []
    own.sampler.engine.keeps_weights = True
    own.sampler.engine.sleep = lambda: slept.append(len(own.sampler.engine.calls))
    own.collect(batch(0), 1)
    assert slept == [1]


def test_only_the_ranks_together_know_that_nothing_is_scored():
    def run(strategy, scores):
        try:
            return collector(scores, strategy).collect(batch(strategy.rank), 1).groups
        except RewardError as error:
            return str(error)

    assert on_ranks(2, lambda strategy: run(strategy, scores_of(1))) == [1, 1]
    message = "step 1: none of the samples was scored, so there is nothing to train on"
    assert on_ranks(2, lambda strategy: run(strategy, {})) == [message] * 2


def test_groups_that_are_too_small_are_nothing_to_train_on():
    own = collector({(0, 0): 1.0})
    own.sampler.min_group_size = 2
    with pytest.raises(RewardError, match="step 4: none of the samples was scored"):
        own.collect(batch(0), 4)


def test_a_score_that_is_not_finite_on_one_rank_leaves_the_step_out_on_all():
    def run(strategy):
        own = collector(scores_of(0, 1) | {(1, 0): float("nan")}, strategy)
        step = own.collect(batch(strategy.rank), 1)
        return step.groups, step.not_finite, len(step.rollouts), len(step.scored)

    first, second = on_ranks(2, run)
    assert first[1] == second[1]
    assert first[1].startswith("rank 1: table: the score of sample 0 (prompt row 1, sample_index 0")
    assert (first[0], first[2:]) == (0, (2, 2))
    assert (second[0], second[2:]) == (0, (2, 0))
