"""Attention inside each sequence of a packed row, without a (T, T) mask: cost and memory grow with real tokens only.

transformers hands a four-dimensional attention mask through to every layer unchanged. A packed row brings one that
holds no mask but the length of each sequence; the attention function registered here knows it by its type. Where
several responses share a prompt in the row, it also says which segment each continues.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

PACKED_SDPA = "packed_sdpa"


def use_packed_attention(model: PreTrainedModel) -> None:
    """Let a model that attends by ``sdpa`` take :func:`lengths_as_mask`; all else it does as before.

    Models with another attention (flash_attention_2 has kernels for packed rows, eager has none) stay as they are.
    """
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(PACKED_SDPA, packed_attention)
        AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)
        model.set_attn_implementation(PACKED_SDPA)


def takes_lengths(model: PreTrainedModel) -> bool:
    """Whether a packed row may bring its lengths instead of a mask."""
    return model.config._attn_implementation == PACKED_SDPA


def lengths_as_mask(lengths: Tensor) -> Tensor:
    """(N,) lengths of the sequences of a packed row -> (1, 1, 1, N) int64, in the place of its attention mask."""
    return lengths.long()[None, None, None]


def segments_as_mask(lengths: Tensor, parents: Tensor) -> Tensor:
    """Segments of a packed row in the place of its attention mask, (1, 1, 2, N) int64.

    Args:
        lengths: (N,).
        parents: (N,), the earlier segment that a segment continues: it attends to all of that, and causally to itself.
            -1: a prompt or a whole sequence, which attends to itself alone; only such a segment is continued.
    """
    return torch.stack([lengths.long(), parents.long()])[None, None]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' ``sdpa``, but for a packed row with :func:`lengths_as_mask` or :func:`segments_as_mask`.

    Args:
        module: the attention layer.
        query: (1, H, T, D).
        key, value: (1, H_kv, T, D).
        attention_mask: of :func:`lengths_as_mask` or :func:`segments_as_mask`, or what ``sdpa`` takes.
        dropout, scaling: as ``sdpa`` takes them.
        kwargs: read is ``sliding_window``: tokens that a position sees, itself included.

    Returns:
        (1, T, H, D), and no weights.
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    lengths, parents = _segments(attention_mask)
    if query.shape[2] != sum(lengths):
        raise ValueError(f"a packed row of {query.shape[2]} tokens cannot hold sequences of {sum(lengths)}")
    window = _window(module, kwargs)
    if _has_varlen_kernel(query) and dropout == 0:
        return _varlen(query, key, value, lengths, parents, scaling, window), None
    options = {"dropout_p": dropout, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    outputs = []
    # split, not slices: the backward pass of a slice writes a whole row of zeros for each sequence
    keys, values = (_continued(x.split(lengths, 2), parents, 2) for x in (key, value))
    for q, k, v in zip(query.split(lengths, 2), keys, values):
        new, total = q.shape[2], k.shape[2]
        if new == total and (window is None or total <= window):
            outputs.append(scaled_dot_product_attention(q, k, v, is_causal=True, **options))
        else:
            near = torch.ones(new, total, dtype=torch.bool, device=q.device).tril_(total - new)
            if window is not None:
                near.triu_(total - new + 1 - window)
            outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=near, **options))
    return torch.cat(outputs, 2).transpose(1, 2), None


def _segments(mask: Tensor) -> tuple[list[int], list[int]]:
    """Lengths and parents, of either kind of mask."""
    rows = mask.flatten(0, 2).tolist()
    return rows[0], rows[1] if len(rows) == 2 else [-1] * len(rows[0])


def _continued(segments: Sequence[Tensor], parents: list[int], dim: int) -> list[Tensor]:
    """Each segment behind the one it continues. The backward pass adds up what a prompt gets from all of them."""
    return [x if p < 0 else torch.cat([segments[p], x], dim) for x, p in zip(segments, parents)]


def _window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"]
    if "sliding_attention" in (getattr(module.config, "layer_types", None) or ()):
        raise NotImplementedError(
            f"--packing_samples: {type(module).__name__} has a sliding window and does not tell the attention of it: "
            "leave --packing_samples out, or set --attn_implementation flash_attention_2"
        )
    return None


def _has_varlen_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _varlen_kernel() is not None


@cache
def _varlen_kernel() -> Any:
    """torch's own kernel for packed rows, where this torch has one that takes a scale and a window; else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    wanted = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if wanted <= inspect.signature(varlen_attn).parameters.keys() else None


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    parents: list[int],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """(1, H, T, D) three times -> (1, T, H, D) on a GPU.

    The kernel's causal window ends at the lower right: the last query sees the last key, so that a response sees all
    of the prompt before it.
    """
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))  # (T, H, D)
    seen = [n if p < 0 else lengths[p] + n for n, p in zip(lengths, parents)]
    if seen != lengths:
        k, v = (torch.cat(_continued(x.split(lengths), parents, 0)) for x in (k, v))
    borders = [torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=q.device) for n in (lengths, seen)]
    back = -1 if window is None else window - 1
    options = {"scale": scaling, "window_size": (back, 0), "enable_gqa": q.shape[1] != k.shape[1]}
    return _varlen_kernel()(q, k, v, *borders, max(lengths), max(seen), **options)[None]
