"""Keys and values of many responses in one buffer per layer: written in place, rows come and go, nothing is copied
per step.

All rows share one time axis of columns. A row's tokens are consecutive and its newest one is in the last column, so
rows begin at different columns; what lies before is masked by the caller. To the model it is a left-padded batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Columns that moving everything to the left must win; fewer, and the buffers grow instead.
SHIFT_AT_LEAST = 64


class Span:
    """Which part of the buffers is in use: rows ``0 … rows-1``, columns ``first … end-1``."""

    def __init__(self) -> None:
        self.rows = 0
        self.first = 0
        self.end = 0


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, (slots, heads, columns, head width).

    Args:
        span: what is in use, the same object in all layers.
        sliding_window: tokens that a token sees, itself included; None is all.
    """

    is_croppable = False

    def __init__(self, span: Span, sliding_window: int | None = None) -> None:
        super().__init__()
        self.span = span
        self.is_sliding = sliding_window is not None
        self.sliding_window = sliding_window
        self.buffers: list[Tensor] = []  # keys, values

    def allocate(self, like: DynamicLayer, slots: int, columns: int) -> None:
        """Makes the buffers, with heads, widths, dtype and device of another layer's states.

        Zeros: a masked column has weight 0, and 0 times what memory happens to hold may be NaN.
        """
        states = (like.keys, like.values)
        self.buffers = [x.new_zeros(slots, x.shape[1], columns, x.shape[3]) for x in states]
        self.dtype, self.device, self.is_initialized = like.keys.dtype, like.keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes one new column; gives all that the new token may see, as views (rows, heads, width, head width)."""
        rows, first, end = self.span.rows, self.span.first, self.span.end
        if self.sliding_window is not None:
            first = max(first, end + 1 - self.sliding_window)
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            buffer[:rows, :, end : end + 1] = states
        self.keys, self.values = (buffer[:rows, :, first : end + 1] for buffer in self.buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.span.end - self.span.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width of what :meth:`update` gives, and its distance from the first column in use."""
        width = self.get_seq_length() + query_length
        kept = width if self.sliding_window is None else min(width, self.sliding_window)
        return kept, width - kept


class SlotCache(DynamicCache):
    """The layers' buffers with one common :class:`Span`. One column per forward; call :meth:`advance` behind each.

    Args:
        config: of the model; see :func:`can_use_slots`.
        slots: most rows at a time.
        columns: at first.
        max_columns: the buffers grow up to this.
    """

    def __init__(self, config, *, slots: int, columns: int, max_columns: int) -> None:
        self.span = Span()
        layers = [SlotLayer(self.span, getattr(layer, "sliding_window", None)) for layer in plain_layers(config)]
        Cache.__init__(self, layers=layers)
        self.slots = slots
        self.columns = columns
        self.max_columns = max_columns

    @property
    def window(self) -> int | None:
        """The smallest sliding window; None where every token sees all."""
        return min((layer.sliding_window for layer in self.layers if layer.is_sliding), default=None)

    def advance(self) -> None:
        """The column that the forward has written is in use from now on."""
        self.span.end += 1

    def append(self, prompts: Cache, rows: list[int], width: int) -> None:
        """Puts prompts behind the last row, their last token in the last column.

        Args:
            prompts: filled by a forward over left-padded prompts.
            rows: of it; one may come several times.
            width: tokens of the longest of them.
        """
        span, count = self.span, len(rows)
        for layer, source in zip(self.layers, prompts.layers):
            if not layer.is_initialized:
                layer.allocate(source, self.slots, self.columns)
            kept = min(width, source.keys.shape[2])  # a sliding layer keeps its window only
            index = torch.tensor(rows, device=source.keys.device)
            for buffer, states in zip(layer.buffers, (source.keys, source.values)):
                target = buffer[span.rows : span.rows + count, :, span.end - kept : span.end]
                target.copy_(states[:, :, states.shape[2] - kept :].index_select(0, index))
        span.rows += count

    def move_rows(self, sources: list[int], targets: list[int], rows: int) -> None:
        """Copies some rows over others; ``rows`` of them are in use then."""
        if sources:
            for buffer, (first, end) in self._buffers():
                index = torch.tensor([sources, targets], device=buffer.device)
                buffer[index[1], :, first:end] = buffer[index[0], :, first:end]
        self.span.rows = rows

    def make_room(self, at_least: int) -> int:
        """Makes sure that there is a free column: everything moves to the left, or the buffers grow.

        Args:
            at_least: columns that must lie before the first free one, for prompts still to come.

        Returns:
            By how many columns everything has moved to the left.
        """
        span = self.span
        if span.end < self.columns:
            return 0
        shift = span.end - max(span.end - span.first, at_least)
        if shift < min(SHIFT_AT_LEAST, self.max_columns - self.columns) or shift < 1:
            self._grow()
            return 0
        for buffer, (first, end) in self._buffers():
            buffer[: span.rows, :, first - shift : end - shift] = buffer[: span.rows, :, first:end].clone()
        span.first, span.end = span.first - shift, span.end - shift
        return shift

    def _grow(self) -> None:
        wider = min(self.max_columns, max(self.columns + SHIFT_AT_LEAST, self.columns * 3 // 2))
        span = self.span
        for layer in self.layers:
            for i, buffer in enumerate(layer.buffers):  # one after the other: little memory is held twice
                layer.buffers[i] = buffer.new_zeros(*buffer.shape[:2], wider, buffer.shape[3])
                layer.buffers[i][: span.rows, :, span.first : span.end] = buffer[: span.rows, :, span.first : span.end]
        self.columns = wider

    def _buffers(self) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """Every buffer with the columns of it that are still looked at."""
        for layer in self.layers:
            window = layer.sliding_window
            first = self.span.first if window is None else max(self.span.first, self.span.end - window)
            for buffer in layer.buffers:
                yield buffer, (first, self.span.end)


def plain_layers(config) -> list:
    """The layers that a ``DynamicCache`` has for this model."""
    return DynamicCache(config=config).layers


def can_use_slots(config) -> bool:
    """Whether a :class:`SlotCache` can stand in for the model's own: all layers attend to everything or to a sliding
    window. Recurrent states, chunked attention and indexed layers cannot."""
    text_config = config.get_text_config(decoder=True)
    chunked = getattr(text_config, "attention_chunk_size", None) is not None
    chunked |= "chunked_attention" in (getattr(text_config, "layer_types", None) or [])
    layers = plain_layers(config)
    return (
        bool(layers) and not chunked and {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    )
