"""What engines are pushed: the names, shapes and values of the checkpoint."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightppo.models.loading import head_names
from lightppo.models.quantised import quantise
from lightppo.rollout.vllm_server import weight_bytes
from lightppo.rollout.vllm_weights import differing_weights, trainer_fingerprints
from lightppo.rollout.weight_sync import full_weights


def tiny_mixtral():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return MixtralForCausalLM(MixtralConfig(vocab_size=20, **sizes, **heads))


@pytest.mark.parametrize("bucket_numel", [1, 3000, 1 << 26])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_as_the_checkpoint_on_disk(tmp_path, make_llama, family, bucket_numel):
    """Experts are one tensor in memory and one each on disk."""
    model = make_llama() if family == "llama" else tiny_mixtral()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    pushed = list(full_weights(model, bucket_numel=bucket_numel))
    assert len(pushed) == len(saved)
    for name, tensor in pushed:
        assert torch.equal(tensor, saved[name]), name


def test_tied_weights_come_under_both_names(make_llama):
    pushed = dict(full_weights(make_llama(tie_word_embeddings=True)))
    assert torch.equal(pushed["lm_head.weight"], pushed["model.embed_tokens.weight"])


@pytest.mark.parametrize("in_4bit", [False, True])
def test_room_for_what_is_pushed(in_4bit):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))
    needed = sum(tensor.nbytes for _, tensor in full_weights(model))
    if in_4bit:
        quantise(model, head_names(model))
        with pytest.raises(ValueError, match="LlamaForCausalLM holds weights in 4 bits and has no adapters"):
            list(full_weights(model))
    assert needed <= weight_bytes(model) <= 1.2 * needed


def test_order_is_that_of_the_modules(make_llama):
    names = [name for name, _ in full_weights(make_llama(), bucket_numel=1000)]
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers)


def test_differing_weights_are_named(make_llama):
    """An engine that fuses q, k and v, and pads its vocabulary."""
    weights = {name: tensor.clone() for name, tensor in full_weights(make_llama())}
    trainer = trainer_fingerprints(weights.items())
    attention = "model.layers.0.self_attn"
    weights[f"{attention}.k_proj.weight"][2, 3] += 1
    weights["model.norm.weight"][0] = float("nan")
    engine = {name: prints[0] for name, prints in trainer_fingerprints(weights.items()).items()}
    parts = [engine.pop(f"{attention}.{part}_proj.weight") for part in "qkv"]
    engine[f"{attention}.qkv_proj.weight"] = torch.cat(parts)
    engine["lm_head.weight"] = torch.cat([engine["lm_head.weight"], torch.ones(2)])
    del engine["model.layers.1.mlp.up_proj.weight"]
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    differing, unknown = differing_weights(trainer, engine, packed, tolerance=1e-3)
    assert sorted(differing) == [f"{attention}.k_proj.weight", "model.norm.weight"]
    assert unknown == ["model.layers.1.mlp.up_proj.weight"]


def test_an_actor_is_looked_into(make_llama):
    model = make_llama()
    assert [n for n, _ in full_weights(Wrapped(model))] == [n for n, _ in full_weights(model)]


class Wrapped(torch.nn.Module):
    engine_attribute = "model"

    def __init__(self, model):
        super().__init__()
        self.model = model
