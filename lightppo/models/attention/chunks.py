"""Packed rows of models that attend inside chunks of a sequence (Llama 4)."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightppo.models.attention.row_attention import packed_attention
from lightppo.models.batches import RowPlan, plan_of, segments_as_mask, to_device

PACKED_CHUNKS = "packed_chunks"  # the name of attention_in_chunks in transformers


def attends_in_chunks(model: PreTrainedModel) -> bool:
    """Whether :func:`attention_in_chunks` stands in for a model's sdpa."""
    kinds = getattr(model.config, "layer_types", None) or ()
    return model.config._attn_implementation == "sdpa" and "chunked_attention" in kinds


def why_no_chunks(model: PreTrainedModel) -> str | None:
    """Why chunks cannot be packed; None: they can."""
    if model.config._attn_implementation in ("sdpa", PACKED_CHUNKS):
        return None
    return "they need --attn_implementation sdpa"


def attention_in_chunks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``packed_attention``; a position of a chunked layer sees those of its own chunk of its sequence."""
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        plan = plan_of(attention_mask, query.device)
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            query = by_position(module, query, plan)
        if module.config.layer_types[module.layer_idx] == "chunked_attention":
            attention_mask = chunks_as_segments(plan, module.config.attention_chunk_size, query)
    return packed_attention(module, query, key, value, attention_mask, **options)


def chunks_as_segments(plan: RowPlan, size: int, like: Tensor) -> Tensor:
    """The mask of a row whose segments are the chunks; a response goes on in the last chunk of its prompt."""
    key = ("chunks", size)
    if key not in plan.kept:
        lengths: list[int] = []
        parents: list[int] = []
        last: dict[int, int] = {}  # segment -> number of its last chunk
        for segment, (length, parent) in enumerate(zip(plan.lengths, plan.parents)):
            begun = plan.lengths[parent] % size if parent >= 0 else 0
            follows = last[parent] if begun else -1
            while length:
                new = min(length, size - begun)
                lengths.append(new)
                parents.append(follows)
                length = length - new
                begun = 0
                follows = -1
            last[segment] = len(lengths) - 1
        plan.kept[key] = segments_as_mask(lengths, parents, like.device)
    return plan.kept[key]


def by_position(module: nn.Module, query: Tensor, plan: RowPlan) -> Tensor:
    """Queries (1, H, T, D), which the layer has scaled by their places in the row, scaled by their positions."""
    if plan.tokens < module.floor_scale:  # all scales are 1
        return query
    key = ("scales", module.floor_scale, module.attn_scale)
    if key not in plan.kept:
        starts = [0 if p < 0 else plan.lengths[p] for p in plan.parents]
        ends = accumulate(plan.lengths)
        places = torch.arange(plan.tokens)
        moved = torch.tensor(
            [start - (end - n) for start, end, n in zip(starts, ends, plan.lengths)]
        )
        positions = places + moved.repeat_interleave(torch.tensor(plan.lengths))
        right, wrong = (
            torch.log1p(torch.floor((x.float() + 1) / module.floor_scale)) * module.attn_scale + 1
            for x in (positions, places)
        )
        plan.kept[key] = to_device((right / wrong)[:, None], query.device)
    return (query * plan.kept[key]).to(query.dtype)


AttentionInterface.register(PACKED_CHUNKS, attention_in_chunks)
AttentionMaskInterface.register(PACKED_CHUNKS, sdpa_mask)
