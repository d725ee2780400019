"""What a user's own functions change about models: before the engine, and while the weights load."""

import pytest
import torch
from support.runs import fitted

from lightppo.models.loading import load_causal_lm
from lightppo.plugin import LOADING, PREPARATIONS
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


def test_an_option_of_loading_changes_the_weights(tiny_model):
    def without_first_layer(model):
        for weight in model.model.layers[0].parameters():
            weight.data.zero_()

    LOADING.register("without_first_layer", Entry(without_first_layer))
    try:
        changed = load_causal_lm(tiny_model, without_first_layer=True)
        as_it_is = load_causal_lm(tiny_model, without_first_layer=False)
    finally:
        del LOADING["without_first_layer"]
    assert not any(weight.any() for weight in changed.model.layers[0].parameters())
    assert all(weight.any() for weight in as_it_is.model.layers[0].parameters())
    with pytest.raises(TypeError, match="without_first_layer"):
        load_causal_lm(tiny_model, without_first_layer=True)
