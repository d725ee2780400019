"""``--batch_invariant`` in decoding: each row's keys go in the blocks of training, see ``models/kernels/invariant.py``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightppo.errors import ConfigError
from lightppo.models.attention.slot_layers import SlotLayer
from lightppo.models.kernels.invariant import HIDDEN, KEYS
from lightppo.rollout.decoding import Decoder, PromptQueue, SlotCache, SlotDecoder

ALIGNED_SDPA = "aligned_sdpa"  # the name of aligned_attention in transformers


def aligned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """One new token of each row: (B, H, 1, D), (B, H_kv, S, D) twice -> (B, 1, H, D). Heads with the same keys are
    queries of one head."""
    rows, heads, _, width = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    output = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return output.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(ALIGNED_SDPA, aligned_attention)
AttentionMaskInterface.register(ALIGNED_SDPA, sdpa_mask)


class AlignedLayer(SlotLayer):
    """Keys and values of one layer, each row from column 0 on; ``span.column`` (B,) is where each gets its next."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(key_states))
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            buffer[rows, :, self.span.column] = states[:, :, 0]
        self.keys, self.values = (
            buffer[: len(rows), :, : self.span.width] for buffer in self.buffers
        )
        return self.keys, self.values


class AlignedCache(SlotCache):
    """Rows that all begin at column 0, in whole blocks of keys; ``positions`` (slots,) are of their newest tokens."""

    def __init__(self, like: SlotCache, positions: Tensor, dtype: torch.dtype) -> None:
        Cache.__init__(self, layers=[AlignedLayer(like.span) for _ in like.layers])
        self.span = like.span
        self.slots = like.slots
        self.max_columns = like.max_columns
        self.tight = like.tight
        self.fixed = False
        self.window = None
        self.positions = positions
        self.unit = KEYS[dtype]
        self.span.first = self.columns = 0

    def append(self, prompts: Cache, rows: list[int], width: int) -> None:
        """Adds ``rows`` of a cache of left-padded prompts, whose positions are set."""
        span = self.span
        ends = self.positions[span.rows : span.rows + len(rows)].tolist()
        for layer, source in zip(self.layers, prompts.layers):
            states = source.keys, source.values
            if not layer.buffers:
                layer.buffers = [x.new_zeros(self.slots, x.shape[1], 0, x.shape[3]) for x in states]
                layer.dtype = source.keys.dtype
                layer.device = source.keys.device
                layer.is_initialized = True
        self.reach(max(ends) + 1)
        for layer, source in zip(self.layers, prompts.layers):
            for buffer, x in zip(layer.buffers, (source.keys, source.values)):
                for row, (number, end) in enumerate(zip(rows, ends), start=span.rows):
                    buffer[row, :, : end + 1] = x[number, :, x.shape[2] - end - 1 :]
        span.rows += len(rows)

    def reach(self, end: int) -> None:
        """Makes room for columns below ``end``."""
        self.span.width = end + -end % self.unit
        if self.span.width <= self.columns:
            return
        self.columns = self.span.width + max(self.unit, 64)
        for layer in self.layers:
            layer.buffers = [
                pad(buffer, (0, 0, 0, self.columns - buffer.shape[2])) for buffer in layer.buffers
            ]


class InvariantDecoder(SlotDecoder):
    """Rows begin at column 0, so that the blocks of their keys are those of training."""

    attention = ALIGNED_SDPA

    def _start(self, queue: PromptQueue) -> None:
        super()._start(queue)
        if not self.prepares_masks:
            raise ConfigError("--batch_invariant: leave it out: the model has its own attention")
        dtype = next(self.forward.model.parameters()).dtype
        self.cache = AlignedCache(self.cache, self.rows.positions, dtype)

    def _make_room(self) -> None:
        cache = self.cache
        positions = self.rows.positions[: len(self.rows)]
        cache.span.end = int(positions.max())
        cache.span.column = positions
        cache.reach(cache.span.end + 1)

    def _move_columns(self, slots: int, at_least: int) -> None:
        self.cache.span.end = max(self.cache.span.end, at_least)

    def _step_mask(self) -> Tensor:
        span = self.cache.span
        is_hidden = torch.arange(span.width) > span.column[:, None]  # (b, width)
        added = torch.zeros(is_hidden.shape, dtype=self.cache.layers[0].dtype)
        return added.masked_fill_(is_hidden, HIDDEN)[:, None, None]

    def _see_starts(self) -> None:
        self.rows.starts = [0] * len(self.rows)


class InvariantSteps(nullcontext):
    """A :class:`lightppo.rollout.decoding.DecodingRunner`."""

    def decoder(self, kind: type[Decoder]) -> Callable[..., Decoder]:
        if kind is not SlotDecoder:
            raise ConfigError(
                "--batch_invariant: leave it out: the model keeps more than keys and values of its tokens"
            )
        return InvariantDecoder
