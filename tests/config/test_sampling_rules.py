"""Options of sampling: what None stands for, and what is refused when options are parsed."""

from __future__ import annotations

import pytest

from lightppo.config import PPOConfig
from lightppo.errors import ConfigError

SMALL = {"pretrain": "m", "prompt_data": "d", "reward_fn": "r.py", "rollout_batch_size": 8, "train_batch_size": 8}
GROUPS = {**SMALL, "n_samples_per_prompt": 4, "train_batch_size": 32}


def test_what_none_stands_for():
    s = PPOConfig.from_flat(GROUPS).resolved().sampling
    assert (s.generation_size, s.gen_batch_size, s.fire_temperature) == (4, 8, None)
    s = PPOConfig.from_flat(GROUPS, generation_size=6, gen_batch_size=16, fire_sampling=True).resolved().sampling
    assert (s.generation_size, s.gen_batch_size, s.fire_temperature) == (6, 16, 10.0)
    PPOConfig.from_flat(GROUPS, generation_size=6, gen_batch_size=16, best_of_n_tie="longer").validate(2)
    PPOConfig.from_flat(GROUPS, dynamic_sampling=True, gen_batch_size=2, filter_metric="acc").resolved().validate(2)
    PPOConfig.from_flat(SMALL, dynamic_sampling=True, filter_range=(0, 1)).validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_size": 3}, "--generation_size 3 samples fewer than --n_samples_per_prompt 4"),
        ({"best_of_n_tie": "longer"}, "--best_of_n_tie chooses nothing unless --generation_size is above"),
        ({"generation_size": 6, "n_samples_per_prompt": 1, "temperature": 0.0, "train_batch_size": 8},
         "greedy rollouts give the same answer 6 times"),
        ({"gen_batch_size": 9}, "--gen_batch_size 9 is not divisible by the 2 ranks"),
        ({"gen_batch_size": 4}, "--gen_batch_size 4 is less than --rollout_batch_size 8"),
        ({"gen_batch_size": 16, "buffer_limit": 16}, "--buffer_limit 16 could lose samples"),
        ({"dynamic_sampling": True, "buffer_limit": 31}, "one rank may hold all 32 of a step"),
        ({"filter_metric": "acc"}, "--filter_metric has no effect without --dynamic_sampling"),
        ({"filter_range": (0.1, 0.9)}, "--filter_range has no effect without --dynamic_sampling"),
        ({"max_num_gen_batches": 3}, "--max_num_gen_batches has no effect without"),
        ({"on_exhausted": "raise"}, "--on_exhausted has no effect without"),
        ({"dynamic_sampling": True, "n_samples_per_prompt": 1, "train_batch_size": 8}, "a group of one never does"),
        ({"dynamic_sampling": True, "filter_range": (0.9, 0.1)}, "--filter_range 0.9 0.1 is empty"),
        ({"dynamic_sampling": True, "filter_metric": " "}, "--filter_metric is empty"),
        ({"dynamic_sampling": True, "max_num_gen_batches": 0, "on_exhausted": "reuse"}, "reuse never acts with"),
        ({"dataset_max_filter_percentage": 0.5}, "has no effect without --dataset_filter_threshold"),
        ({"dataset_filter_threshold": 0.5, "dataset_max_filter_percentage": 1.0}, "out of range: it must be >0 <1"),
        ({"fire_temperature": 5.0}, "--fire_temperature has no effect without --fire_sampling"),
        ({"fire_sampling": True, "do_sample": False, "n_samples_per_prompt": 1, "train_batch_size": 8},
         "greedy rollouts have no temperature"),
        ({"skip_rollout_reuse": True}, "--skip_rollout_reuse needs --skip_rollout DIR"),
        ({"skip_rollout_reuse": True, "skip_rollout": "d", "gen_batch_size": 16}, "the same groups: leave out"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError) as error:
        PPOConfig.from_flat(GROUPS | options).validate(2)
    assert message in str(error.value)
