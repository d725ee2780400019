"""A tiny random model of each family of docs/models.md: what transformers calls it, and sizes."""

from __future__ import annotations

from typing import Any

from support.tiny import CHARACTERS

VOCABULARY = 64  # more than the tokenizer has: those beyond it are never sampled
assert len(CHARACTERS) + 4 < VOCABULARY

# By their names in the configs of all families; each takes what it knows. Heads of 32 are the smallest that vLLM's
# attention takes on a CPU, rows of 64 or 128 the smallest that hold whole blocks of 4 bits.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "max_position_embeddings": 128,
    "rope_scaling": None,
    # width and depth
    "hidden_size": 128,
    "n_embd": 128,
    "d_model": 128,
    "word_embed_proj_dim": 128,
    "intermediate_size": 128,
    "n_inner": 128,
    "ffn_dim": 128,
    "ffn_hidden_size": 128,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    # attention
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "sliding_window": 4,
    "window_size": 4,
    "n_positions": 128,
    "max_seq_len": 128,
    "query_pre_attn_scalar": 32,
    # attention from latent vectors
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # recurrent layers
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 256,
    "mamba_dt_rank": 8,
    "state_size": 16,
    "time_step_rank": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "conv_L_cache": 3,
    "lru_width": 128,
    # embeddings of layers
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 64,
    "num_kv_shared_layers": 0,
    "altup_num_inputs": 2,
    "laurel_rank": 16,
}

DELTA_NET = {"layer_types": ["linear_attention", "full_attention"]}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {"num_key_value_heads": 4}
JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}

# name → what differs from SIZES, and with "kind" the model type
FAMILIES: dict[str, dict[str, Any]] = {
    # full attention, dense
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "bloom": {},
    "cohere": {},
    "cwm": WINDOW,
    "diffllama": {},
    "doge": {},
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "ernie4_5": {},
    "exaone4": WINDOW,
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 512},
    "falcon (alibi)": {
        "kind": "falcon",
        "alibi": True,
        "multi_query": False,
        "ffn_hidden_size": 512,  # vLLM's has no other width
    },
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "gemma3n_text": WINDOW | {"intermediate_size": [128, 128], "activation_sparsity_pattern": None},
    "gemma4_text": WINDOW | {"num_experts": None, "moe_intermediate_size": None},
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gptj": {},
    "granite": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "llama": {},
    "ministral": WINDOW,
    "mistral": {},
    "mpt": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": WINDOW,
    # full attention, experts
    "beam": WINDOW | {"mlp_layer_types": ["dense", "sparse"], "n_group": 2, "topk_group": 1},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "doge (experts)": {"kind": "doge", "is_moe": True, "num_experts": 16},
    "dots1": WINDOW,
    "ernie4_5_moe": {},
    "flex_olmo": {},
    "flint": WINDOW | {"mlp_only_layers": [0]},
    "glm4_moe": {"head_dim": 32},
    "gpt_oss": WINDOW,
    "granitemoe": {},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "kolibri1": WINDOW,
    "llama4_text": {
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "intermediate_size_mlp": 128,
    },
    # what checkpoints have beside transformers' own, and vLLM reads
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {"router_jitter_noise": 0.2},
    "qwen2_moe": {},
    "qwen3_moe": {},
    # recurrent layers
    "bailing_hybrid": DELTA_NET | LATENT | {"mlp_layer_types": ["dense", "sparse"]},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {},
    "falcon_mamba": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": JAMBA,
    # as above
    "inkling2_text": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "unpadded_vocab_size": 48,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "sliding_window_size": 4,
        "d_rel": 8,
        "rel_extent": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_dim": 128, "block_dim": 128},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 1, "chunk_size": 8},
    "minimax": DELTA_NET | {"block_size": 8},
    "olmo_hybrid": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET,
    "qwen3_5_text": DELTA_NET,
    "qwen3_next": DELTA_NET,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 128},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 32,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "adapter_rank": 8,
        "attention_head_dim": 64,  # of twice the model's width
        "num_key_value_heads": 4,
    },
}


def families_here() -> list[str]:
    """The families that the installed transformers has."""
    from transformers import CONFIG_MAPPING

    return [name for name, own in FAMILIES.items() if own.get("kind", name) in CONFIG_MAPPING]


def config_of(family: str) -> Any:
    """A new config; a value goes where the config knows its name, under the name that the family prefers."""
    from transformers import CONFIG_MAPPING

    own = dict(FAMILIES[family])
    kind = CONFIG_MAPPING[own.pop("kind", family)]
    known = kind()
    names = {*known.to_dict(), *known.attribute_map} - set(known.attribute_map.values())
    return kind(**{name: value for name, value in SIZES.items() if name in names} | own)


def random_model(family: str, seed: int = 0, attention: str | None = None) -> Any:
    """Random also where a new model has zeros or ones: a bias of 0 would hide what happens to it."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation=attention)
        for parameter in model.parameters():
            if parameter.dim() < 2 or parameter.std() == 0:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        # transformers begins with zeros at the pad token, which trained models do not have there
        model.get_input_embeddings().weight[0].normal_(std=0.1)
    return model.eval()
