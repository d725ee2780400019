"""Tiny models of families whose decoding differs: windows, tied weights, other caches."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lightppo.data.records import Rollout

EOS_ID = 1
SIZES = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "max_position_embeddings": 96,
}
BUILD = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=4)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=6)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, sliding_window=6)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=30, n_embd=32, n_layer=2, n_head=4, n_positions=96, bos_token_id=None, eos_token_id=EOS_ID,
            initializer_range=0.3, tie_word_embeddings=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ),
}  # fmt: skip


def build(name: str, attention: str = "sdpa") -> PreTrainedModel:
    """A random model of a family, the same at each call."""
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    try:
        model.set_attn_implementation(attention)
    except ValueError as error:  # Gemma 2 since transformers 5.23
        pytest.skip(str(error).partition(".")[0])
    return model


def check_greedy(model: PreTrainedModel, rollouts: list[Rollout], new_tokens: int) -> None:
    """Each response is what transformers generates for its prompt alone."""
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt.token_ids])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert rollout.response_ids == expected[0, ids.shape[1] :].tolist()
