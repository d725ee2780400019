"""Tiny random checkpoints that also read images, as folders with the character tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.tiny import CHARACTERS, save_tokenizer

TEXT = {
    "vocab_size": len(CHARACTERS) + 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gemma3() -> Any:
    """``AutoModelForCausalLM`` reads it with its tower."""
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    tower = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = Gemma3TextConfig(**TEXT, sliding_window=8)
    vision = SiglipVisionConfig(**tower, image_size=8, patch_size=4)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


def qwen3_5() -> Any:
    """``AutoModelForCausalLM`` reads it without its tower."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    tower = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    config = Qwen3_5Config(
        text_config=TEXT | heads | {"layer_types": ["linear_attention", "full_attention"]},
        vision_config=tower | {"patch_size": 4, "num_position_embeddings": 16},
    )
    return Qwen3_5ForConditionalGeneration(config)


def save_with_tower(kind: str, folder: Path) -> str:
    """``gemma3`` or ``qwen3_5``."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        {"gemma3": gemma3, "qwen3_5": qwen3_5}[kind]().save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def save_language_model(whole: str, folder: Path) -> str:
    """The language model alone, as docs/limits.md says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(whole, dtype="auto")
    text = AutoModelForCausalLM.from_config(model.config.get_text_config(), dtype=model.dtype)
    text.model.load_state_dict(getattr(model.model, "language_model", model.model).state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    text.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)
