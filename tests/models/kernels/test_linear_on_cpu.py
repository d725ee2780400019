"""Linear layers by oneDNN: the same model, in place."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightppo.models.actor import Actor
from lightppo.models.critic import Critic
from lightppo.models.kernels import layers
from lightppo.models.kernels.layers import CPULinear, accelerate_on_cpu, packed_weights
from lightppo.rollout.hf import generation_mode

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)


@pytest.mark.parametrize("packing_samples", [True, False])
def test_same_log_probs_and_gradients(
    family: str,
    packing_samples: bool,
    causal_lm: Callable[..., PreTrainedModel],
    ragged: tuple[Tensor, Tensor, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences, mask, actions = ragged
    results = []
    for suits in (True, False):
        monkeypatch.setattr(layers, "onednn_suits_machine", lambda suits=suits: suits)
        actor = Actor(causal_lm(family), packing_samples=packing_samples)
        swapped = [module for module in actor.modules() if type(module) is CPULinear]
        assert bool(swapped) is suits
        log_probs = actor(sequences, actions, mask)
        log_probs.square().sum().backward()
        results.append((log_probs.detach(), {name: p.grad for name, p in actor.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-4)
    assert results[0][1].keys() == results[1][1].keys()
    for name, gradient in results[0][1].items():
        assert (gradient is None) == (results[1][1][name] is None)
        if gradient is not None:
            torch.testing.assert_close(
                gradient, results[1][1][name], rtol=1e-3, atol=1e-3, msg=name
            )


def test_the_head_still_gives_log_probs_itself(
    causal_lm: Callable[..., PreTrainedModel],
    ragged: tuple[Tensor, Tensor, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "onednn_suits_machine", lambda: True)
    sequences, mask, actions = ragged
    actor = Actor(causal_lm())
    assert type(actor.model.get_output_embeddings()) is CPULinear
    actor(sequences, actions, mask)
    assert actor.head_is_last


def test_copies_and_names(
    classifier: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "onednn_suits_machine", lambda: True)
    plain = classifier()
    names = list(plain.state_dict())
    critic = Critic(plain)
    assert list(critic.model.state_dict()) == names
    other = copy.deepcopy(critic.model)
    with torch.no_grad():
        other.score.weight.zero_()
    ids = torch.tensor([[4, 5, 6]])
    assert other(ids).logits.abs().max() == 0
    assert critic.model(ids).logits.abs().max() > 0


def test_only_plain_layers_and_only_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Scaled(2, 2), nn.Linear(2, 2))
    model[2].forward = lambda x: x
    monkeypatch.setattr(layers, "onednn_suits_machine", lambda: False)
    accelerate_on_cpu(model)
    assert type(model[0]) is nn.Linear
    monkeypatch.setattr(layers, "onednn_suits_machine", lambda: True)
    accelerate_on_cpu(model)
    assert [type(module) for module in model] == [CPULinear, Scaled, nn.Linear]


def test_weights_are_packed_for_decoding_only(
    causal_lm: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "onednn_suits_machine", lambda: True)
    # its head is tied to the embedding, its layers have biases
    model = Actor(causal_lm("qwen2")).model
    ids = torch.tensor([[4, 5, 6], [7, 8, 9]])
    linear_layers = [module for module in model.modules() if type(module) is CPULinear]

    def are_packed() -> set[bool]:
        return {layer.packed_weight is not None for layer in linear_layers}

    expected = model(ids).logits
    names = list(model.state_dict())
    with generation_mode(model):
        assert are_packed() == {True}
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert list(model.state_dict()) == names
    assert are_packed() == {False}
    with packed_weights(model):  # gradients would not reach the weights
        assert are_packed() == {False}
    monkeypatch.setattr(layers, "PACKED_BYTES", 1000)
    with torch.no_grad(), packed_weights(model):
        assert are_packed() == {False}


@pytest.mark.parametrize(("least", "times"), [(0, 2), (1 << 28, 0)])
def test_memory_is_given_back_around_large_copies(
    causal_lm: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    least: int,
    times: int,
) -> None:
    monkeypatch.setattr(layers, "onednn_suits_machine", lambda: True)
    monkeypatch.setattr(layers, "_GIVEN_BACK_BYTES", least)
    calls, give_back = [], layers.give_back_memory
    monkeypatch.setattr(layers, "give_back_memory", lambda: calls.append(give_back()))
    model = Actor(causal_lm("qwen2")).model
    with torch.no_grad(), packed_weights(model):
        assert len(calls) == times / 2
    assert calls == [None] * times
