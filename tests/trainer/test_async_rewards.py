"""--async_rewards in a trainer: the scores of a run without it, of samples scored while others were generated."""

from __future__ import annotations

import threading

import pytest
from support.fakes import FakeEngine
from support.runs import numbers

from lightppo import PPOTrainer
from lightppo.errors import ConfigError

pytestmark = pytest.mark.usefixtures("world")


def whole_batch(queries, prompts, labels):
    return [float(len(query)) for query in queries]


def one_sample(solution_str, ground_truth):
    return float(len(solution_str))


@pytest.mark.parametrize("function", [whole_batch, one_sample])
def test_the_run_is_the_same(make_config, tmp_path, function):
    def trainer_of(name: str, **options) -> PPOTrainer:
        paths = {"save_path": str(tmp_path / name), "ckpt_path": str(tmp_path / f"{name}_ckpt")}
        options |= {
            "advantage_estimator": "remax",
            "micro_rollout_batch_size": 2,
            "total_training_steps": 2,
            "reward_fn": function,
        }
        return PPOTrainer.from_config(make_config(**options, **paths))

    after, beside = trainer_of("after"), trainer_of("beside", async_rewards=True)
    scored = threading.Semaphore(0)
    score = beside.reward_source.score
    scorer = beside.sampler.sampler.scorer
    scorer.source.score = lambda rollouts: scored.release() or score(rollouts)
    submit, parts = scorer.submit, []

    def submit_and_wait(rollouts):
        parts.append([rollout.prompt.index for rollout in rollouts])
        submit(rollouts)
        assert scored.acquire(timeout=60)  # each part is scored before the next is generated

    scorer.submit = submit_and_wait
    for trainer in (after, beside):
        trainer.fit()
    kinds = ("rollout/", "train/", "reward/")
    assert numbers(beside.config, kinds) == numbers(after.config, kinds)
    assert len(parts) >= 4
    has_greedy_answers = all(part[::2] == part[1::2] for part in parts)
    assert has_greedy_answers == (function is whole_batch)  # the others are scored as they come


def test_scores_may_take_as_long_as_ranks_wait_for_each_other(make_config):
    """``--dist_timeout`` is in minutes, the wait for scores in seconds."""
    trainer = PPOTrainer.from_config(make_config(async_rewards=True, dist_timeout=3))
    assert trainer.sampler.sampler.scorer.timeout == 180


def test_an_engine_that_gives_all_at_once_is_refused(trainer_with):
    with pytest.raises(ConfigError, match="--async_rewards"):
        trainer_with(rollout_engine=FakeEngine(), async_rewards=True)
