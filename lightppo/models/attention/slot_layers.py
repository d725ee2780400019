"""Decoding slots of a layer: keys and values in buffers that are written in place, and attention of one new token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, cache_utils
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightppo.models.attention.row_attention import PACKED_SDPA, has_alibi

SLOT_SDPA = "slot_sdpa"


def can_attend_to_slots(model: nn.Module, config: PretrainedConfig) -> bool:
    """Tell whether :func:`slot_attention` can replace the model's attention: scaled dot products and nothing else."""
    return (
        config._attn_implementation in ("sdpa", PACKED_SDPA)
        and getattr(model, "_supports_attention_backend", False)
        and not has_alibi(config)
    )


@contextmanager
def attention_to_slots(config: PretrainedConfig, name: str = SLOT_SDPA) -> Iterator[None]:
    """Let the model attend by :func:`slot_attention`, or what has the name; ``config`` is of its text layers."""
    previous_name = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = previous_name


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``sdpa``, but for one new token with a mask (B, 1, 1, S) that is added to the scores.

    ``query`` (B, H, L, D), ``key`` and ``value`` (B, H_kv, S, D) -> (B, L, H, D), and no weights.
    """
    # Doge's mask has a row for each head
    is_added = (
        attention_mask is not None
        and attention_mask.is_floating_point()
        and attention_mask.shape[1] == 1
    )
    is_plain = not options.get("dropout") and options.get("position_bias") is None
    if query.shape[2] != 1 or not is_added or not is_plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, heads, _, width = query.shape
    scaling = options.get("scaling")
    if scaling is None:
        scaling = width**-0.5
    grouped_queries = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    if query.is_cpu and query.dtype == torch.float32:
        # Faster than the CPU's flash kernel for a single query, by 2 over contiguous keys and values.
        # (B, H_kv, H/H_kv, S)
        scores = torch.matmul(grouped_queries * scaling, key.transpose(2, 3)).add_(attention_mask)
        output = torch.matmul(scores.softmax(-1), value)
    else:
        output = scaled_dot_product_attention(
            grouped_queries, key, value, attn_mask=attention_mask, scale=scaling
        )
    return output.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(SLOT_SDPA, slot_attention)
AttentionMaskInterface.register(SLOT_SDPA, sdpa_mask)


@dataclass
class Span:
    """The part of the buffers in use: rows ``0 … rows-1``, columns ``first … end-1``."""

    rows: int
    first: int
    end: int
    # Whether attention gets the full width of the buffers, with unused columns masked, or only the used columns.
    whole: bool = False
    # (1,) end, where steps read their numbers on the device, and attention gets ``width``
    column: Tensor | None = None
    width: int = 0
    captured: bool = False  # numbers here stay as they were when a step was captured


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, (slots, heads, columns, head width); all layers share one span.

    Unused columns of used rows must be finite: a masked column has weight 0, and 0 times NaN is NaN.
    """

    is_croppable = False
    keeps_tokens = True  # what it has of a row's first tokens does not depend on later ones

    def __init__(self, span: Span, sliding_window: int | None = None) -> None:
        super().__init__()
        self.span = span
        self.is_sliding = sliding_window is not None
        self.sliding_window = sliding_window
        self.buffers: list[Tensor] = []  # keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one new column; return what attention looks at, as views (rows, heads, width, head width)."""
        span = self.span
        rows = key_states.shape[0]
        visible = slice(None)
        if span.column is not None:  # what a step is captured with must not say how far it is
            visible = slice(span.width)
        elif not span.whole:
            visible = slice(self.first(span.end + 1), span.end + 1)
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            if span.column is None:
                buffer[:rows, :, span.end : span.end + 1] = states
            else:
                buffer[:rows].index_copy_(2, span.column, states)
        self.keys, self.values = (buffer[:rows, :, visible] for buffer in self.buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of columns in use."""
        if self.span.captured:
            raise RuntimeError("the model's code asks for the length of its cache")
        return self.span.end - self.span.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the width of :meth:`update`'s result if not ``whole``, and its distance from the first used column."""
        end = self.span.end + query_length
        return end - self.first(end), self.first(end) - self.span.first

    def first(self, end: int) -> int:
        """Return the first column that column ``end - 1`` looks at."""
        if self.sliding_window is None:
            return self.span.first
        return max(self.span.first, end - self.sliding_window)

    def append(self, source: Any, rows: list[int], width: int, slots: int, columns: int) -> None:
        """Add the states of some prompts, see ``SlotCache.append``; ``source`` is this layer of the prompts' cache."""
        states = source.keys, source.values
        if not self.buffers:
            self.buffers = [
                layer_states.new_empty(slots, layer_states.shape[1], columns, layer_states.shape[3])
                for layer_states in states
            ]
            self.dtype = source.keys.dtype
            self.device = source.keys.device
            self.is_initialized = True
        end = self.span.end
        width = min(width, source.keys.shape[2])  # a sliding layer keeps its window only
        index = torch.tensor(rows, device=self.device)
        for buffer, layer_states in zip(self.buffers, states):
            target = buffer[self.span.rows : self.span.rows + len(rows)].zero_()
            last_columns = layer_states[:, :, layer_states.shape[2] - width :]
            target[:, :, end - width : end] = last_columns.index_select(0, index)

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copy some rows over others; rows in both lists as they were before."""
        columns = slice(self.first(self.span.end), self.span.end)
        for buffer in self.buffers:
            used = buffer[:, :, columns]
            if not buffer.is_cpu:
                index = torch.tensor([sources, targets], device=self.device)
                used[index[1]] = used[index[0]]
                continue
            # By index it takes several times as long here. A row that is overwritten before it is read is copied.
            moved = [used[row] for row in sources]
            for number, row in enumerate(sources):
                if row in targets[:number]:
                    moved[number] = moved[number].clone()
            for row, states in zip(targets, moved):
                used[row] = states

    def make_room(self, slots: int, columns: int, first: int, end: int, in_place: bool) -> None:
        """Make buffers of this size, in which the columns in use are ``first … end-1``; or reuse the old ones."""
        span = self.span
        self.keys = self.values = None  # views of the last update, which hold the old buffers
        for i, old_buffer in enumerate(self.buffers):
            _, heads, _, head_width = old_buffer.shape
            new_buffer = old_buffer.new_empty(slots, heads, columns, head_width)
            used = new_buffer[: span.rows]
            used[:, :, :first] = 0
            used[:, :, first:end] = old_buffer[: span.rows, :, span.first : span.end]
            used[:, :, end:] = 0
            self.buffers[i] = old_buffer.copy_(new_buffer) if in_place else new_buffer

    def see_rows(self) -> None:
        """Do nothing: called when the number of rows has changed, or the buffers."""


# the class of an empty layer in transformers, which older ones do not have
EMPTY_LAYER = "DummyLayer"


class NoSlots(getattr(cache_utils, EMPTY_LAYER, object)):
    """In place of a layer of transformers' cache that is empty: of experts, or of attention to another layer's keys."""

    is_sliding = False
    sliding_window = None
    keeps_tokens = True

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Tensor] = []

    def append(self, *_: Any) -> None:
        """Do nothing: there are no states."""

    move_rows = make_room = see_rows = append
