"""Tiny random models with recurrent layers, one of each family, made here, offline."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    NemotronHConfig,
    OlmoHybridConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

from lightppo.models.attention.recurrent import before_known_code

IN_ROWS = pytest.mark.skipif(
    bool(before_known_code()), reason="recurrent layers of this transformers are not packed"
)
VOCAB = 48
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # a delta rule multiplies rounding by the size of its weights: by 10 for weights of 0.2
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
BOTH = ["linear_attention", "full_attention"]
HYBRIDS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **COMMON,
        **DELTA,
        head_dim=8,
        num_hidden_layers=3,
        layer_types=["linear_attention", *BOTH],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.5,
        },
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **COMMON,
        **DELTA,
        **EXPERTS,
        head_dim=8,
        num_hidden_layers=2,
        layer_types=BOTH,
        num_experts=4,
        shared_expert_intermediate_size=16,
    ),
    "olmo_hybrid": lambda: OlmoHybridConfig(
        **COMMON, **DELTA, num_hidden_layers=2, layer_types=BOTH
    ),
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        **COMMON | {"num_key_value_heads": 4},
        **EXPERTS,
        num_hidden_layers=2,
        layer_types=BOTH,
        num_local_experts=4,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        linear_num_heads=4,
        linear_head_dim=8,
    ),
    "lfm2": lambda: Lfm2Config(
        **COMMON, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]
    ),
    "bamba": lambda: BambaConfig(**COMMON, **MAMBA2, num_hidden_layers=2, attn_layer_indices=[1]),
    "bamba_slow": lambda: BambaConfig(
        **COMMON,
        **MAMBA2,
        num_hidden_layers=2,
        attn_layer_indices=[1],
        time_step_limit=(0.5, 2.0),  # a step takes time, whatever the layer says
    ),
    "granite": lambda: GraniteMoeHybridConfig(
        **COMMON,
        **MAMBA2,
        num_hidden_layers=2,
        layer_types=BOTH,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "falcon_h1": lambda: FalconH1Config(**COMMON, **MAMBA2, num_hidden_layers=2, mamba_d_ssm=64),
    "jamba": lambda: JambaConfig(
        **COMMON,
        num_hidden_layers=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **COMMON,
        layers_block_type=["linear_attention", "mlp", "full_attention"],
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        conv_kernel=4,
    ),
    "zamba2": lambda: Zamba2Config(
        **COMMON,
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        mamba_d_state=8,
        mamba_expand=2,
        mamba_ngroups=1,
        n_mamba_heads=4,
        num_mem_blocks=1,
        chunk_size=16,
        adapter_rank=4,
    ),
}
if not hasattr(transformers, "KimiLinearConfig"):  # older releases
    del HYBRIDS["kimi_linear"]


def hybrid(name: str, kind: type = AutoModelForCausalLM, **changes: object) -> PreTrainedModel:
    """A random model of a family of ``HYBRIDS``, the same at each call."""
    torch.manual_seed(0)
    config = HYBRIDS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = kind.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # transformers makes them all equal
            if parameter.dim() == 1 and ("dt_bias" in parameter_name or "conv" in parameter_name):
                parameter.normal_(0, 0.5)
    return model
