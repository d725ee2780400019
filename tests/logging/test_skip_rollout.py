"""Rollouts in files: replay."""

from __future__ import annotations

import pytest
from support.fakes import FakeEngine, FakeStrategy, on_ranks

from lightppo.data.records import Prompt
from lightppo.errors import ConfigError
from lightppo.logging.samples import RolloutReplay
from lightppo.rollout.engine import SamplingParams

PROMPTS = [
    Prompt("a", [1], label={"answer": 3}, index=0, extra={"level": 2}),
    Prompt("b", [2, 3], index=1),
]


def sampled(prompts=PROMPTS):
    rollouts = FakeEngine().generate(prompts, SamplingParams(n=2))
    for rollout in rollouts:
        rollout.log_probs = [-0.1, -1 / 3]
    return rollouts


def never() -> list:
    raise AssertionError("sampled again")


def test_rollouts_are_replayed_by_step_and_batch(tmp_path):
    replay = RolloutReplay(tmp_path, FakeStrategy())
    first = replay.rollouts(PROMPTS, 1, 0, sampled)
    assert replay.rollouts(PROMPTS, 1, 0, never) == first == sampled()
    # another run
    assert RolloutReplay(tmp_path, FakeStrategy()).rollouts(PROMPTS, 1, 0, never) == first
    other = replay.rollouts(PROMPTS[1:], 1, 1, lambda: sampled(PROMPTS[1:]))
    assert replay.rollouts(PROMPTS[1:], 1, 1, never) == other != first
    with pytest.raises(AssertionError, match="sampled again"):
        replay.rollouts(PROMPTS, 2, 0, never)


def test_rewards_are_not_replayed(tmp_path):
    replay = RolloutReplay(tmp_path, FakeStrategy())
    for rollout in replay.rollouts(PROMPTS, 1, 0, sampled):
        rollout.reward = 1.0
    assert {r.reward for r in replay.rollouts(PROMPTS, 1, 0, never)} == {None}


def test_rollouts_of_other_prompts_are_refused(tmp_path):
    replay = RolloutReplay(tmp_path, FakeStrategy())
    replay.rollouts(PROMPTS, 1, 0, sampled)
    with pytest.raises(ConfigError, match=r"step1_batch0_rank0of1.json"):
        replay.rollouts(PROMPTS[::-1], 1, 0, never)


def test_all_ranks_sample_where_one_has_no_file(tmp_path):
    calls = []

    def run(strategy):
        replay = RolloutReplay(tmp_path, strategy)
        return replay.rollouts(PROMPTS, 1, 0, lambda: (calls.append(strategy.rank), sampled())[1])

    on_ranks(2, run)
    assert sorted(calls) == [0, 1]
    on_ranks(2, run)
    assert len(calls) == 2
    (tmp_path / "step1_batch0_rank1of2.json").unlink()
    on_ranks(2, run)
    assert sorted(calls) == [0, 0, 1, 1]


def test_prompts_that_are_no_json_are_named(tmp_path):
    odd = [Prompt("a", [1], extra={"when": object()})]
    with pytest.raises(ConfigError, match=r"--skip_rollout .*the prompts of step 3"):
        RolloutReplay(tmp_path, FakeStrategy()).rollouts(odd, 3, 0, lambda: sampled(odd))
    assert list(tmp_path.iterdir()) == []
