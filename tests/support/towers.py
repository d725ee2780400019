"""Tiny random checkpoints that also read images or sound, as folders with the character tokenizer."""

from __future__ import annotations

import hashlib
import json
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
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_IMAGES = {"image_size": 8, "patch_size": 4}


def gemma3(**shape: Any) -> Any:
    """Its embeddings are tied; ``AutoModelForCausalLM`` alone would read its tower, too."""
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    text = Gemma3TextConfig(**TEXT | shape, sliding_window=8)
    vision = SiglipVisionConfig(**_TOWER, **_IMAGES)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


def qwen3_5(**shape: Any) -> Any:
    """Linear attention beside full; ``AutoModelForCausalLM`` alone would leave its tower out."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    tower = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": (TEXT | shape)["hidden_size"],
    }
    config = Qwen3_5Config(
        text_config=TEXT | heads | shape | {"layer_types": ["linear_attention", "full_attention"]},
        vision_config=tower | {"patch_size": 4, "num_position_embeddings": 16},
    )
    return Qwen3_5ForConditionalGeneration(config)


def qwen3_5_moe(**shape: Any) -> Any:
    """Experts, which are held together; linear attention."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    dense = qwen3_5(**shape).config.to_dict()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16}
    text = {name: value for name, value in dense["text_config"].items() if name != "model_type"}
    vision = {name: v for name, v in dense["vision_config"].items() if name != "model_type"}
    config = Qwen3_5MoeConfig(text_config=text | experts, vision_config=vision)
    return Qwen3_5MoeForConditionalGeneration(config)


def mistral3(**shape: Any) -> Any:
    """``AutoModelForCausalLM`` alone does not know it."""
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        MistralConfig,
        PixtralVisionConfig,
    )

    text = MistralConfig(**TEXT | shape, sliding_window=None)
    vision = PixtralVisionConfig(**_TOWER, **_IMAGES, head_dim=8)
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision, image_token_index=5)
    )


def qwen2_audio(**shape: Any) -> Any:
    """It reads sound."""
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2Config,
    )

    told = {name: value for name, value in (TEXT | shape).items() if name != "head_dim"}
    text = Qwen2Config(**told)
    heads = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    sound = Qwen2AudioEncoderConfig(**heads, d_model=16, num_mel_bins=8, max_source_positions=8)
    return Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(text_config=text, audio_config=sound, audio_token_index=5)
    )


def qwen3_vl(**shape: Any) -> Any:
    """transformers has its text model without a class for text alone."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    tower |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = TEXT | shape
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = Qwen3VLConfig(
        text_config=text | {"rope_parameters": sections},
        vision_config=tower | {"out_hidden_size": text["hidden_size"]},
    )
    return Qwen3VLForConditionalGeneration(config)


KINDS = {
    "gemma3": gemma3,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "mistral3": mistral3,
    "qwen3_vl": qwen3_vl,
    "qwen2_audio": qwen2_audio,
}


def save_with_tower(kind: str, folder: Path, **shape: Any) -> str:
    """One of ``KINDS``, with a file of a processor; ``shape``: of its language model."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = KINDS[kind](**shape)
    for parameter in model.parameters():
        if not parameter.any():  # a weight of zeros would hide what happens to it
            parameter.data.normal_()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"of": kind}))
    return str(folder)


def sums_of(folder: str | Path) -> dict[str, str]:
    """SHA-256 of each tensor with its type and shape, of all files of a checkpoint."""
    import torch
    from safetensors import safe_open

    sums = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            for name in names:
                tensor = opened.get_tensor(name)
                about = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
                content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                sums[name] = hashlib.sha256(about + content).hexdigest()
    return sums


def sums_of_tower(folder: str | Path) -> dict[str, str]:
    """Those of all that is not of the language model."""
    return {
        name: value
        for name, value in sums_of(folder).items()
        if "language_model" not in name and "lm_head" not in name
    }


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
