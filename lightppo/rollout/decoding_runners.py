"""Other ways to run decoding steps: as CUDA graphs (``--hf_cuda_graphs``), or batch-invariant (``--batch_invariant``)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightppo.errors import ConfigError
from lightppo.models.attention.slot_layers import SlotLayer, attention_to_slots
from lightppo.models.kernels.invariant import HIDDEN, KEYS
from lightppo.rollout.decoding import Decoder, PromptQueue, SlotCache, SlotDecoder

logger = logging.getLogger(__name__)

LOOK_EVERY = 4  # steps: the host waits for the device as often, to see which rows have ended
LEAST_WIDTH = 128  # columns that attention gets


class DecodingRunner(AbstractContextManager, Protocol):
    """Have decoding steps run in another way; entered around the steps of one ``generate``."""

    def decoder(self, decoder_class: type[Decoder]) -> Callable[..., Decoder]:
        """Return what makes the decoder, with the arguments of ``decoder_class``, which itself changes nothing."""


# -- CUDA graphs: steps that are the same work on the same memory -----------------------------------------------------


class CUDAGraphs:
    """Run decoding steps; those with an equal key do the same work on the same memory, so that a CUDA graph replays them.

    A step launches about 41 kernels per layer, a graph all of them at once. The first step of a key runs as it is. All
    graphs share one pool of memory, as one runs at a time; they go when the ``with`` ends, as weights and caches may be
    elsewhere then. A subclass may capture in another way.
    """

    def __init__(self) -> None:
        self.failed = False  # steps run as they are
        self._noted = False
        self._captured: dict[Hashable, Callable[[], None] | None] = {}  # None: a step has run
        self._stream = self._pool = None

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self._captured.clear()
        self._pool = None

    def __call__(self, key: Hashable, step: Callable[[], None]) -> None:
        if not self.failed and key in self._captured:
            self._captured[key] = self._captured[key] or self.capture(step)
            return self._captured[key]()
        if not self.failed:
            self._captured[key] = None
            try:
                return self.warm_up(step)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.failed = True
                self.note(str(error))
        step()  # anew: what it goes on from is written at its end

    def warm_up(self, step: Callable[[], None]) -> None:
        """Run a step on the capturing stream, so that its kernels and workspaces are there; fail if the host would wait."""
        self._stream = self._stream or torch.cuda.Stream()
        sync_mode = torch.cuda.get_sync_debug_mode()
        current_stream = torch.cuda.current_stream()
        self._stream.wait_stream(current_stream)
        with warnings.catch_warnings():  # torch calls it a prototype
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self._stream):
                step()
        finally:
            torch.cuda.set_sync_debug_mode(sync_mode)
            current_stream.wait_stream(self._stream)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return what does such a step's work, without doing it yet. Other threads may use the GPU meanwhile."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's memory is in no known state then
            raise RuntimeError(
                f"--hf_cuda_graphs: leave it out: a decoding step cannot be captured: {error}"
            ) from error
        self._pool = graph.pool()
        return graph.replay

    def decoder(self, decoder_class: type[Decoder]) -> Callable[..., Decoder]:
        """Return the decoder that has this run its steps, in place of ``decoder_class``."""
        if decoder_class is SlotDecoder:
            return partial(StaticDecoder, runner=self)
        self.note("the model's cache has more than keys and values of all tokens")
        return decoder_class

    def note(self, reason: str) -> None:
        """Say once why steps run as they are."""
        if not self._noted:
            self._noted = True
            logger.warning("--hf_cuda_graphs: decoding steps are not captured: %s", reason)


def check_device(building: Any) -> None:
    """Refuse ``--hf_cuda_graphs`` without a GPU."""
    if building.strategy.device.type != "cuda":
        raise ConfigError("--hf_cuda_graphs: there is no CUDA device: leave it out")


def rounded(number: int, parts: int) -> int:
    """Round up to a multiple of 1/``parts`` of a power of two, so that few sizes are captured."""
    unit = max(1, (1 << (number - 1).bit_length()) // (2 * parts))
    return -(-number // unit) * unit


@dataclass
class StaticDecoder(SlotDecoder):
    """Decode as :class:`SlotDecoder`, but look every few steps which rows have ended, and have a runner run the steps.

    Rows that have ended keep what they have; so do slots that nobody has, below the next power of two.
    """

    runner: CUDAGraphs

    def _start(self, queue: PromptQueue) -> None:
        super()._start(queue)
        cache = self.cache
        self._is_static = (
            self.prepares_masks
            and cache.keeps_tokens
            and (cache.window is None or cache.window >= cache.max_columns)
        )
        if not self._is_static:
            self.runner.note(
                "the model attends in its own way, or in a window that is shorter than its rows, or has recurrent states"
            )
            return
        cache.fix(self.device)
        self.rows.ids.zero_()  # a slot that nobody has still holds tokens,
        self.rows.ages.fill_(self.max_new_tokens)  # and is as long as can be
        self._mask: Tensor | None = None

    def _see_starts(self) -> None:
        super()._see_starts()
        if self._is_static:
            if self._mask is None:
                self._mask = self._added.new_zeros(self.slots, self.cache.columns)
            self._mask[: len(self.rows)] = self._added
            self.cache.span.column.fill_(self.cache.span.end)

    def _step(self) -> None:
        if not self._is_static:
            return super()._step()
        span = self.cache.span
        for _ in range(1 if self.stop.strings else LOOK_EVERY):
            self._make_room()
            row_count = min(rounded(len(self.rows), 1), self.slots)
            span.width = min(rounded(max(span.end + 1, LEAST_WIDTH), 4), self.cache.columns)
            with attention_to_slots(self.text_config):
                self.runner((row_count, span.width), partial(self._advance, row_count))
            span.end += 1
            self.forward.calls += 1
            self.forward.positions += row_count

    def _advance(self, count: int) -> None:
        """Decode one more token for the first rows; read and write only tensors, what it goes on from at the end."""
        rows = self.rows
        span = self.cache.span
        active_rows = slice(0, count)
        span.captured = not self.runner.failed
        ages = rows.ages[active_rows]
        tokens = rows.tokens[active_rows]
        log_probs = rows.log_probs[active_rows]
        newest_tokens = tokens.gather(1, (ages - 1).clamp(min=0).unsqueeze(1))  # (b, 1)
        is_running = (ages < rows.limits[active_rows]) & ~self.stop.is_stop[
            newest_tokens.squeeze(1)
        ]
        self._mask.index_fill_(1, span.column, 0)
        mask = self._mask[active_rows, None, None, : span.width]
        positions = rows.positions[active_rows].unsqueeze(1)
        logits = self.forward(newest_tokens, mask, positions, self.cache, is_counted=False)
        columns = ages.clamp(max=self.max_new_tokens - 1).unsqueeze(1)  # (b, 1)
        if self.sampler.needs_history:
            history = rows.history(active_rows, rows.ids.shape[1] - 1)
        else:
            history = None
        new_values = self.sampler(
            logits, rows.seeds[active_rows].gather(1, columns).squeeze(1), ages, history
        )
        for target, new_value in zip((tokens, log_probs), new_values):
            target.scatter_(
                1,
                columns,
                torch.where(is_running, new_value, target.gather(1, columns).squeeze(1)).unsqueeze(
                    1
                ),
            )
        rows.ages[active_rows] += is_running
        rows.positions[active_rows] += is_running
        span.column += 1


# -- batch-invariant decoding: each row's keys go in the blocks of training, see models/kernels/invariant.py ----------

ALIGNED_SDPA = "aligned_sdpa"  # the name of aligned_attention in transformers


def aligned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend from one new token of each row: (B, H, 1, D), (B, H_kv, S, D) twice -> (B, 1, H, D).

    Heads with the same keys are queries of one head.
    """
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
        self, key_states: Tensor, value_states: Tensor, *further_arguments: Any, **options: Any
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

    def __init__(self, slot_cache: SlotCache, positions: Tensor, dtype: torch.dtype) -> None:
        Cache.__init__(self, layers=[AlignedLayer(slot_cache.span) for _ in slot_cache.layers])
        self.span = slot_cache.span
        self.slots = slot_cache.slots
        self.max_columns = slot_cache.max_columns
        self.tight = slot_cache.tight
        self.fixed = False
        self.window = None
        self.positions = positions
        self.unit = KEYS[dtype]
        self.span.first = self.columns = 0

    def append(self, prompts: Cache, rows: list[int], width: int) -> None:
        """Add ``rows`` of a cache of left-padded prompts, whose positions are set."""
        span = self.span
        last_columns = self.positions[span.rows : span.rows + len(rows)].tolist()
        for layer, source in zip(self.layers, prompts.layers):
            prompt_states = source.keys, source.values
            if not layer.buffers:
                layer.buffers = [
                    tensor.new_zeros(self.slots, tensor.shape[1], 0, tensor.shape[3])
                    for tensor in prompt_states
                ]
                layer.dtype = source.keys.dtype
                layer.device = source.keys.device
                layer.is_initialized = True
        self.reach(max(last_columns) + 1)
        for layer, source in zip(self.layers, prompts.layers):
            for buffer, tensor in zip(layer.buffers, (source.keys, source.values)):
                for row, (prompt_row, last_column) in enumerate(
                    zip(rows, last_columns), start=span.rows
                ):
                    buffer[row, :, : last_column + 1] = tensor[
                        prompt_row, :, tensor.shape[2] - last_column - 1 :
                    ]
        span.rows += len(rows)

    def reach(self, end: int) -> None:
        """Make room for columns below ``end``."""
        self.span.width = end + -end % self.unit
        if self.span.width <= self.columns:
            return
        self.columns = self.span.width + max(self.unit, 64)
        for layer in self.layers:
            layer.buffers = [
                pad(buffer, (0, 0, 0, self.columns - buffer.shape[2])) for buffer in layer.buffers
            ]


class InvariantDecoder(SlotDecoder):
    """Decode rows that begin at column 0, so that the blocks of their keys are those of training."""

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
        additive_mask = torch.zeros(is_hidden.shape, dtype=self.cache.layers[0].dtype)
        return additive_mask.masked_fill_(is_hidden, HIDDEN)[:, None, None]

    def _see_starts(self) -> None:
        self.rows.starts = [0] * len(self.rows)


class InvariantSteps(nullcontext):
    """Have an :class:`InvariantDecoder` decode."""

    def decoder(self, decoder_class: type[Decoder]) -> Callable[..., Decoder]:
        if decoder_class is not SlotDecoder:
            raise ConfigError(
                "--batch_invariant: leave it out: the model keeps more than keys and values of its tokens"
            )
        return InvariantDecoder
