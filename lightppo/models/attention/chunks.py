"""Packed rows of models that attend inside chunks of a sequence (Llama 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightppo.models.attention.row_attention import packed_attention
from lightppo.models.batches import RowPlan, plan_of, segments_as_mask, to_device

PACKED_CHUNKS = "packed_chunks"  # the name of attention_in_chunks in transformers


def attends_in_chunks(model: PreTrainedModel) -> bool:
    """Tell whether :func:`attention_in_chunks` stands in for a model's sdpa."""
    layer_kinds = getattr(model.config, "layer_types", None) or ()
    return model.config._attn_implementation == "sdpa" and "chunked_attention" in layer_kinds


def why_no_chunks(model: PreTrainedModel) -> str | None:
    """Return why chunks cannot be packed; None: they can."""
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
    """Attend as ``packed_attention``; in chunked layers a position sees those of its own chunk of its sequence."""
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        plan = plan_of(attention_mask, query.device)
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            query = by_position(module, query, plan)
        if module.config.layer_types[module.layer_idx] == "chunked_attention":
            attention_mask = chunks_as_segments(plan, module.config.attention_chunk_size, query)
    return packed_attention(module, query, key, value, attention_mask, **options)


def chunks_as_segments(plan: RowPlan, chunk_size: int, states: Tensor) -> Tensor:
    """Return the mask of a row whose segments are the chunks; a response goes on in the last chunk of its prompt."""

    def mask() -> Tensor:
        lengths: list[int] = []
        parents: list[int] = []
        last_chunks: dict[int, int] = {}  # segment -> number of its last chunk
        for segment, (remaining, parent) in enumerate(zip(plan.lengths, plan.parents)):
            chunk_start = plan.lengths[parent] % chunk_size if parent >= 0 else 0
            parent_chunk = last_chunks[parent] if chunk_start else -1
            while remaining:
                lengths.append(min(remaining, chunk_size - chunk_start))
                parents.append(parent_chunk)
                remaining -= lengths[-1]
                chunk_start = 0
                parent_chunk = -1
            last_chunks[segment] = len(lengths) - 1
        return segments_as_mask(lengths, parents, states.device)

    return plan.once(("chunks", chunk_size), mask)


def by_position(module: nn.Module, query: Tensor, plan: RowPlan) -> Tensor:
    """Rescale queries (1, H, T, D) by their positions: the layer has scaled them by their places in the row."""
    if plan.tokens < module.floor_scale:  # all scales are 1
        return query

    def scale(indices: Tensor) -> Tensor:
        steps = torch.floor((indices.float() + 1) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1

    def corrections() -> Tensor:
        starts = [0 if parent < 0 else plan.lengths[parent] for parent in plan.parents]
        positions = torch.cat([torch.arange(n) + start for n, start in zip(plan.lengths, starts)])
        corrected = scale(positions) / scale(torch.arange(plan.tokens))
        return to_device(corrected[:, None], query.device)

    factors = plan.once(("scales", module.floor_scale, module.attn_scale), corrections)
    return (query * factors).to(query.dtype)


AttentionInterface.register(PACKED_CHUNKS, attention_in_chunks)
AttentionMaskInterface.register(PACKED_CHUNKS, sdpa_mask)
