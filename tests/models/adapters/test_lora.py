"""LoRA: nothing changes at the start, the reference is the model without adapters, merged weights are peft's."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from families.zoo import random_model
from peft import LoraConfig, get_peft_model
from support.adapters import randomize_b
from torch import nn
from transformers import GPT2LMHeadModel, PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import (
    AdaptersOff,
    LoraOptions,
    adapters_off,
    add_adapters,
    layer_of,
    merge,
    target_layers,
)
from lightppo.models.critic import Critic
from lightppo.models.kernels.linear_log_probs import scoring_head
from lightppo.rollout.vllm.weights import full_weights


def adapted(model: PreTrainedModel, **options) -> Actor:
    """An actor with adapters that do something."""
    actor = Actor(model)
    add_adapters(actor, LoraOptions(**{"rank": 4, "alpha": 8.0} | options))
    randomize_b(actor)
    return actor


def test_new_adapters_change_nothing_and_the_reference_is_the_model_without_them(
    family, causal_lm, scored
):
    actor = Actor(causal_lm(family)).eval()
    before = scored(actor, entropy=True)
    add_adapters(actor, LoraOptions(rank=4))
    # B is 0: the KL at the start is exactly 0
    assert torch.equal(scored(actor).log_probs, before.log_probs)

    randomize_b(actor)
    reference = AdaptersOff(actor)
    of_reference, of_actor = scored(reference, entropy=True), scored(actor)
    assert torch.equal(of_reference.log_probs, before.log_probs)
    assert torch.equal(of_reference.entropy, before.entropy)
    assert not of_reference.log_probs.requires_grad
    assert (of_actor.log_probs - before.log_probs).abs().max() > 0.01  # the adapters are on again
    assert of_actor.log_probs.requires_grad
    separate = Actor(causal_lm(family)).eval()
    assert torch.equal(scored(separate).log_probs, of_reference.log_probs)


def test_the_reference_holds_no_parameter(causal_lm):
    actor = adapted(causal_lm())
    reference = AdaptersOff(actor)
    held = [
        value for value in vars(reference).values() if isinstance(value, (torch.Tensor, nn.Module))
    ]
    assert held == [actor]
    assert reference.eval() is reference
    assert actor.training
    with pytest.raises(ValueError, match="adapters"):
        AdaptersOff(Actor(causal_lm()))


def test_a_reference_forward_between_forward_and_backward_leaves_the_gradient_alone(
    causal_lm, scored
):
    gradients = []
    for between in (False, True):
        actor = adapted(causal_lm()).train()
        # the backward runs the layers again: by then the adapters are on
        actor.gradient_checkpointing_enable()
        loss = scored(actor).log_probs.sum()
        if between:
            scored(AdaptersOff(actor))
        loss.backward()
        gradients.append({name: p.grad for name, p in actor.named_parameters() if p.requires_grad})
    one, other = gradients
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(gradient.abs().max() > 0 for gradient in one.values())


def test_adapters_come_back_after_an_error(causal_lm):
    actor = adapted(causal_lm())
    before = actor(torch.arange(3, 9)[None], 2)
    with pytest.raises(KeyError), adapters_off(actor.hf_model):
        raise KeyError
    assert torch.equal(actor(torch.arange(3, 9)[None], 2), before)


def test_only_adapters_train_and_how_many_they_are(causal_lm):
    actor = adapted(causal_lm())
    trained = {name: p for name, p in actor.hf_model.named_parameters() if p.requires_grad}
    assert all(".lora_A.default." in name or ".lora_B.default." in name for name in trained)
    # rank 4 × (in + out): q 32 + 32, k and v 32 + 16, o 32 + 32, gate, up and down 32 + 48; two layers
    assert sum(p.numel() for p in trained.values()) == 2 * 4 * (64 + 48 + 48 + 64 + 80 + 80 + 80)


def test_a_critic_trains_adapters_and_its_value_head(classifier, family):
    critic = Critic(classifier(family))
    sequences = torch.randint(3, 40, (2, 8))
    before = critic(sequences, 3)
    add_adapters(critic, LoraOptions(rank=2))
    assert torch.equal(critic(sequences, 3), before)
    trained = [name for name, p in critic.named_parameters() if p.requires_grad]
    heads = [name for name in trained if "lora_" not in name]
    assert heads == ["model.score.weight"]
    assert len(trained) > 2


def test_the_start_depends_on_the_seed_alone(causal_lm):
    def start(seed: int) -> torch.Tensor:
        actor = Actor(causal_lm())
        torch.manual_seed(torch.initial_seed() + 1)
        state = torch.get_rng_state()
        add_adapters(actor, LoraOptions(rank=4), seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return actor.hf_model.model.layers[1].mlp.up_proj.lora_A["default"].weight.detach()

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


def test_dropout_acts_on_the_adapters_in_training_mode_only(causal_lm, scored):
    actor = adapted(causal_lm(), dropout=0.5)
    assert torch.equal(scored(actor.eval()).log_probs, scored(actor).log_probs)
    plain = adapted(causal_lm())
    assert torch.equal(scored(plain.eval()).log_probs, scored(actor).log_probs)
    actor.train()
    assert not torch.equal(scored(actor).log_probs, scored(actor).log_probs)
    reference = AdaptersOff(actor)
    assert torch.equal(scored(reference).log_probs, scored(reference).log_probs)


def test_alpha_over_rank_scales_the_change(causal_lm):
    layer = adapted(causal_lm(), rank=2, alpha=3.0).hf_model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, 32)
    change = (x @ layer.lora_A["default"].weight.T) @ layer.lora_B["default"].weight.T
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 1.5 * change)


# -- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_all_linear_leaves_out_experts_and_routers(family):
    """peft 0.21's own `all-linear` adapts both, and a router that moves sends tokens to other experts."""
    model = random_model(family)
    chosen = ("all-linear",)
    assert target_layers(model, chosen) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    actor = Actor(model)
    add_adapters(actor, LoraOptions(rank=2, target_modules=chosen))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".self_attn." in name for name in trained)


def test_all_linear_layers_but_the_head_by_default(causal_lm, classifier):
    llama = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert target_layers(causal_lm()) == target_layers(causal_lm(), ("all-linear",)) == llama
    assert target_layers(classifier()) == llama
    assert target_layers(causal_lm("gpt2")) == ["c_attn", "c_fc", "c_proj"]
    assert target_layers(causal_lm(), ("q_proj", "v_proj")) == ["q_proj", "v_proj"]
    assert target_layers(causal_lm(), ("0.mlp.up_proj",)) == ["model.layers.0.mlp.up_proj"]
    assert target_layers(causal_lm(), ("lm_head", "q_proj")) == ["lm_head", "q_proj"]
    # the same flag serves the critic
    assert target_layers(classifier(), ("lm_head", "q_proj")) == ["q_proj"]


@pytest.mark.parametrize(
    ("family", "wanted", "message"),
    [
        (
            "llama",
            ("q_prj", "v_proj"),
            "--target_modules q_prj: LlamaForCausalLM.* down_proj",
        ),
        ("llama", ("embed_tokens",), "--target_modules embed_tokens: .*, lm_head, o_proj, q_proj"),
        ("qwen2", ("lm_head",), "--target_modules lm_head"),
    ],
)
def test_targets_that_cannot_be_are_refused(causal_lm, family, wanted, message):
    with pytest.raises(ModelLoadError, match=message):
        add_adapters(Actor(causal_lm(family)), LoraOptions(rank=2, target_modules=wanted))


def test_more_refusals(causal_lm, classifier, monkeypatch):
    with pytest.raises(ModelLoadError, match="--target_modules score"):
        add_adapters(Critic(classifier()), LoraOptions(rank=2, target_modules=("score", "q_proj")))
    with pytest.raises(ModelLoadError, match="Actor has adapters"):
        add_adapters(adapted(causal_lm()), LoraOptions(rank=2))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else find_spec(name)
    )
    with pytest.raises(ModelLoadError, match=r"--lora_rank .*lightppo\[lora\]"):
        add_adapters(Actor(causal_lm()), LoraOptions(rank=2))


def test_the_head_gives_log_probs_unless_it_has_an_adapter(causal_lm, scored):
    body = adapted(causal_lm()).eval()
    assert scoring_head(body.hf_model) is body.hf_model.lm_head
    fast = scored(body).log_probs
    assert body.head_is_last
    body.head_is_last = False  # the way through logits
    torch.testing.assert_close(scored(body).log_probs, fast, atol=1e-6, rtol=0)

    with_head = adapted(causal_lm(), target_modules=("lm_head", "q_proj")).eval()
    assert scoring_head(with_head.hf_model) is None
    merged = causal_lm()
    merged.load_state_dict(dict(full_weights(with_head)))
    torch.testing.assert_close(
        scored(with_head).log_probs, scored(Actor(merged)).log_probs, atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        scored(AdaptersOff(with_head)).log_probs, scored(Actor(causal_lm())).log_probs
    )


def test_packed_is_padded(causal_lm, scored):
    padded, packed = adapted(causal_lm()), adapted(causal_lm())
    packed.layout.packs = True
    for one, other in ((padded, packed), (AdaptersOff(padded), AdaptersOff(packed))):
        a, b = scored(one, entropy=True), scored(other, entropy=True)
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(a.entropy, b.entropy, atol=1e-5, rtol=0)


# -- merged weights --------------------------------------------------------------------------------------------------


def test_merged_weights_are_those_of_peft(family, causal_lm):
    actor = adapted(causal_lm(family))
    before = {name: p.detach().clone() for name, p in actor.named_parameters()}
    theirs = get_peft_model(
        causal_lm(family),
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=target_layers(causal_lm(family)),
            fan_in_fan_out=isinstance(actor.hf_model, GPT2LMHeadModel),
        ),
    )
    start = {f"base_model.model.{name}": p for name, p in actor.hf_model.state_dict().items()}
    assert not theirs.load_state_dict(start).missing_keys
    expected = theirs.merge_and_unload()

    for _ in range(3):
        ours = dict(full_weights(actor))
    assert (
        ours.keys()
        == dict(full_weights(expected)).keys()
        == dict(full_weights(causal_lm(family))).keys()
    )
    for name, weight in full_weights(expected):
        torch.testing.assert_close(ours[name], weight, atol=1e-6, rtol=0)
    changed = [
        name
        for name, weight in full_weights(causal_lm(family))
        if not torch.equal(ours[name], weight)
    ]
    assert changed
    assert all(torch.equal(p, before[name]) for name, p in actor.named_parameters())


def test_merging_in_bf16_rounds_once_and_never_drifts():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 16, generator=generator).bfloat16()
    a, b = (
        torch.randn(4, 16, generator=generator).bfloat16(),
        torch.randn(24, 4, generator=generator).bfloat16(),
    )
    kept = weight.clone()
    exact = weight.double() + 0.5 * b.double() @ a.double()
    merged = merge(weight, a, b, 0.5)
    assert merged.dtype == torch.bfloat16
    # one rounding to 8 bits
    assert ((merged.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001).all()
    assert all(torch.equal(merge(weight, a, b, 0.5), merged) for _ in range(5))
    assert torch.equal(weight, kept)
    torch.testing.assert_close(merge(weight.T, a, b, 0.5, transposed=True), merged.T)


def test_parameters_of_a_layer_belong_together():
    layer = "model.layers.0.self_attn.q_proj"
    for rest in (
        "weight",
        "base_layer.weight",
        "base_layer.bias",
        "lora_A.default.weight",
        "lora_B.default.weight",
    ):
        assert layer_of(f"{layer}.{rest}") == layer
    assert layer_of("model.embed_tokens.weight") == "model.embed_tokens"
