"""QLoRA: a model with weights in 4 bits is the dense model of the numbers that those bits stand for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from support.adapters import randomize_b
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightppo.errors import ModelLoadError
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import AdaptersOff, LoraOptions, add_adapters, merge
from lightppo.models.adapters.quantised import BLOCK, dense_weight, quantise, quantised_layers
from lightppo.models.critic import Critic
from lightppo.models.heads import head_names
from lightppo.models.loading import load_causal_lm
from lightppo.models.wrapper import compile_layers
from lightppo.rollout.vllm.weights import full_weights
from lightppo.zero3 import parameter_count

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gpt2", "gpt_neox", "opt")
LORA = LoraOptions(rank=4, alpha=8.0)

# The 16 numbers of NF4, from appendix E of the paper, and what a byte of a scale stands for.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip

Make = Callable[..., PreTrainedModel]


def with_heads(model):
    return model, head_names(model)


@pytest.fixture
def wide(configs) -> Make:
    """(family) -> a random causal LM, the same at each call, with layers as wide as a block or two."""

    def make(family: str = "llama", **changes) -> PreTrainedModel:
        torch.manual_seed(0)
        if family == "opt":
            config = OPTConfig(
                vocab_size=48, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=64, word_embed_proj_dim=64, init_std=0.2, pad_token_id=0,
            )  # fmt: skip
        else:
            config = configs[family]()
            sizes = (
                {"n_embd": 64}
                if family == "gpt2"
                else {"hidden_size": 64, "intermediate_size": 128}
            )
            if getattr(config, "head_dim", None):
                sizes["head_dim"] = 16
            for key, value in (sizes | changes).items():
                setattr(config, key, value)
        return AutoModelForCausalLM.from_config(config)

    return make


def in_4bit(model: PreTrainedModel) -> PreTrainedModel:
    quantise(model, head_names(model))
    return model


def layer_in_4bit(dense: nn.Linear) -> nn.Linear:
    model = nn.Sequential(dense)
    quantise(model, set())
    return model[0]


def held_bytes(model: nn.Module) -> int:
    states = [layer.weight.quant_state for layer in quantised_layers(model).values()]
    scales = [t for s in states for t in (s.absmax, s.state2.absmax, s.offset)]
    return sum(t.nbytes for t in (*model.state_dict(keep_vars=True).values(), *scales))


def dense_twin(model: PreTrainedModel, dense: PreTrainedModel) -> PreTrainedModel:
    """``dense`` with the numbers that the bits of ``model`` stand for; both without adapters."""
    with torch.no_grad():
        for name, layer in quantised_layers(model).items():
            dense.get_submodule(name).weight.copy_(dense_weight(layer))
    return dense


def adapted(model: PreTrainedModel, **options) -> Actor:
    actor = Actor(model, **options).train()
    add_adapters(actor, LORA)
    randomize_b(actor)
    return actor


@pytest.fixture
def pair(wide) -> Callable[..., tuple[Actor, Actor]]:
    """(family, options of the actors) -> actors with the same adapters: over 4 bits, and over the dense twin."""

    def make(family: str = "llama", **options) -> tuple[Actor, Actor]:
        model = in_4bit(wide(family))
        twin = dense_twin(model, wide(family))
        return adapted(model, **options), adapted(twin, **options)

    return make


def gradients(actor: Actor, scored) -> dict[str, torch.Tensor]:
    scores = scored(actor, entropy=True, entropy_grad=True)
    (scores.log_probs.sum() + 0.5 * scores.entropy.sum()).div(scores.real.sum()).backward()
    return {name: p.grad for name, p in actor.hf_model.named_parameters() if p.requires_grad}


# -- one layer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (7, 320), (48, 128), (300, 192)])
def test_what_the_bits_stand_for(shape, dtype):
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.05).to(dtype)
    dense = nn.Linear(*shape[::-1], bias=False, dtype=dtype)
    dense.weight.data.copy_(weight)
    layer = layer_in_4bit(dense)
    unpacked, packed, state = (
        dense_weight(layer),
        layer.weight.data.flatten(),
        layer.weight.quant_state,
    )
    assert (unpacked.shape, unpacked.dtype) == (weight.shape, dtype)

    blocks = weight.float().view(-1, BLOCK)
    # A scale in 8 bits: a step of its table (at most 1/64 of the largest) times the largest of 256 scales.
    largest = state.state2.absmax.repeat_interleave(256)[: len(blocks)]
    of_block = (state.state2.code[state.absmax.int()] * largest + state.offset)[:, None]
    assert ((of_block - blocks.abs().amax(1, keepdim=True)).abs() <= largest[:, None] / 64).all()
    # Two weights a byte, the first in its upper half; each the nearest of the 16 numbers times its scale.
    index = torch.stack([packed >> 4, packed & 15], 1).view(-1, BLOCK).long()
    expected = (NF4[index] * of_block).view(shape).to(dtype)
    torch.testing.assert_close(
        unpacked, expected, rtol=2**-23 if dtype == torch.float32 else 2**-8, atol=0
    )
    exact_scale = blocks.abs().amax(1, keepdim=True)
    chosen = (blocks / exact_scale - NF4[index]).abs()
    nearest = (blocks / exact_scale - NF4[:, None, None]).abs().amin(0)
    torch.testing.assert_close(chosen, nearest, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_takes_4_13_bits_a_weight_and_computes_as_the_dense_one(dtype):
    torch.manual_seed(0)
    dense = nn.Linear(256, 128, dtype=dtype)
    layer = layer_in_4bit(dense)
    bias = layer.bias.nbytes
    assert held_bytes(layer) == bias + 128 * 256 // 2 + 128 * 256 // 64 + 4 * (
        128 * 256 // (64 * 256) + 1
    )

    dense.weight.data.copy_(dense_weight(layer))
    x, upstream = torch.randn(2, 3, 5, 256, dtype=dtype), torch.randn(2, 3, 5, 128, dtype=dtype)
    results = []
    for module in (layer, dense.requires_grad_(False)):
        inputs = x.clone().requires_grad_()
        out = module(inputs)
        out.backward(upstream)
        results.append((out, inputs.grad))
        assert torch.equal(module(x), out)
        with torch.no_grad():
            for mode in (module.eval, module.train):
                assert torch.equal(mode()(x), out)
    for ours, theirs in zip(*results):
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.06
        )


def test_casts_of_the_model_leave_the_bits_alone(wide):
    model = in_4bit(wide())
    weights = {name: dense_weight(layer) for name, layer in quantised_layers(model).items()}
    assert len(weights) == 14
    for cast in (torch.bfloat16, torch.float16, torch.float32):
        model.to(cast)
    assert all(
        torch.equal(dense_weight(layer), weights[name])
        for name, layer in quantised_layers(model).items()
    )


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_dense_model_of_the_same_numbers(
    family, pair, scored
):
    ours, theirs = pair(family)
    assert len(quantised_layers(ours.hf_model)) >= 8
    one, other = gradients(ours, scored), gradients(theirs, scored)
    assert one.keys() == other.keys()
    assert all("lora_" in name for name in one)
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], atol=1e-5, rtol=1e-5)
        assert gradient.abs().max() > 0
    a, b = scored(ours, entropy=True), scored(theirs, entropy=True)
    torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(a.entropy, b.entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_packed_rows_too(family, pair, scored):
    (ours, _), (_, theirs) = pair(family, packing_samples=True), pair(family)
    one, other = gradients(ours, scored), gradients(theirs, scored)
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scored(ours).log_probs, scored(theirs).log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradients(pair, scored, reentrant):
    ours, theirs = pair()
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        ours.hf_model.enable_input_require_grads()
    one, other = gradients(ours, scored), gradients(theirs, scored)
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forwards_with_and_without_gradient_agree_and_change_nothing(wide, scored, dtype):
    actor = adapted(in_4bit(wide().to(dtype)))
    before = {name: tensor.clone() for name, tensor in actor.state_dict().items()}
    with_gradient = scored(actor)
    assert with_gradient.log_probs.requires_grad
    with torch.no_grad():
        for mode in (actor.eval, actor.train, actor.eval):
            mode()
            assert torch.equal(scored(actor).log_probs, with_gradient.log_probs)
    assert actor.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.state_dict().items())


@pytest.mark.long  # tests of the kernels compile layers, and those here run them as they are
def test_compiled_layers(pair, scored):
    ours, theirs = pair()
    compile_layers(ours.hf_model, backend="eager")
    one, other = gradients(ours, scored), gradients(theirs, scored)
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], atol=1e-5, rtol=1e-5)


def test_the_reference_is_the_actor_without_adapters(wide, scored):
    model = in_4bit(wide())
    before = scored(Actor(model).eval())
    actor = Actor(model)
    add_adapters(actor, LORA)
    # B is 0: the KL at the start is exactly 0
    assert torch.equal(scored(actor).log_probs, before.log_probs)
    randomize_b(actor)
    assert torch.equal(scored(AdaptersOff(actor)).log_probs, before.log_probs)
    assert not torch.equal(scored(actor).log_probs, before.log_probs)


def test_a_critic_keeps_its_value_head_and_trains_it(configs):
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = configs["llama"]()
    config.hidden_size, config.intermediate_size, config.head_dim, config.num_labels = (
        64,
        128,
        16,
        1,
    )
    critic = Critic(in_4bit(AutoModelForSequenceClassification.from_config(config)))
    before = critic(torch.arange(3, 11)[None], 3)
    add_adapters(critic, LORA)
    torch.testing.assert_close(critic(torch.arange(3, 11)[None], 3), before, atol=1e-6, rtol=0)
    assert "score" not in quantised_layers(critic.hf_model)
    trained = [
        name for name, p in critic.named_parameters() if p.requires_grad and "lora_" not in name
    ]
    assert trained == ["model.score.weight"]


# -- what is held in 4 bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_less_than_a_third_of_the_memory(family, wide):
    dense, model = wide(family), in_4bit(wide(family))
    assert held_bytes(model) < held_bytes(dense) / 3
    assert parameter_count(model) == parameter_count(dense)
    assert parameter_count(model, trained_only=True) == 0


def test_heads_embeddings_and_narrow_layers_stay(wide, scored):
    model = in_4bit(wide(intermediate_size=96))
    names = quantised_layers(model)
    ends = {name.rpartition(".")[2] for name in names}
    # down_proj takes 96
    assert ends == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    dense = dict(wide(intermediate_size=96).named_parameters())
    kept = {
        name: p for name, p in model.named_parameters() if name.removesuffix(".weight") not in names
    }
    assert kept.keys() == dense.keys() - {f"{name}.weight" for name in names}
    assert all(torch.equal(kept[name], dense[name]) for name in kept)
    assert not any(p.requires_grad for p in kept.values())

    twin = dense_twin(model, wide(intermediate_size=96))
    ours, theirs = adapted(model), adapted(twin)
    assert ".down_proj.lora_A.default.weight" in " ".join(gradients(ours, scored))
    torch.testing.assert_close(scored(ours).log_probs, scored(theirs).log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [(), ("q_proj", "c_attn", "dense")], ids=["all", "some"])
def test_checkpoint_weights_are_the_unpacked_ones_with_the_adapters(
    family, targets, wide, scored, monkeypatch
):
    model = in_4bit(wide(family))
    merged = dense_twin(model, wide(family))
    ends = {name.rpartition(".")[2] for name in quantised_layers(model)}
    actor = Actor(model).eval()
    add_adapters(
        actor, LoraOptions(rank=4, alpha=8.0, target_modules=tuple(ends.intersection(targets)))
    )
    randomize_b(actor)
    adapters = {n: p for n, p in model.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for name in {n.rpartition(".lora_")[0] for n in adapters}:
            a, b = (adapters[f"{name}.lora_{x}.default.weight"] for x in "AB")
            layer = merged.get_submodule(name)
            layer.weight.copy_(merge(layer.weight, a, b, 2.0, transposed=isinstance(layer, Conv1D)))
    monkeypatch.setattr("lightppo.rollout.vllm.weights.GATHERED_NUMEL", 1)
    for _ in range(3):  # nothing drifts from push to push
        ours = dict(full_weights(actor))
    expected = dict(full_weights(merged))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], weight) for name, weight in expected.items())
    torch.testing.assert_close(
        scored(actor).log_probs, scored(Actor(merged).eval()).log_probs, atol=1e-4, rtol=0
    )


def test_loading_by_path_is_quantising_what_was_loaded(wide, tmp_path, scored):
    wide().save_pretrained(tmp_path)
    ours, theirs = (
        Actor(str(tmp_path), load_in_4bit=True),
        Actor(in_4bit(load_causal_lm(str(tmp_path)))),
    )
    assert len(quantised_layers(ours.hf_model)) == 14
    wrapped = Actor(wide())  # whose layers may be of another class by then
    assert len(quantised_layers(in_4bit(wrapped.hf_model))) == 14
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    )
    half = Actor(str(tmp_path), load_in_4bit=True, bf16=True)
    assert dense_weight(half.hf_model.model.layers[0].mlp.up_proj).dtype == torch.bfloat16
    twin = Actor(dense_twin(half.hf_model, load_causal_lm(str(tmp_path), dtype=torch.bfloat16)))
    torch.testing.assert_close(scored(half).log_probs, scored(twin).log_probs, atol=1e-2, rtol=0)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "largest"),
    [
        ("mixtral", r"mlp\.experts\.gate_up_proj, \(4, 256, 64\)"),
        ("qwen2_moe", r"mlp\.experts\.gate_up_proj"),
    ],
)
def test_fused_experts_are_refused(family, largest, wide):
    with pytest.raises(ModelLoadError, match=rf"--load_in_4bit: .*{largest}"):
        quantise(*with_heads(wide(family)))


def test_other_refusals(wide, causal_lm, monkeypatch, tmp_path):
    with pytest.raises(ModelLoadError, match=r"--load_in_4bit: .* 0% .* 64 "):
        quantise(*with_heads(causal_lm()))  # hidden size 32
    sharded = wide()
    sharded.lm_head.weight.ds_id = 3
    with pytest.raises(ModelLoadError, match="load_in_4bit=True"):
        quantise(*with_heads(sharded))
    with pytest.raises(ModelLoadError, match="load_in_4bit"):
        Actor(wide(), load_in_4bit=True)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this device")

    with monkeypatch.context() as patch:
        patch.setattr("bitsandbytes.functional.quantize_4bit", broken)
        with pytest.raises(
            ModelLoadError, match=r"--load_in_4bit: .*model\..*q_proj: no kernel for this"
        ):
            quantise(*with_heads(wide()))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "bitsandbytes" else find_spec(name),
    )
    with pytest.raises(ModelLoadError, match=r"--load_in_4bit .*lightppo\[qlora\]"):
        quantise(*with_heads(wide()))


# -- what bitsandbytes says ------------------------------------------------------------------------------------------

USES = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import LoraOptions, add_adapters
from lightppo.models.heads import head_names
from lightppo.models.adapters.quantised import quantise

def use(first):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    assert "bitsandbytes" not in sys.modules
    if first == "packing":
        quantise(model, head_names(model))
    elif first == "schedule":  # imports peft, which imports bitsandbytes wherever it is installed
        from transformers import get_scheduler
    add_adapters(Actor(model), LoraOptions(rank=2))
    assert "bitsandbytes" in sys.modules

use(sys.argv[1])
"""


@pytest.mark.parametrize(
    "first",
    ["packing", *(pytest.param(n, marks=pytest.mark.long) for n in ("adapters", "schedule"))],
)
def test_nothing_is_printed_at_the_first_use(first):
    command = [sys.executable, "-c", USES, first]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
