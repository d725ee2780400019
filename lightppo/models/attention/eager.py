"""Packed rows of models that attend by their own code alone: attention sinks (gpt-oss), capped scores (Gemma 2)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from lightppo.models.attention.row_attention import caps_scores, window_of
from lightppo.models.batches import RowPlan, continued, plan_of

PACKED_EAGER = "packed_eager"  # the name of eager_by_segment in transformers


def attends_by_own_code(model: PreTrainedModel) -> bool:
    """Tell whether :func:`eager_by_segment` stands in for a model's attention, which sdpa cannot."""
    return (
        model.config._attn_implementation == "eager"
        and model._can_set_attn_implementation()
        and (not model._supports_sdpa or caps_scores(model.config))
    )


# a graph that is compiled ends here: segments differ from row to row
@torch.compiler.disable
def eager_by_segment(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend by the model's ``eager``, also in packed rows with ``segments_as_mask``, one call for each segment.

    query (1, H, T, D), key and value (1, H_kv, T, D) -> (1, T, H, D).
    """
    model_attention = _own_code(module)
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return model_attention(module, query, key, value, attention_mask, **options)
    plan = plan_of(attention_mask, query.device)
    keys, values = (
        continued(states.split(plan.lengths, 2), plan.parents, 2) for states in (key, value)
    )
    masks = added_masks(plan, window_of(module, options), query)
    segments = zip(query.split(plan.lengths, 2), keys, values, masks)
    outputs = [
        model_attention(module, query_part, key_part, value_part, mask, **options)[0]
        for query_part, key_part, value_part, mask in segments
    ]
    return torch.cat(outputs, 1), None


def added_masks(plan: RowPlan, window: int | None, states: Tensor) -> list[Tensor]:
    """Return for each segment (1, 1, new, seen): 0 where a new position sees another, else the lowest number."""
    lowest_number = torch.finfo(states.dtype).min

    def masks() -> list[Tensor]:
        added = []
        for length, mask in zip(plan.lengths, plan.masks(window, states)):
            if mask is None:  # causal
                mask = states.new_full((length, length), lowest_number).triu_(1)
            added.append(mask.clamp(min=lowest_number)[None, None])
        return added

    return plan.once(("added", window, states.dtype), masks)


def _own_code(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    family_module = sys.modules[type(module).__module__]
    if not hasattr(family_module, "eager_attention_forward"):
        raise NotImplementedError(
            f"--packing_samples: {type(module).__name__} has no attention of transformers' kind"
        )
    return family_module.eager_attention_forward


AttentionInterface.register(PACKED_EAGER, eager_by_segment)
AttentionMaskInterface.register(PACKED_EAGER, eager_mask)
