"""``trainer.reward_source = …`` on a trainer that was built."""

from __future__ import annotations

from typing import Any

import pytest
from support.runs import trained_rows

from lightppo import PPOTrainer
from lightppo.rewards import FunctionReward

pytestmark = pytest.mark.usefixtures("world")


def always(score: float) -> Any:
    def reward(queries, prompts, labels):
        return [score] * len(queries)

    return reward


@pytest.mark.parametrize(
    "options", [{}, {"async_rewards": True, "micro_rollout_batch_size": 2}], ids=["after", "async"]
)
def test_what_follows_is_scored_by_another_source(make_config, assets, options):
    config = make_config(
        total_training_steps=1, eval_data=assets["prompt_data"], eval_steps=1, **options
    )
    trainer = PPOTrainer.from_config(config)
    trainer.reward_source = always(7.0)
    assert trainer.reward_source.name == "reward"
    trainer.fit()
    assert [row["rollout/reward"] for row in trained_rows(config)] == [7.0]
    assert trainer.evaluation.result["eval/reward"] == 7.0


def test_evaluations_with_a_source_of_their_own_keep_it(make_config, assets):
    rewards = {"reward_fn": always(1.0), "eval_reward_fn": always(2.0)}
    trainer = PPOTrainer.from_config(make_config(eval_data=assets["prompt_data"], **rewards))
    trainer.reward_source = always(7.0)
    assert trainer.evaluator.reward_source is not trainer.reward_source
    trainer.close()


def test_all_sources_are_closed_with_the_trainer(make_config):
    class Source(FunctionReward):
        closed = 0

        def close(self):
            self.closed += 1

    first, second = Source(always(1.0)), Source(always(2.0))
    trainer = PPOTrainer.from_config(make_config(reward_fn=first))
    trainer.reward_source = second
    assert (first.closed, second.closed) == (0, 0)  # the second may call the first
    trainer.close()
    assert (first.closed, second.closed) == (1, 1)


def test_what_is_no_source_is_refused(make_config):
    trainer = PPOTrainer.from_config(make_config())
    before = trainer.reward_source
    with pytest.raises(ValueError, match=r"reward_source: 7 is neither a function nor a source"):
        trainer.reward_source = 7
    assert trainer.reward_source is before
    trainer.close()
