"""Continuous batching with the trainer's own model: a cache written in place, one pass per prompt.

:class:`SlotDecoder` follows Orca's iteration-level scheduling (Yu et al. 2022, OSDI '22): a finished response leaves at
once, and a waiting request takes its slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, Cache, DynamicCache, PretrainedConfig, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightppo.models.attention.row_attention import PACKED_SDPA
from lightppo.plugins.decoding import SLOT_LAYERS
from lightppo.ranks import heartbeat
from lightppo.rollout.decoding import (
    CachedForward,
    Decoded,
    DecodedBatch,
    Decoder,
    RequestQueue,
    Seeds,
    left_pad,
)
from lightppo.rollout.sampling import NO_TOKEN

# added to a cache at a time on the CPU, where attention is faster over a whole buffer than a part
CPU_COLUMNS = 16
OTHER_COLUMNS = 128  # elsewhere: at least so many, and half of the columns in use
# columns beyond the longest row in a fixed cache, whose number is a multiple of it
FIXED_SPARE = 64
CALL_COST = {"cpu": 64, "other": 2048}  # fixed cost of a forward, in positions
# of the slots free: prompts go through the model together, which costs less than one by one
REFILL_SHARE = 1 / 8
Group = tuple[list[int], list[int]]  # a prompt, and the numbers of its requests


# -- attention of one new token ---------------------------------------------------------------------------------------

SLOT_SDPA = "slot_sdpa"


def can_attend_to_slots(model: nn.Module, config: PretrainedConfig) -> bool:
    """Whether :func:`slot_attention` can replace the model's attention: scaled dot products and nothing else."""
    return (
        config._attn_implementation in ("sdpa", PACKED_SDPA)
        and getattr(model, "_supports_attention_backend", False)
        and not getattr(config, "alibi", False)
    )


@contextmanager
def attention_to_slots(config: PretrainedConfig, name: str = SLOT_SDPA) -> Iterator[None]:
    """Inside, the model attends by :func:`slot_attention`, or what has the name; ``config`` is of its text layers."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' ``sdpa``, but for one new token with a mask (B, 1, 1, S) that is added to the scores.

    ``query`` (B, H, L, D), ``key`` and ``value`` (B, H_kv, S, D) -> (B, L, H, D), and no weights.
    """
    # Doge's mask has a row for each head
    added = (
        attention_mask is not None
        and attention_mask.is_floating_point()
        and attention_mask.shape[1] == 1
    )
    if (
        query.shape[2] != 1
        or not added
        or options.get("dropout")
        or options.get("position_bias") is not None
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, heads, _, width = query.shape
    scaling = options.get("scaling")
    scaling = width**-0.5 if scaling is None else scaling
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    if query.is_cpu and query.dtype == torch.float32:
        # Faster than the CPU's flash kernel for a single query, by 2 over contiguous keys and values.
        # (B, H_kv, H/H_kv, S)
        scores = torch.matmul(grouped * scaling, key.transpose(2, 3)).add_(attention_mask)
        output = torch.matmul(scores.softmax(-1), value)
    else:
        output = scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        )
    return output.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(SLOT_SDPA, slot_attention)
AttentionMaskInterface.register(SLOT_SDPA, sdpa_mask)


# -- the cache --------------------------------------------------------------------------------------------------------


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
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args,
        **kwargs,
    ) -> tuple[Tensor, Tensor]:
        """Writes one new column; returns what attention looks at, as views (rows, heads, width, head width)."""
        span = self.span
        rows = key_states.shape[0]
        if span.column is None:
            looked_at = slice(None) if span.whole else slice(self.first(span.end + 1), span.end + 1)
        else:  # what a step is captured with must not say how far it is
            looked_at = slice(span.width)
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            if span.column is None:
                buffer[:rows, :, span.end : span.end + 1] = states
            else:
                buffer[:rows].index_copy_(2, span.column, states)
        self.keys, self.values = (buffer[:rows, :, looked_at] for buffer in self.buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Columns in use."""
        if self.span.captured:
            raise RuntimeError("the model's code asks for the length of its cache")
        return self.span.end - self.span.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width of the result of :meth:`update` if not ``whole``, and its distance from the first column in use."""
        end = self.span.end + query_length
        return end - self.first(end), self.first(end) - self.span.first

    def first(self, end: int) -> int:
        """The first column that column ``end - 1`` looks at."""
        return (
            self.span.first
            if self.sliding_window is None
            else max(self.span.first, end - self.sliding_window)
        )

    def append(self, source: Any, rows: list[int], width: int, slots: int, columns: int) -> None:
        """See :meth:`SlotCache.append`; ``source`` is the same layer of the prompts' cache."""
        states = source.keys, source.values
        if not self.buffers:
            self.buffers = [x.new_empty(slots, x.shape[1], columns, x.shape[3]) for x in states]
            self.dtype = source.keys.dtype
            self.device = source.keys.device
            self.is_initialized = True
        end = self.span.end
        kept = min(width, source.keys.shape[2])  # a sliding layer keeps its window only
        index = torch.tensor(rows, device=self.device)
        for buffer, x in zip(self.buffers, states):
            target = buffer[self.span.rows : self.span.rows + len(rows)].zero_()
            target[:, :, end - kept : end] = x[:, :, x.shape[2] - kept :].index_select(0, index)

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copies some rows over others; rows in both lists as they were before."""
        index = torch.tensor([sources, targets], device=self.device)
        columns = slice(self.first(self.span.end), self.span.end)
        for buffer in self.buffers:
            part = buffer[:, :, columns]
            if buffer.is_cpu:  # by index it takes several times as long there
                moved = [
                    # A row that is overwritten before it is read is copied.
                    part[row].clone() if row in targets[:number] else part[row]
                    for number, row in enumerate(sources)
                ]
                for row, states in zip(targets, moved):
                    part[row] = states
            else:
                part[index[1]] = part[index[0]]

    def make_room(self, slots: int, columns: int, first: int, end: int, in_place: bool) -> None:
        """New buffers of this size, in which the columns in use are ``first … end-1``; or the old ones."""
        span = self.span
        for i, old in enumerate(self.buffers):
            new = old.new_empty(slots, old.shape[1], columns, old.shape[3])
            new[: span.rows, :, :first] = 0
            new[: span.rows, :, first:end] = old[: span.rows, :, span.first : span.end]
            new[: span.rows, :, end:] = 0
            self.buffers[i] = old.copy_(new) if in_place else new

    def see_rows(self) -> None:
        """Called when the number of rows has changed, or the buffers."""


class NoSlots(getattr(cache_utils, "DummyLayer", object)):
    """In place of a layer of transformers' cache that is empty: of experts, or of attention to another layer's keys."""

    is_sliding = False
    sliding_window = None
    keeps_tokens = True

    def __init__(self, layer: Any, span: Span) -> None:
        super().__init__()
        self.buffers: list[Tensor] = []

    def append(self, *_: Any) -> None:
        """There is nothing."""

    move_rows = make_room = see_rows = append


class SlotCache(DynamicCache):
    """The layers' buffers with one common :class:`Span`, whose end moves by one after each forward.

    The first rows end at ``prompt_columns``; a row has at most ``max_columns``. ``tight``: add few columns at a time.
    """

    def __init__(
        self,
        config,
        *,
        slots: int,
        prompt_columns: int,
        max_columns: int,
        tight: bool,
    ) -> None:
        self.span = Span(rows=0, first=prompt_columns, end=prompt_columns)
        layers = [slot_layer(layer, self.span) for layer in DynamicCache(config=config).layers]
        Cache.__init__(self, layers=layers)
        self.slots = slots
        self.max_columns = max_columns
        self.tight = tight
        self.fixed = False
        self.columns = prompt_columns + self._more(prompt_columns)
        # The smallest sliding window; None if every token sees all.
        self.window = min(
            (layer.sliding_window for layer in layers if layer.is_sliding), default=None
        )
        self.keeps_tokens = all(layer.keeps_tokens for layer in layers)

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return next(layer.dtype for layer in self.layers if layer.buffers)

    def fix(self, device: torch.device) -> None:
        """Call it first: all columns are there from the start, and the buffers stay where they are."""
        self.fixed = True
        self.columns = self.span.end + self._more(self.span.end)
        self.span.column = torch.full((1,), self.span.end, device=device)

    def append(self, prompts: Cache, rows: list[int], width: int) -> None:
        """Adds ``rows`` of a cache of left-padded prompts, at most ``width`` tokens, to end in the last column."""
        for layer, source in zip(self.layers, prompts.layers):
            layer.append(source, rows, width, self.slots, self.columns)
        self._set_rows(self.span.rows + len(rows))

    def move_rows(
        self, sources: list[int], targets: list[int], rows: int, *, exchange: bool = False
    ) -> None:
        """Copies some rows over others, or has them change places; afterwards ``rows`` rows are in use."""
        if exchange:
            sources, targets = sources + targets, targets + sources
        for layer in self.layers if sources else ():
            layer.move_rows(sources, targets)
        self._set_rows(rows)

    def _set_rows(self, rows: int) -> None:
        self.span.rows = rows
        for layer in self.layers:
            layer.see_rows()

    def make_room(self, slots: int, at_least: int) -> int:
        """Moves everything into new buffers of ``slots`` rows (unless they are fixed), in which a column is free.

        The first free column is at least number ``at_least``. Returns how many columns everything moved left.
        """
        span = self.span
        end = max(span.end - span.first, at_least)
        first = end - (span.end - span.first)
        shift = span.end - end
        self.slots, self.columns = self.slots if self.fixed else slots, end + self._more(end)
        for layer in self.layers:
            # One layer after the other, so that little memory is held twice.
            layer.make_room(self.slots, self.columns, first, end, self.fixed)
            layer.see_rows()
        span.first = first
        span.end = end
        return shift

    def _more(self, columns: int) -> int:
        if self.fixed:
            return -(-(self.max_columns + FIXED_SPARE) // FIXED_SPARE) * FIXED_SPARE - columns
        # Rows end at different columns: without room beyond the longest row's, all would move at every step.
        return (
            CPU_COLUMNS
            if self.tight
            else max(OTHER_COLUMNS, min(columns // 2, self.max_columns - columns))
        )


def slot_layer(layer: Any, span: Span) -> SlotLayer:
    """In place of a layer of transformers' cache."""
    kind = type(layer).__name__
    if kind in SLOT_LAYERS:
        return SLOT_LAYERS[kind].fn(layer, span)
    return SlotLayer(span, getattr(layer, "sliding_window", None))


def can_use_slots(config) -> bool:
    """Whether a :class:`SlotCache` can replace the model's cache: layers attend fully or in a sliding window, or are in
    ``SLOT_LAYERS``."""
    text_config = config.get_text_config(decoder=True)
    chunked = getattr(text_config, "attention_chunk_size", None) is not None
    chunked |= "chunked_attention" in (getattr(text_config, "layer_types", None) or [])
    layers = DynamicCache(config=config).layers
    attends = any(isinstance(layer, DynamicLayer) for layer in layers)
    return (
        not chunked
        and attends
        and all(
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            or type(layer).__name__ in SLOT_LAYERS
            for layer in layers
        )
    )


# -- continuous batching ----------------------------------------------------------------------------------------------


@dataclass
class Prefilled:
    """Some prompts after their forward."""

    prompts: list[list[int]]
    cache: Cache  # keys and values of the left-padded prompts
    logits: Tensor  # (P, V) behind the last token of each prompt
    # (row of the prompt, number of the request) of each sample that has no slot yet
    waiting: deque[tuple[int, int]]


class PromptQueue(RequestQueue):
    """Requests, those with equal prompts together: such a prompt goes through the model once.

    A subclass may keep rows that have ended.
    """

    # Whether rows that have ended stay in their slots, and :meth:`keep` and :meth:`give_way` are called.
    keeps_rows = False

    def __init__(
        self,
        forward: CachedForward,
        prompts: list[list[int]],
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        self._groups: deque[Group] = deque()
        self._parts: deque[list[Group]] = deque()  # each for one forward
        self._block: Prefilled | None = None
        super().__init__(forward, prompts, max_new_tokens, device)

    def add(self, prompts: list[list[int]]) -> None:
        same: dict[tuple[int, ...], list[int]] = {}
        for number, ids in enumerate(prompts, start=len(self.prompts)):
            same.setdefault(tuple(ids), []).append(number)
        self._groups.extend((list(ids), numbers) for ids, numbers in same.items())
        super().add(prompts)

    # -- for subclasses --------------------------------------------------------------------------------------------

    def most_rows(self, running: int) -> int:
        """Slots that may be needed from now on, while so many rows run."""
        return running + self.waiting

    def is_ready(self, free: int, slots: int) -> bool:
        """Whether waiting requests should get some of the free slots now."""
        if self.at_hand:
            return free > 0
        return self.waiting > 0 and free >= min(max(1, REFILL_SHARE * slots), self.waiting)

    def new_tokens(self, group: Group) -> int:
        """Tokens of a prompt that go through the model."""
        return len(group[0])

    def inputs(self, groups: list[Group]) -> tuple[Tensor, Tensor, Tensor, Cache]:
        """Of a forward of prompts: padded ids (P, L), mask, position ids, and a cache of what is known of them."""
        padded, mask, positions = left_pad([ids for ids, _ in groups], self.device)
        return padded.clamp(min=0), mask, positions, DynamicCache(config=self.forward.config)

    def keep(self, number: int, cache: SlotCache, slot: int, start: int, length: int) -> None:
        """A request has ended, whose keys and values are in a slot, from column ``start`` on, until it gives way."""

    def give_way(self, slots: range) -> None:
        """These slots are about to be written over."""

    # -- for the decoder -------------------------------------------------------------------------------------------

    @property
    def at_hand(self) -> bool:
        """Whether requests wait whose prompts have been through the model, or are already divided into parts."""
        return self._block is not None or bool(self._parts)

    @property
    def longest(self) -> int:
        """Tokens of the longest waiting prompt; 0 if no prompt waits."""
        block = (
            []
            if self._block is None
            else [len(self._block.prompts[row]) for row, _ in self._block.waiting]
        )
        groups = (len(ids) for part in (*self._parts, self._groups) for ids, _ in part)
        return max((*block, *groups), default=0)

    def take(self, count: int) -> tuple[Prefilled, list[int], list[int]]:
        """The next requests, 1 to ``count``: a block of prompts, the requests' rows in it, and their numbers."""
        if not self.at_hand:
            self._divide(count)
        block = self._block or self._through_the_model(self._parts.popleft())
        rows, numbers = map(
            list, zip(*(block.waiting.popleft() for _ in range(min(count, len(block.waiting)))))
        )
        self._block = block if block.waiting else None
        self.waiting -= len(rows)
        return block, rows, numbers

    def _divide(self, count: int) -> None:
        """Divides the prompts of the next ``count`` requests into parts."""
        groups: list[Group] = []
        while self._groups and count > 0:
            groups.append(self._groups.popleft())
            count -= len(groups[-1][1])
        call_cost = CALL_COST["cpu" if self.device.type == "cpu" else "other"]
        parts = cheapest_parts([self.new_tokens(group) for group in groups], call_cost)
        self._parts.extend(groups[first:end] for first, end in parts)

    def _through_the_model(self, groups: list[Group]) -> Prefilled:
        ids, mask, positions, cache = self.inputs(groups)
        logits = self.forward(ids, mask, positions, cache)
        waiting = deque(
            (row, number) for row, (_, numbers) in enumerate(groups) for number in numbers
        )
        return Prefilled([ids for ids, _ in groups], cache, logits, waiting)


def cheapest_parts(lengths: list[int], call_cost: int) -> list[tuple[int, int]]:
    """(first, end) of consecutive parts of the prompts, so that positions (with padding) plus calls cost least."""
    least, cut = [0], [0]  # of the first k prompts: their cost, and where the last part begins
    for end in range(1, len(lengths) + 1):
        best = (float("inf"), 0)
        longest = 0
        for first in range(end - 1, -1, -1):
            longest = max(longest, lengths[first])
            best = min(best, (least[first] + call_cost + longest * (end - first), first))
        least.append(best[0])
        cut.append(best[1])
    parts = []
    end = len(lengths)
    while end:
        parts.append((cut[end], end))
        end = cut[end]
    return parts[::-1]


class Rows:
    """The responses in the slots; row r of every tensor is row r of the cache."""

    def __init__(
        self,
        slots: int,
        max_new_tokens: int,
        device: torch.device,
        prompt_width: int = 0,
    ) -> None:
        self.numbers: list[int] = []  # of the requests
        self.starts: list[int] = []  # first columns
        # Prompts, if they are kept, right-aligned behind a column of NO_TOKEN; then the responses.
        self.ids = torch.full((slots, 1 + prompt_width + max_new_tokens), NO_TOKEN, device=device)
        self.tokens = self.ids[:, 1 + prompt_width :]  # a view: what is written here is seen in ids
        self.log_probs = torch.zeros(slots, max_new_tokens, device=device)
        self.seeds = torch.zeros(slots, max_new_tokens, dtype=torch.long, device=device)
        self.ages = torch.zeros(slots, dtype=torch.long, device=device)  # tokens so far
        # The most tokens of each row. Entries beyond the rows in use mean nothing.
        self.limits = torch.full((slots,), max_new_tokens, device=device)
        # The position of the newest token in prompt + response.
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)

    def __len__(self) -> int:
        return len(self.numbers)

    def append(
        self,
        numbers: list[int],
        starts: list[int],
        positions: Tensor,
        seeds: Tensor,
        prompts: Tensor | None,
        limits: Tensor,
    ) -> slice:
        """Adds rows without tokens; returns where they are. ``prompts`` (k, ·): kept for :meth:`history`."""
        new = slice(len(self), len(self) + len(numbers))
        self.numbers += numbers
        self.starts += starts
        self.seeds[new], self.ages[new], self.positions[new] = seeds, 0, positions
        self.limits[new] = limits
        if prompts is not None:
            width = self.ids.shape[1] - self.tokens.shape[1]
            self.ids[new, :width] = pad(prompts, (width - prompts.shape[1], 0), value=NO_TOKEN)
        return new

    def history(self, rows: slice, width: int) -> Tensor:
        """The last ids of some rows' prompts and responses, left padding ``NO_TOKEN``: (b, width)."""
        ends = self.ages[rows] + (self.ids.shape[1] - self.tokens.shape[1])
        columns = ends.unsqueeze(1) + torch.arange(-width, 0, device=ends.device)
        return self.ids[rows].gather(1, columns.clamp(min=0))

    def write(self, rows: slice, tokens: Tensor, log_probs: Tensor) -> None:
        """Writes the newest token of some rows."""
        ages = self.ages[rows].unsqueeze(1)
        self.tokens[rows].scatter_(1, ages, tokens.unsqueeze(1))
        self.log_probs[rows].scatter_(1, ages, log_probs.unsqueeze(1))
        self.ages[rows] += 1
        self.positions[rows] += 1

    def remove(self, gone: list[int]) -> tuple[list[int], list[int]]:
        """Removes rows; the last rows move into the holes. Returns their old and new places."""
        left = len(self) - len(gone)
        holes = [row for row in gone if row < left]
        movers = sorted(set(range(left, len(self))) - set(gone))
        for mover, hole in zip(movers, holes):
            self.numbers[hole], self.starts[hole] = self.numbers[mover], self.starts[mover]
        del self.numbers[left:], self.starts[left:]
        if holes:
            index = torch.tensor([movers, holes], device=self.ages.device)
            for x in (
                self.ids,
                self.log_probs,
                self.seeds,
                self.ages,
                self.limits,
                self.positions,
            ):
                x[index[1]] = x[index[0]]
        self.ages[left : left + len(gone)] = self.tokens.shape[1]
        return movers, holes


class SlotDecoder(Decoder):
    """Decodes in a fixed number of slots; needs a model with ``can_use_slots``."""

    queue_kind = PromptQueue
    attention: ClassVar[str] = SLOT_SDPA  # what steps attend by

    @torch.no_grad()
    def run(self, queue: PromptQueue, seeds: Seeds) -> Decoded:
        """See :class:`Decoder`."""
        self._start(queue)
        while True:
            heartbeat.beat()
            goes_on = queue.look(idle=not len(self.rows))
            free = self.slots - len(self.rows)
            if queue.is_ready(free, self.slots):
                self._admit(*queue.take(free), seeds)
            elif len(self.rows):
                self._step()
            elif goes_on:
                continue
            else:
                break
            # In a step, this is the only wait for the device.
            gone = self._ended().cpu().nonzero().squeeze(1).tolist()
            if gone:
                yield self._leave(gone)

    def _start(self, queue: PromptQueue) -> None:
        self.queue = queue
        self.text_config = self.forward.config.get_text_config(decoder=True)
        can_attend = can_attend_to_slots(self.forward.model, self.text_config)
        self.prepares_masks = self.forward.takes_position_ids and can_attend
        self.slots = min(self.slots, queue.most_rows(0))
        tight = self.device.type == "cpu"
        self.cache = SlotCache(
            self.forward.config,
            slots=self.slots,
            prompt_columns=queue.longest,
            max_columns=queue.columns,
            tight=tight,
        )
        self.rows = Rows(
            self.slots,
            self.max_new_tokens,
            self.device,
            prompt_width=queue.prompt_columns if self.sampler.needs_history else 0,
        )
        # A window drops a row's first tokens, a recurrent state keeps none, and some models take no positions.
        is_whole = self.cache.window is None and self.cache.keeps_tokens
        self._keeps_rows = queue.keeps_rows and is_whole and self.forward.takes_position_ids

    def _admit(
        self,
        block: Prefilled,
        rows: list[int],
        numbers: list[int],
        seeds_of: Seeds,
    ) -> None:
        """Gives requests a slot and their first token."""
        seeds = seeds_of(numbers)
        prompts = [block.prompts[row] for row in rows]
        lengths = [len(prompt) for prompt in prompts]
        if max(lengths) > self.cache.span.end:  # it came after the others
            self._move_columns(self.slots, max(lengths))
        end = self.cache.span.end
        index = torch.tensor([rows, lengths], device=self.device)
        history = left_pad(prompts, self.device)[0] if self.sampler.needs_history else None
        new = self.rows.append(
            numbers,
            [end - length for length in lengths],
            index[1] - 1,
            seeds,
            history,
            torch.tensor(self.queue.limits(numbers), device=self.device),
        )
        self.queue.give_way(range(new.start, new.stop))
        self.cache.append(block.cache, rows, max(lengths))
        self.rows.write(new, *self.sampler(block.logits[index[0]], seeds[:, 0], 0, history))
        self._see_starts()

    def _step(self) -> None:
        """Decodes one more token for every row."""
        rows = self.rows
        span = self.cache.span
        self._make_room()
        active = slice(0, len(rows))
        ages = rows.ages[active]
        newest = rows.tokens[active].gather(1, ages.unsqueeze(1) - 1)  # (b, 1)
        attends = attention_to_slots(self.text_config, self.attention)
        with attends if self.prepares_masks else nullcontext():
            logits = self.forward(
                newest, self._step_mask(), rows.positions[active].unsqueeze(1), self.cache
            )
        span.end += 1
        seeds = rows.seeds[active].gather(1, ages.unsqueeze(1)).squeeze(1)
        history = (
            rows.history(active, span.end - span.first) if self.sampler.needs_history else None
        )
        rows.write(active, *self.sampler(logits, seeds, ages, history))

    def _make_room(self) -> None:
        """A free column, if there is none."""
        if self.cache.span.end == self.cache.columns:
            most = self.queue.most_rows(len(self.rows))
            self._move_columns(min(self.slots, most), self.queue.longest)

    def _move_columns(self, slots: int, at_least: int) -> None:
        self.queue.give_way(range(self.slots))
        shift = self.cache.make_room(slots, at_least)
        self.rows.starts = [start - shift for start in self.rows.starts]
        if len(self.rows):
            self._see_starts()

    def _step_mask(self) -> Tensor:
        """The mask of one new token per row: ready for every layer, or (b, width) as input for transformers."""
        span = self.cache.span
        columns = self.cache.columns
        prepared = self.prepares_masks and (
            self.cache.window is None or self.cache.window >= columns
        )
        span.whole = prepared and self.cache.tight
        self._added[:, span.end] = 0
        if not prepared:
            return (self._added[:, span.first : span.end + 1] == 0).long()
        if span.whole:
            return self._added[:, None, None]
        # A copy, even of a single row, because a GPU reads masks in pieces that begin at a multiple of 16 bytes.
        return self._added[:, None, None, span.first : span.end + 1].clone(
            memory_format=torch.contiguous_format
        )

    def _ended(self) -> Tensor:
        """(b,) bool."""
        rows = torch.arange(len(self.rows), device=self.device)
        ages = self.rows.ages[: len(self.rows)]
        self._stopped = self.stop.ended(self.rows.tokens, rows, ages)
        return self._stopped | (ages == self.rows.limits[: len(self.rows)])

    def _leave(self, gone: list[int]) -> tuple[list[int], DecodedBatch]:
        """Takes finished rows out of the batch."""
        rows = self.rows
        numbers = [rows.numbers[row] for row in gone]
        index = torch.tensor(gone, device=self.device)
        ended = DecodedBatch(
            rows.tokens[index], rows.log_probs[index], rows.ages[index], self._stopped[index]
        )
        starts = [rows.starts[row] for row in gone]
        # The tokens that went through the model: all but the newest one.
        lengths = rows.positions[index].tolist() if self._keeps_rows else []
        movers, holes = rows.remove(gone)
        self.cache.move_rows(movers, holes, len(rows), exchange=self._keeps_rows)
        slots = dict(zip(holes, movers))
        for row, number, start, length in zip(gone, numbers, starts, lengths):
            self.queue.keep(number, self.cache, slots.get(row, row), start, length)
        self._see_starts()
        return numbers, ended

    def _see_starts(self) -> None:
        """Updates the columns in use and the mask from the rows' first columns."""
        span = self.cache.span
        starts = self.rows.starts
        span.first = min(starts, default=span.end)
        columns = torch.arange(self.cache.columns, device=self.device)
        hidden = columns < torch.tensor(starts, device=self.device).unsqueeze(1)
        hidden |= columns >= span.end
        added = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=self.device)
        self._added = added.masked_fill_(hidden, torch.finfo(added.dtype).min)  # (b, columns)
