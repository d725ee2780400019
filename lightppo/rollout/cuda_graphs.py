"""Decoding steps that are the same work on the same memory, so that a CUDA graph can replay them.

A step launches about 41 kernels per layer, a graph all of them at once.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightppo.errors import ConfigError
from lightppo.models.attention.slot_layers import attention_to_slots
from lightppo.rollout.decoding import Decoder, PromptQueue, SlotDecoder

logger = logging.getLogger(__name__)

LOOK_EVERY = 4  # steps: the host waits for the device as often, to see which rows have ended
LEAST_WIDTH = 128  # columns that attention gets


class CUDAGraphs:
    """Runs decoding steps; those with an equal key do the same work on the same memory.

    The first one of a key runs as it is. All graphs share one pool of memory, as one runs at a time; they go when the
    ``with`` ends, as weights and caches may be elsewhere then. A subclass may capture in another way.
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
        before = torch.cuda.get_sync_debug_mode()
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with warnings.catch_warnings():  # torch calls it a prototype
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self._stream):
                step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
            here.wait_stream(self._stream)

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

    def decoder(self, kind: type[Decoder]) -> Callable[..., Decoder]:
        """Return the decoder that has this run its steps, in place of ``kind``."""
        if kind is SlotDecoder:
            return partial(StaticDecoder, runner=self)
        self.note("the model's cache has more than keys and values of all tokens")
        return kind

    def note(self, reason: str) -> None:
        """Say once why steps run as they are."""
        if not self._noted:
            self._noted = True
            logger.warning("--hf_cuda_graphs: decoding steps are not captured: %s", reason)


def check_device(building: Any) -> None:
    """Refuse ``--hf_cuda_graphs`` without a GPU."""
    if building.config.flat().get("hf_cuda_graphs") and building.strategy.device.type != "cuda":
        raise ConfigError("--hf_cuda_graphs: there is no CUDA device: leave it out")


def rounded(count: int, parts: int) -> int:
    """Round up to a multiple of 1/``parts`` of a power of two, so that few sizes are captured."""
    unit = max(1, (1 << (count - 1).bit_length()) // (2 * parts))
    return -(-count // unit) * unit


@dataclass
class StaticDecoder(SlotDecoder):
    """A :class:`SlotDecoder` that looks every few steps which rows have ended, and has a runner run the steps.

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
            rows = min(rounded(len(self.rows), 1), self.slots)
            span.width = min(rounded(max(span.end + 1, LEAST_WIDTH), 4), self.cache.columns)
            with attention_to_slots(self.text_config):
                self.runner((rows, span.width), partial(self._advance, rows))
            span.end += 1
            self.forward.calls += 1
            self.forward.positions += rows

    def _advance(self, count: int) -> None:
        """Decode one more token for the first rows; read and write only tensors, what it goes on from at the end."""
        rows = self.rows
        span = self.cache.span
        active = slice(0, count)
        span.captured = not self.runner.failed
        ages = rows.ages[active]
        tokens = rows.tokens[active]
        log_probs = rows.log_probs[active]
        newest = tokens.gather(1, (ages - 1).clamp(min=0).unsqueeze(1))  # (b, 1)
        runs = (ages < rows.limits[active]) & ~self.stop.is_stop[newest.squeeze(1)]
        self._mask.index_fill_(1, span.column, 0)
        mask = self._mask[active, None, None, : span.width]
        positions = rows.positions[active].unsqueeze(1)
        logits = self.forward.logits(newest, mask, positions, self.cache)
        at = ages.clamp(max=self.max_new_tokens - 1).unsqueeze(1)  # (b, 1)
        if self.sampler.needs_history:
            history = rows.history(active, rows.ids.shape[1] - 1)
        else:
            history = None
        drawn = self.sampler(logits, rows.seeds[active].gather(1, at).squeeze(1), ages, history)
        for target, new in zip((tokens, log_probs), drawn):
            target.scatter_(
                1, at, torch.where(runs, new, target.gather(1, at).squeeze(1)).unsqueeze(1)
            )
        rows.ages[active] += runs
        rows.positions[active] += runs
        span.column += 1
