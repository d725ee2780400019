"""Which layers may have an adapter or 4 bits: what the model calls, and what peft leaves where it was put."""

from __future__ import annotations

import pytest
import torch
from families.zoo import random_model
from support.adapters import randomize_b
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightppo.errors import ModelLoadError
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import (
    LoraOptions,
    add_adapters,
    chosen_layers,
    goes_to_experts,
)
from lightppo.models.adapters.quantised import fitting_layers, replaceable_layers
from lightppo.zero3 import full_state_dict


class Mixer(nn.Module):
    """Calls two of its layers, and takes the weight of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(4, 4)
        self.called_too = Conv1D(4, 4)
        self.taken = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.called_too(self.called(x.to(self.called.weight.dtype)))
        return hidden @ self.taken.weight.T


def ends(names: set[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def test_a_layer_whose_weight_is_taken_past_the_layer_is_left_as_it_is():
    model = nn.ModuleDict({"a": Mixer(), "b": nn.ModuleList([Mixer()])})
    assert list(replaceable_layers(model)) == ["a.called", "a.called_too", "b.0.called", "b.0.called_too"]  # fmt: skip


def test_mambas_mixers_and_routers_have_none():
    jamba = random_model("jamba")
    names = chosen_layers(jamba)
    assert "model.layers.0.mamba.in_proj" in names
    assert "dt_proj" not in ends(names)
    assert "out_proj" not in ends(chosen_layers(random_model("bamba")))
    assert "router" not in ends(chosen_layers(random_model("llama4_text")))
    with pytest.raises(ModelLoadError, match="--target_modules dt_proj: JambaForCausalLM has none"):
        chosen_layers(jamba, ("dt_proj",))


def test_a_layer_that_is_read_past_its_call_is_not_in_4_bits():
    names = fitting_layers(random_model("bamba"), {"lm_head"})
    assert "in_proj" in ends(set(names))
    assert "out_proj" not in ends(set(names))


def test_what_peft_would_put_on_fused_experts_has_none_and_the_merged_model_is_whole(caplog):
    actor = Actor(random_model("deepseek_v3"))
    names = set(actor.hf_model.state_dict())
    named = ("gate_proj", "up_proj", "o_proj")
    if goes_to_experts(actor.hf_model, "gate_proj"):
        with pytest.raises(
            ModelLoadError, match=r"--target_modules gate_proj up_proj: .* on the experts"
        ):
            chosen_layers(actor.hf_model, named)
        add_adapters(actor, LoraOptions(rank=4))
        assert "down_proj, gate_proj, up_proj get no adapter" in caplog.text
    else:  # peft 0.18 leaves experts alone
        assert ends(chosen_layers(actor.hf_model, named)) == set(named)
        add_adapters(actor, LoraOptions(rank=4))
    randomize_b(actor.hf_model)
    merged = actor.hf_model.lora.merged(full_state_dict(actor, True))
    assert merged.keys() == names
    plain = random_model("deepseek_v3")
    plain.load_state_dict(merged)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(plain(ids).logits, actor.hf_model(ids).logits, atol=1e-4, rtol=0)
