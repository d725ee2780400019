"""Attention of one new token per row to a :class:`~lightppo.rollout.cache.SlotCache`, without copies of it.

transformers' ``sdpa`` repeats the keys and values of grouped heads at every step where a mask is there (Ainslie et al.
2023, arXiv:2305.13245, has them shared for speed), and builds its mask anew. Here the heads of a group are the rows of
one small matrix, and the mask comes ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightppo.models.packed_attention import PACKED_SDPA

SLOT_SDPA = "slot_sdpa"


def can_attend_to_slots(model: nn.Module, config: PretrainedConfig) -> bool:
    """Whether :func:`slot_attention` can stand in for the model's own: scaled dot products and nothing else."""
    return (
        config._attn_implementation in ("sdpa", PACKED_SDPA)
        and getattr(model, "_supports_attention_backend", False)
        and not getattr(config, "alibi", False)
    )


@contextmanager
def attention_to_slots(config: PretrainedConfig) -> Iterator[None]:
    """The model attends by :func:`slot_attention` inside; ``config`` is that of its text layers."""
    before = config._attn_implementation
    config._attn_implementation = SLOT_SDPA
    try:
        yield
    finally:
        config._attn_implementation = before


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' ``sdpa``, but for one new token with an additive mask.

    Args:
        module: the attention layer.
        query: (B, H, L, D).
        key, value: (B, H_kv, S, D).
        attention_mask: (B, 1, 1, S), added to the scores; or what ``sdpa`` takes.
        dropout, scaling, kwargs: as ``sdpa`` takes them.

    Returns:
        (B, L, H, D), and no weights.
    """
    added = attention_mask is not None and attention_mask.is_floating_point()
    if query.shape[2] != 1 or not added or dropout or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    rows, heads, _, width = query.shape
    scaling = width**-0.5 if scaling is None else scaling
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    if query.is_cpu and query.dtype == torch.float32:
        # Faster than the CPU's flash kernel for a single query, by 2 over contiguous keys and values.
        scores = torch.matmul(grouped * scaling, key.transpose(2, 3)).add_(attention_mask)  # (B, H_kv, H/H_kv, S)
        output = torch.matmul(scores.softmax(-1), value)
    else:
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(SLOT_SDPA, slot_attention)
AttentionMaskInterface.register(SLOT_SDPA, sdpa_mask)
