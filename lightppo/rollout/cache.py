"""Keys and values of many responses in one buffer per layer: written in place, rows come and go, nothing is copied
per step.

All rows share one time axis of columns. A row's tokens are consecutive and its newest one is in the last column, so
rows begin at different columns; what lies before is masked by the caller. To the model it is a left-padded batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Columns added at a time on CPU, where attention over a whole buffer is faster than over a part of it.
CPU_COLUMNS = 16
# Elsewhere: at least so many, and by half of what is in use.
OTHER_COLUMNS = 128


class Span:
    """Which part of the buffers is in use: rows ``0 … rows-1``, columns ``first … end-1``.

    Attributes:
        whole: attention gets the whole width of the buffers and masks what is not in use; else only what is in use.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.first = 0
        self.end = 0
        self.whole = False


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, (slots, heads, columns, head width).

    What is not in use is finite in every row that is: a masked column has weight 0, and 0 times NaN is NaN.

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

    def append(self, source: DynamicLayer, rows: list[int], width: int, shape: tuple[int, int]) -> None:
        """New rows from a layer of a prompts' cache; see :meth:`SlotCache.append`. ``shape``: slots, columns."""
        span, states = self.span, (source.keys, source.values)
        if not self.buffers:
            self.buffers = [x.new_empty(shape[0], x.shape[1], shape[1], x.shape[3]) for x in states]
            self.dtype, self.device, self.is_initialized = source.keys.dtype, source.keys.device, True
        kept = min(width, source.keys.shape[2])  # a sliding layer keeps its window only
        index = torch.tensor(rows, device=self.device)
        for buffer, x in zip(self.buffers, states):
            target = buffer[span.rows : span.rows + len(rows)]
            target[:, :, : span.end - kept] = 0
            target[:, :, span.end - kept : span.end] = x[:, :, x.shape[2] - kept :].index_select(0, index)
            target[:, :, span.end :] = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes one new column; gives what attention looks at, as views (rows, heads, width, head width)."""
        span = self.span
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            buffer[: span.rows, :, span.end : span.end + 1] = states
        looked_at = slice(None) if span.whole else slice(self._first(span.end + 1), span.end + 1)
        self.keys, self.values = (buffer[: span.rows, :, looked_at] for buffer in self.buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.span.end - self.span.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width of what :meth:`update` gives where not ``whole``, and its distance from the first column in use."""
        end = self.span.end + query_length
        return end - self._first(end), self._first(end) - self.span.first

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copies some rows over others."""
        index = torch.tensor([sources, targets], device=self.device)
        columns = slice(self._first(self.span.end), self.span.end)
        for buffer in self.buffers:
            buffer[index[1], :, columns] = buffer[index[0], :, columns]

    def lay_out(self, slots: int, columns: int, end: int) -> None:
        """Moves what is in use into new buffers, so that it ends before column ``end``."""
        span = self.span
        first = end - (span.end - span.first)
        for i, old in enumerate(self.buffers):  # one after the other: little memory is held twice
            new = old.new_empty(slots, old.shape[1], columns, old.shape[3])
            new[: span.rows, :, :first] = 0
            new[: span.rows, :, first:end] = old[: span.rows, :, span.first : span.end]
            new[: span.rows, :, end:] = 0
            self.buffers[i] = new

    def _first(self, end: int) -> int:
        """First column that is looked at from column ``end - 1``."""
        return self.span.first if self.sliding_window is None else max(self.span.first, end - self.sliding_window)


class SlotCache(DynamicCache):
    """The layers' buffers with one common :class:`Span`. One column per forward; call :meth:`advance` behind each.

    Args:
        config: of the model; see :func:`can_use_slots`.
        slots: most rows at a time.
        prompt_columns: of the longest prompt; the first rows end there.
        max_columns: most that one row can have.
        tight: add few columns at a time.
    """

    def __init__(self, config, *, slots: int, prompt_columns: int, max_columns: int, tight: bool) -> None:
        self.span = Span()
        self.span.first = self.span.end = prompt_columns
        layers = [SlotLayer(self.span, getattr(layer, "sliding_window", None)) for layer in plain_layers(config)]
        Cache.__init__(self, layers=layers)
        self.slots = slots
        self.max_columns = max_columns
        self.tight = tight
        self.columns = prompt_columns + self._more(prompt_columns)

    @property
    def window(self) -> int | None:
        """The smallest sliding window; None where every token sees all."""
        return min((layer.sliding_window for layer in self.layers if layer.is_sliding), default=None)

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.layers[0].dtype

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
        for layer, source in zip(self.layers, prompts.layers):
            layer.append(source, rows, width, (self.slots, self.columns))
        self.span.rows += len(rows)

    def move_rows(self, sources: list[int], targets: list[int], rows: int) -> None:
        """Copies some rows over others; ``rows`` of them are in use then."""
        if sources:
            for layer in self.layers:
                layer.move_rows(sources, targets)
        self.span.rows = rows

    def make_room(self, slots: int, at_least: int) -> int:
        """Makes sure that there is a free column. Where there is none, all moves into new buffers.

        Args:
            slots: rows of new buffers.
            at_least: columns that must lie before the first free one then, for prompts still to come.

        Returns:
            By how many columns everything has moved to the left (negative: to the right).
        """
        span = self.span
        if span.end < self.columns:
            return 0
        end = max(span.end - span.first, at_least)
        self.slots, self.columns = slots, end + self._more(end)
        for layer in self.layers:
            layer.lay_out(slots, self.columns, end)
        shift = span.end - end
        span.first, span.end = span.first - shift, end
        return shift

    def _more(self, columns: int) -> int:
        if self.tight:
            return CPU_COLUMNS
        # Rows end at different columns: without room beyond the longest row's, all would move at every step.
        return max(OTHER_COLUMNS, min(columns // 2, self.max_columns - columns))


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
