"""Which attention a model gets: what its family needs, and what this machine has."""

from __future__ import annotations

import inspect
from typing import Literal

import torch
from transformers import PretrainedConfig
from transformers.utils import is_flash_attn_2_available

from lightppo.errors import ModelLoadError

try:
    from torch.nn.attention.varlen import varlen_attn

    VARLEN_TAKES = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:  # an older torch
    VARLEN_TAKES = frozenset()


def resolve_attn_implementation(
    name: str,
    dtype: torch.dtype | Literal["auto"],
    model_class: type | None = None,
    config: PretrainedConfig | None = None,
) -> str | None:
    """The flag for transformers; None: it chooses. "auto" is flash_attention_2 if usable, after torch's own kernel.

    Capped scores (Gemma 2) are left out by transformers' sdpa, so that "auto" is then eager. Falcon's alibi is right
    under sdpa only.
    """
    capped = caps_scores(config)
    if name == "sdpa" and capped:
        raise ModelLoadError(
            "--attn_implementation sdpa leaves out this model's attn_logit_softcapping: leave the option out, or set "
            """--override_config '{"attn_logit_softcapping": null}' to train without it"""
        )
    if name == "eager" and adds_alibi_twice(config):
        raise ModelLoadError(
            "--attn_implementation eager adds this model's alibi twice (Falcon in transformers): leave the option out"
        )
    if name not in ("auto", "flash_attention_2") or (
        name == "auto" and torch_has_flash(model_class, config)
    ):
        return None if name == "auto" else name
    # For a model with code of its own, trying tells.
    supported = getattr(model_class, "_supports_flash_attn", name == "flash_attention_2")
    # For gpt-oss, Granite with sinks and MiMo, transformers would fetch one of these kernels from the hub instead.
    own_kernels = getattr(model_class, "_compatible_flash_implementations", None) or [
        "flash_attention_2"
    ]
    obstacles = {
        "there is no CUDA device": not torch.cuda.is_available(),
        "the flash-attn package (2.3.3 or newer) is not installed": not is_flash_attn_2_available(),
        "it needs --bf16 or --fp16": dtype not in (torch.bfloat16, torch.float16),
        f"{getattr(model_class, '__name__', None)} does not support it": not supported,
        f"{getattr(model_class, '__name__', None)} takes {', '.join(own_kernels)} only": (
            "flash_attention_2" not in own_kernels
        ),
    }
    reasons = [reason for reason, holds in obstacles.items() if holds]
    if reasons and name == "flash_attention_2":
        raise ModelLoadError(
            f"--attn_implementation flash_attention_2 (--flash_attn) cannot be used: {'; '.join(reasons)}. "
            "Set --attn_implementation sdpa."
        )
    if reasons:
        return "eager" if capped else None
    return "flash_attention_2"


def adds_alibi_twice(config: PretrainedConfig | None) -> bool:
    """Whether eager attention is wrong: Falcon's mask has the alibi in it, and its eager layers add it once more."""
    return config is not None and config.model_type == "falcon" and bool(config.alibi)


def caps_scores(config: PretrainedConfig | None) -> bool:
    """Whether attention squeezes its scores between two bounds."""
    text = None if config is None else config.get_text_config()
    return getattr(text, "attn_logit_softcapping", None) is not None


def torch_has_flash(model_class: type | None, config: PretrainedConfig | None) -> bool:
    """Whether sdpa runs packed rows of this model by FlashAttention, as torch does from 2.11 on.

    It is the same kernel as flash-attn's, without waiting in each layer, and shares prompts; decoding keeps its slots.
    """
    flash = "window_size" in VARLEN_TAKES and getattr(model_class, "_supports_sdpa", False)
    return flash and not caps_scores(config)
