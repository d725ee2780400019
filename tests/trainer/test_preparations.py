"""What a user's own functions change about models before the engine."""

import pytest
import torch
from support.runs import fitted

from lightppo.models.loading import load_causal_lm
from lightppo.plugin import PREPARATIONS
from lightppo.table import Entry


@pytest.fixture
def frozen_first_layer():
    """A preparation for this test: the actor's first layer does not train. Gives the roles that it was called for."""
    roles = []

    def freeze_first_layer(model, role, config, device):
        roles.append((role, config.model.pretrain, device.type))
        if role == "actor":
            model.hf_model.model.layers[0].requires_grad_(False)

    PREPARATIONS.register("frozen_first_layer", Entry(freeze_first_layer))
    yield roles
    del PREPARATIONS["frozen_first_layer"]


def test_a_preparation_changes_what_trains(world, make_config, tiny_model, frozen_first_layer):
    trainer = fitted(make_config(advantage_estimator="gae", num_episodes=1))
    assert frozen_first_layer == [
        (role, tiny_model, "cpu") for role in ("actor", "critic", "reference")
    ]
    before = load_causal_lm(tiny_model).model.layers
    after = trainer.actor.hf_model.model.layers
    unchanged = [
        all(
            torch.equal(old, new) for old, new in zip(before[i].parameters(), after[i].parameters())
        )
        for i in range(2)
    ]
    assert unchanged == [True, False]
