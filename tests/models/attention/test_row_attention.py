"""Which attention a model gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from lightppo.errors import ModelLoadError
from lightppo.models.actor import Actor
from lightppo.models.attention import row_attention


def test_attention_choice_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (
        row_attention.resolve_attn_implementation("auto", torch.bfloat16, LlamaForCausalLM) is None
    )  # transformers takes sdpa, or eager
    with pytest.raises(ModelLoadError, match=r"CUDA device; .*--bf16.*--attn_implementation sdpa"):
        row_attention.resolve_attn_implementation(
            "flash_attention_2", torch.float32, LlamaForCausalLM
        )


def test_capped_scores_are_never_left_out(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    config = Gemma2Config(
        **sizes, num_attention_heads=2, num_key_value_heads=1, attn_logit_softcapping=0.01
    )
    model = Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    ids, mask = torch.randint(32, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    expected = (
        model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    )
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"--attn_implementation sdpa .*attn_logit_softcapping"
    ):
        Actor(str(tmp_path), attn_implementation="sdpa")
    actor = Actor(str(tmp_path), packing_samples=None)
    for packs in (False, True):
        if packs:
            assert actor.layout.try_packing(torch.device("cpu")) is None
        torch.testing.assert_close(actor(ids, num_actions=8, attention_mask=mask), expected)


def test_attention_choice_with_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(row_attention, "is_flash_attn_2_available", lambda: True)

    class Unable(LlamaForCausalLM):
        _supports_flash_attn = False

    # torch's own kernel for packed rows comes first: it also shares prompts
    monkeypatch.setattr(row_attention, "VARLEN_TAKES", {"scale", "window_size"})
    assert (
        row_attention.resolve_attn_implementation(
            "auto", torch.bfloat16, LlamaForCausalLM, LlamaConfig()
        )
        is None
    )
    assert (
        row_attention.resolve_attn_implementation(
            "flash_attention_2", torch.bfloat16, LlamaForCausalLM
        )
        == "flash_attention_2"
    )
    # it leaves out Gemma 2's soft capping
    assert (
        row_attention.resolve_attn_implementation(
            "auto", torch.bfloat16, Gemma2ForCausalLM, Gemma2Config()
        )
        == "flash_attention_2"
    )
    monkeypatch.setattr(row_attention, "VARLEN_TAKES", {"is_causal"})
    assert (
        row_attention.resolve_attn_implementation(
            "auto", torch.bfloat16, LlamaForCausalLM, LlamaConfig()
        )
        == "flash_attention_2"
    )
    assert (
        row_attention.resolve_attn_implementation(
            "flash_attention_2", torch.bfloat16, LlamaForCausalLM
        )
        == "flash_attention_2"
    )
    assert (
        row_attention.resolve_attn_implementation("flash_attention_2", torch.bfloat16, None)
        == "flash_attention_2"
    )  # custom code: try
    assert (
        row_attention.resolve_attn_implementation("auto", torch.float32, LlamaForCausalLM) is None
    )
    assert row_attention.resolve_attn_implementation("auto", torch.bfloat16, Unable) is None
    assert row_attention.resolve_attn_implementation("auto", torch.bfloat16, None) is None
    # transformers would look for its kernels on the hub
    assert (
        row_attention.resolve_attn_implementation(
            "auto", torch.bfloat16, GptOssForCausalLM, GptOssConfig()
        )
        is None
    )
    with pytest.raises(ModelLoadError, match=r"GptOssForCausalLM takes kernels-community/.* only"):
        row_attention.resolve_attn_implementation(
            "flash_attention_2", torch.bfloat16, GptOssForCausalLM, GptOssConfig()
        )
    with pytest.raises(ModelLoadError, match=r"--attn_implementation .*Unable"):
        row_attention.resolve_attn_implementation("flash_attention_2", torch.bfloat16, Unable)
    monkeypatch.setattr(row_attention, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(ModelLoadError, match=r"--attn_implementation .*flash-attn package"):
        row_attention.resolve_attn_implementation(
            "flash_attention_2", torch.bfloat16, LlamaForCausalLM
        )
