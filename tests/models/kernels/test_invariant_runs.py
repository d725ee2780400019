"""Runs in bfloat16: the first ratio is 1 to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.runs import logged

from lightppo import Callback, PPOTrainer
from lightppo.errors import ConfigError

pytestmark = pytest.mark.usefixtures("world")

GROUPS = {
    "bf16": True,
    "zero_stage": 1,
    "advantage_estimator": "grpo",
    "n_samples_per_prompt": 3,
    "total_training_steps": 1,
    "generate_max_len": 16,
    "micro_rollout_batch_size": 3,
    "packing_samples": True,
}


class Passes(Callback):
    """The log probs of the first optimizer step's passes beside those of before."""

    def __init__(self) -> None:
        self.of_rollout: list[bool] = []
        self.of_experience: list[bool] = []

    def on_micro_batch(self, run: Any, experience: Any, log_probs: Any, entropy: Any) -> None:
        mask = experience.action_mask
        for kept, before in (
            (self.of_rollout, experience.rollout_log_probs),
            (self.of_experience, experience.action_log_probs),
        ):
            if before is not None:
                kept.append(torch.equal(before[mask], log_probs[mask]))


@pytest.mark.parametrize("share_prompts", [True, pytest.param(False, marks=pytest.mark.long)])
def test_sampling_experience_and_update_agree(share_prompts, make_config):
    """The reward compares with a reference, so that a pass over the rollout is made, in other micro batches."""
    config = make_config(
        **GROUPS,
        batch_invariant=True,
        share_prompts=share_prompts,
        init_kl_coef=0.01,
        use_kl_in_reward=True,
        max_tokens_per_micro_batch=40,
    )
    passes = Passes()
    trainer = PPOTrainer.from_config(config, callbacks=[passes])
    trainer.fit()
    assert len(passes.of_rollout) == len(passes.of_experience) > 1
    assert all(passes.of_rollout)
    assert all(passes.of_experience)
    row = next(row for row in logged(config) if "train/ratio" in row)
    assert row["rollout/logp_diff_max"] == row["train/approx_kl"] == row["rollout/kl"] == 0
    assert row["train/ratio"] == pytest.approx(1, abs=1e-6)  # a mean, summed in float32


def test_the_log_probs_of_sampling_do_for_old_ones(make_config):
    config = make_config(**GROUPS, batch_invariant=True, init_kl_coef=0.0, old_log_probs="rollout")
    passes = Passes()
    PPOTrainer.from_config(config, callbacks=[passes]).fit()
    assert passes.of_experience
    assert all(passes.of_experience)


def test_one_step_takes_old_log_probs_from_the_pass_that_made_them(make_config):
    """Without the option, too: there is no other pass."""
    config = make_config(**GROUPS, init_kl_coef=0.0)
    passes = Passes()
    PPOTrainer.from_config(config, callbacks=[passes]).fit()
    assert not passes.of_experience
    row = next(row for row in logged(config) if "train/ratio" in row)
    assert row["train/approx_kl"] == 0
    assert row["train/clip_ratio"] == 0
    assert row["train/ratio"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        {"torch_compile": True},
        {"attn_implementation": "eager"},
        {"hf_cuda_graphs": True},
        {"use_liger_kernel": True},
    ],
)
def test_what_it_does_not_go_with(other, make_config):
    with pytest.raises(ConfigError, match=f"--batch_invariant .*--{next(iter(other))}"):
        make_config(batch_invariant=True, **other).validate()
