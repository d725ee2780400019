"""RolloutSampler: seeds of steps, unscored samples, groups that become too small."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
from support.fakes import FakeEngine, FakeReward

from lightppo.data.records import Prompt
from lightppo.errors import RewardError
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampler import RolloutSampler, seed_of_step

PROMPTS = [Prompt(f"prompt {i}", [i + 1], index=i) for i in range(3)]


def sampler(
    table: dict[tuple[int, int], float], n: int = 2, min_group_size: int = 1, seed: int = 5
) -> RolloutSampler:
    return RolloutSampler(
        FakeEngine(),
        FakeReward(table),
        SamplingParams(n=n, temperature=0.7, seed=seed),
        min_group_size,
    )


def everything(n: int) -> dict[tuple[int, int], float]:
    return {(i, j): 10.0 * i + j for i in range(3) for j in range(n)}


def kept(batch) -> list[tuple[int, int, float]]:
    return [(r.prompt.index, r.sample_index, r.reward) for r in batch.rollouts]


def test_n_samples_of_a_prompt_follow_each_other():
    source = sampler(everything(2))
    batch = source.score(source.generate(PROMPTS, step=1))
    assert kept(batch) == [(0, 0, 0), (0, 1, 1), (1, 0, 10), (1, 1, 11), (2, 0, 20), (2, 1, 21)]
    assert (batch.counts["unscored"], batch.counts["small_group"]) == (0, 0)


def test_a_rank_without_prompts_still_calls_engine_and_source():
    source = sampler(everything(2))
    batch = source.score(source.generate([], step=1))
    assert batch.rollouts == []
    assert [indices for indices, _ in source.engine.calls] == [[]]


def test_each_step_samples_with_a_seed_of_its_own():
    source = sampler({})
    for step in (1, 2, 1):
        source.generate(PROMPTS, step)
    first, second, again = (sampling for _, sampling in source.engine.calls)
    assert first == again
    assert first.seed != second.seed
    assert (first.n, first.temperature) == (2, 0.7)


def test_no_two_steps_of_near_seeds_share_a_seed():
    seeds = {seed_of_step(seed, step) for seed in range(20) for step in range(500)}
    assert len(seeds) == 20 * 500


def test_unscored_samples_leave_their_group_and_are_counted(caplog):
    table = everything(2)
    del table[0, 1]
    source = sampler(table)
    batch = source.score(source.generate(PROMPTS, 1))
    assert kept(batch) == [(0, 0, 0), (1, 0, 10), (1, 1, 11), (2, 0, 20), (2, 1, 21)]
    assert (batch.counts["unscored"], batch.counts["small_group"]) == (1, 0)
    assert "table left 1 of 6 samples unscored; 0 more" in caplog.text


def test_a_group_that_becomes_too_small_leaves_as_a_whole(caplog):
    table = everything(3)
    for sample in [(0, 0), (1, 0), (1, 2), (2, 0), (2, 1), (2, 2)]:
        del table[sample]
    source = sampler(table, n=3, min_group_size=2)
    batch = source.score(source.generate(PROMPTS, 1))
    # Prompt 0 keeps 2 of 3; prompt 1 has 1 left, too few; prompt 2 has none.
    assert kept(batch) == [(0, 1, 1), (0, 2, 2)]
    assert (batch.counts["unscored"], batch.counts["small_group"]) == (6, 1)
    assert "table left 6 of 9 samples unscored; 1 more left out" in caplog.text


def test_nothing_is_said_where_all_is_scored(caplog):
    source = sampler(everything(2), min_group_size=2)
    assert len(source.score(source.generate(PROMPTS, 1)).rollouts) == 6
    assert caplog.text == ""


def test_a_score_that_is_no_number_is_an_error_and_changes_no_sample():
    source = sampler({**everything(2), (1, 0): "high"})
    rollouts = source.generate(PROMPTS, 1)
    with pytest.raises(
        RewardError, match=r"table: the score of sample 2 \(prompt row 1, sample_index 0"
    ):
        source.score(rollouts)
    assert all(r.reward is None for r in rollouts)


def test_a_score_that_is_not_finite_keeps_the_samples_together_for_the_step_that_is_left_out():
    source = sampler({**everything(2), (1, 0): float("nan")}, min_group_size=2)
    batch = source.score(source.generate(PROMPTS, 1))
    assert batch.not_finite.startswith("table: the score of sample 2 (prompt row 1, sample_index 0")
    assert len(batch.rollouts) == 6
    # none of them is trained on by mistake
    assert all(math.isnan(r.reward) for r in batch.rollouts)
    assert batch.scored == []


def test_the_greedy_answer_is_sampled_and_scored_once_for_all_samples_of_its_prompt():
    """ReMax: one greedy answer to each prompt, the baseline of all its samples."""
    scored: list[int] = []

    class Counting(FakeReward):
        def score(self, rollouts):
            scored.append(len(rollouts))
            return super().score(rollouts)

    sampling = SamplingParams(n=3, temperature=0.7, seed=5)
    timed = []

    def timer(phase: str):
        timed.append((phase, len(source.engine.calls)))  # before the greedy call
        return nullcontext()

    source = RolloutSampler(
        FakeEngine(), Counting(everything(3)), sampling, greedy_baseline=True, timer=timer
    )
    rollouts = source.generate(PROMPTS, 1)
    assert timed == [("greedy", 1)]
    (_, sampled), (_, greedy) = source.engine.calls
    assert (sampled.n, sampled.temperature) == (3, 0.7)
    assert (greedy.n, greedy.temperature) == (1, 0.0)
    assert [r.baseline.prompt.index for r in rollouts] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len({id(r.baseline) for r in rollouts}) == 3
    source.score(rollouts)
    assert scored == [9 + 3]
    assert [r.baseline.reward for r in rollouts] == [0, 0, 0, 10, 10, 10, 20, 20, 20]


def test_samples_without_a_scored_baseline_are_left_out():
    # also the greedy answer to prompt 1, whose sample number is 0
    table = {**everything(2), (1, 0): None}
    source = RolloutSampler(
        FakeEngine(), FakeReward(table), SamplingParams(n=2), greedy_baseline=True
    )
    batch = source.score(source.generate(PROMPTS, 1))
    assert kept(batch) == [(0, 0, 0), (0, 1, 1), (2, 0, 20), (2, 1, 21)]
    assert (batch.counts["unscored"], batch.counts["small_group"]) == (1, 1)


def test_every_batch_is_checked_after_it_is_scored():
    seen = []
    source = RolloutSampler(
        FakeEngine(),
        FakeReward(everything(1)),
        SamplingParams(n=1),
        checks=[lambda rollouts: seen.append(("check", [r.reward for r in rollouts]))],
    )
    source.score(source.generate(PROMPTS, 1))
    assert seen == [("check", [0, 10, 20])]
