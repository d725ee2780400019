"""The moving average of the actor, and the reference that moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightppo import PPOTrainer
from lightppo.trainer.run_callbacks import move_reference

pytestmark = pytest.mark.usefixtures("world")


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.hf_model.named_parameters()}


def put(model: Any, weights: dict[str, torch.Tensor]) -> None:
    for name, p in model.hf_model.named_parameters():
        p.data.copy_(weights[name])


@pytest.fixture
def models(parts):
    """Actor and reference, whose weights are put back after the test."""
    models = parts["actor"][0], parts["reference"]
    before = [weights_of(model) for model in models]
    yield models
    for model, weights in zip(models, before):
        put(model, weights)


def test_the_reference_follows_the_actor(trainer_with, models):
    actor, reference = models
    start = weights_of(reference)
    put(actor, {name: p + 1.0 for name, p in start.items()})
    move_reference(trainer_with(ref_ema_eta=0.25), 1)
    for name, p in weights_of(reference).items():
        torch.testing.assert_close(p, start[name] + 0.25)
    resets = trainer_with(ref_reset_steps=3)
    move_reference(resets, 2)
    assert not torch.allclose(
        weights_of(reference)["lm_head.weight"], weights_of(actor)["lm_head.weight"]
    )
    move_reference(resets, 3)
    assert all(torch.equal(p, weights_of(actor)[name]) for name, p in weights_of(reference).items())
    assert trainer_with().checkpointer.models.keys() == {"actor", "critic"}
    assert resets.checkpointer.models.keys() == {"actor", "critic", "reference"}


def test_the_average_moves_once_per_step_and_not_with_one_that_was_stopped(make_config):
    """Two optimizer steps of two micro batches; the first moves the actor, the second is stopped for it."""
    batches = {
        "train_batch_size": 2,
        "micro_train_batch_size": 1,
        "total_training_steps": 1,
        "lr_warmup_steps": 0,
    }
    trainer = PPOTrainer.from_config(
        make_config(enable_ema=True, ema_beta=0.8, early_stop_kl=1e-9, **batches)
    )
    before = weights_of(trainer.ema_model)
    trainer.fit()
    assert trainer.state.stopped_optimizer_steps == 1
    actor, average = weights_of(trainer.actor), weights_of(trainer.ema_model)
    assert any(not torch.equal(old, actor[name]) for name, old in before.items())
    for name, old in before.items():
        torch.testing.assert_close(average[name], 0.8 * old + 0.2 * actor[name])
