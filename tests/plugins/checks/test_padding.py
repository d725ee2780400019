"""Padded batches are tried before they are trusted: wrong families are told, right ones are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DogeConfig,
    FalconConfig,
    GptOssConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
)
from transformers.models.falcon import modeling_falcon

from lightppo.errors import ModelLoadError, PackingNotSupportedError
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic
from lightppo.models.loading import load_causal_lm
from lightppo.plugin import PACKED_ATTENTION
from lightppo.plugins.checks.padding import attending, other_attentions, padding_problem

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FALCON = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "alibi": True,
    "initializer_range": 0.2,
}
WRONG = {
    "doge": lambda: DogeConfig(**SIZES, is_moe=True, num_experts=16, num_experts_per_tok=2),
    "recurrent_gemma": lambda: RecurrentGemmaConfig(**SIZES, lru_width=32, num_key_value_heads=2),
    "rwkv": lambda: RwkvConfig(
        vocab_size=48, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
    ),
}


def random_model(
    config: Any, kind: Any = AutoModelForCausalLM, attention: str | None = None
) -> Any:
    """Also of what begins as zeros or ones: a bias of 0 hides what padding does to it."""
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2 or parameter.std() == 0:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.mark.parametrize("kind", WRONG)
def test_a_family_that_is_wrong_is_told_and_by_how_much(kind):
    found = padding_problem(Actor(random_model(WRONG[kind]())), CPU)
    assert found is not None
    assert "log probs differ by up to " in found
    assert " nats between a padded batch and its rows alone" in found


def test_a_family_that_is_right(
    family: str, attention: str, causal_lm: Callable[..., Any], classifier: Any
):
    actor, critic = Actor(causal_lm(family, attention)), Critic(classifier(family, attention))
    assert (padding_problem(actor, CPU), padding_problem(critic, CPU)) == (None, None)
    actor.train()
    padding_problem(actor.to(torch.bfloat16), CPU)
    assert actor.training
    assert padding_problem(actor, CPU) is None


def test_a_critic_is_tried_too(classifier):
    critic = Critic(classifier("llama"))
    critic.hf_model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: output - output.mean(1, True)
    )
    assert "hidden states differ by " in padding_problem(critic, CPU)


def test_code_that_fails_on_padding_is_told_and_a_lack_of_memory_is_not(causal_lm):
    def fails(error: type[Exception]) -> Actor:
        actor = Actor(causal_lm("llama"))

        def hook(module: Any, args: Any) -> None:
            if len(args[0]) == 2:
                raise error("two\nlines")

        actor.hf_model.get_input_embeddings().register_forward_pre_hook(hook)
        return actor

    assert (
        padding_problem(fails(IndexError), CPU)
        == "its code fails on a padded batch: IndexError: two lines"
    )
    with pytest.raises(torch.OutOfMemoryError):
        padding_problem(fails(torch.OutOfMemoryError), CPU)


def test_weights_that_are_not_finite_and_few_positions_are_no_matter_of_padding(causal_lm):
    actor = Actor(causal_lm("gpt2"))
    with torch.no_grad():
        actor.hf_model.lm_head.weight.fill_(float("nan"))
    assert padding_problem(actor, CPU) is None
    from transformers import GPT2Config

    few = GPT2Config(vocab_size=5, n_embd=32, n_layer=1, n_head=2, n_positions=8)
    assert padding_problem(Actor(random_model(few)), CPU) is None


def test_another_attention_for_a_while(causal_lm):
    model = causal_lm("llama", "sdpa")
    assert other_attentions(model) == ["eager"]
    with attending(model, "eager"):
        assert model.config._attn_implementation == "eager"
        assert other_attentions(model) == ["sdpa"]
    assert model.config._attn_implementation == "sdpa"
    assert other_attentions(causal_lm("gemma2", "eager")) == []  # sdpa leaves out its capping


# -- Falcon's alibi, and families that cannot pack ---------------------------------------------------------------------


def test_falcons_alibi_is_right_under_sdpa_only(tmp_path, monkeypatch):
    ids = torch.arange(3, 15)[None]
    logits = {
        name: random_model(FalconConfig(**FALCON), attention=name)(ids).logits
        for name in ("sdpa", "eager")
    }
    # if not, transformers is mended: drop the refusal
    assert (logits["eager"] - logits["sdpa"]).abs().max() > 0.05
    alibi = modeling_falcon.build_alibi_tensor
    monkeypatch.setattr(
        modeling_falcon, "build_alibi_tensor", lambda *args, **kw: alibi(*args, **kw) / 2
    )
    halved = random_model(FalconConfig(**FALCON), attention="eager")(ids).logits
    # eager adds the whole of it twice
    torch.testing.assert_close(halved, logits["sdpa"], atol=1e-5, rtol=0)
    monkeypatch.undo()
    random_model(FalconConfig(**FALCON)).save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError, match="--attn_implementation eager adds this model's alibi twice"
    ):
        load_causal_lm(str(tmp_path), attn_implementation="eager")
    torch.testing.assert_close(
        load_causal_lm(str(tmp_path))(ids).logits, logits["sdpa"], atol=1e-5, rtol=0
    )


def test_a_family_whose_code_cannot_pack_is_padded_or_refused_in_one_line():
    doge = DogeConfig(**SIZES)
    reason = Actor(random_model(doge), packing_samples=None).try_packing(CPU)
    assert "model type 'doge': its code fails on a packed row: RuntimeError: " in reason
    actor = Actor(random_model(doge), packing_samples=True)
    with pytest.raises(
        PackingNotSupportedError, match="model type 'doge': its code fails on a packed row"
    ):
        actor(torch.arange(10)[None], 3)


def test_a_family_without_sdpa_says_why_it_cannot_pack(monkeypatch):
    monkeypatch.delitem(PACKED_ATTENTION, "packed_eager")
    config = GptOssConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_scaling=None,
    )
    actor = Actor(random_model(config), packing_samples=True)
    with pytest.raises(
        PackingNotSupportedError, match=r"with eager attention .* and GptOssForCausalLM has no sdpa"
    ):
        actor(torch.arange(10)[None], 3)
    reason = Actor(random_model(config), packing_samples=None).try_packing(CPU)
    assert (
        reason == "GptOssForCausalLM has no sdpa, and its eager attention does not keep rows apart"
    )


# -- as many families as transformers has ------------------------------------------------------------------------------

TINY = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_layers": 2, "d_model": 32, "n_heads": 4,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "moe_num_experts": 4,
    "moe_k": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, "sliding_window": 4,
    "rotary_dim": 4, "ffn_hidden_size": 48, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_chunk_size": 16, "mamba_d_ssm": 64, "state_size": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_dt_rank": 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 48, "num_kv_shared_layers": 0, "laurel_rank": 8,
    "shared_intermediate_size": 24, "num_heads": 4, "num_layers": 2, "rope_scaling": None, "pad_token_id": 0,
    "attention_types": [[["global", "local"], 1]], "window_size": 4, "conv_L_cache": 3, "altup_num_inputs": 2,
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
}  # fmt: skip
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
OWN = {
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["attention", "attention"]},
    "qwen3_5_text": MIXED,
    "qwen3_next": MIXED,
}
RIGHT = [
    "apertus", "arcee", "bamba", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cwm", "deepseek_v2",
    "deepseek_v3", "diffllama", "doge", "dots1", "ernie4_5", "exaone4", "falcon", "falcon_h1", "flex_olmo",
    "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt_bigcode", "gpt_neo", "gpt_oss",
    "gptj", "granite", "granitemoe", "granitemoehybrid", "helium", "jamba", "jetmoe", "lfm2", "llama4_text",
    "mamba", "ministral", "mistral", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "persimmon", "phi", "phi3", "phimoe", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3",
    "stablelm", "starcoder2", "vaultgemma", "xglm",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", RIGHT)
def test_a_further_family_that_is_right(kind):
    known = CONFIG_MAPPING[kind]()
    names = {*known.to_dict(), *known.attribute_map} - set(known.attribute_map.values())
    config = CONFIG_MAPPING[kind](
        **{name: x for name, x in (TINY | OWN.get(kind, {})).items() if name in names}
    )
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    for name in ["eager"] + ["sdpa"] * model_class._supports_sdpa:
        assert padding_problem(Actor(random_model(config, attention=name)), CPU) is None
