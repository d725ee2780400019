"""Decoding with the trainer's own model: continuous batching, a cache written in place, one pass per prompt.

:class:`SlotDecoder` follows Orca's iteration-level scheduling (Yu et al. 2022, OSDI '22): a finished response leaves at
once, and a waiting request takes its slot.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightppo.models.packing import PACKED_SDPA
from lightppo.ranks import heartbeat
from lightppo.rollout.kept_rows import KeptRows, new_tokens
from lightppo.rollout.sampling import NO_TOKEN, StopCriteria, TokenSampler

# added to a cache at a time on the CPU, where attention is faster over a whole buffer than a part
CPU_COLUMNS = 16
OTHER_COLUMNS = 128  # elsewhere: at least so many, and half of the columns in use
# columns beyond the longest row in a fixed cache, whose number is a multiple of it
FIXED_SPARE = 64
CALL_COST = {"cpu": 64, "other": 2048}  # fixed cost of a forward, in positions
# of the slots free: prompts go through the model together, which costs less than one by one
REFILL_SHARE = 1 / 8
# steps that requests which come while others decode wait for further ones
GATHER_STEPS = 4
# share of rows that still run at which finished ones leave a BatchDecoder's cache, by a copy
COMPACT_BELOW = 0.75


class CachedForward:
    """One decoding step of a Hugging Face model: last-position logits from new ids and a growing cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        name = type(model).__name__
        parameters = inspect.signature(model.forward).parameters
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"HF rollouts need a decoder-only model; {name} is an encoder-decoder")
        if "past_key_values" not in parameters or not model._supports_default_dynamic_cache():
            raise ValueError(f"HF rollouts need a model that takes a DynamicCache; {name} does not")
        self.model = model
        self.config = model.config
        self.takes_position_ids = "position_ids" in parameters
        self.calls = 0
        self.positions = 0  # computed in them, with the padding of prompts
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Cache,
    ) -> Tensor:
        """Logits (B, V) behind the last of ``input_ids`` (B, L); the mask covers the cache too."""
        self.calls += 1
        self.positions += input_ids.numel()
        return self.logits(input_ids, attention_mask, position_ids, cache)

    def logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Cache,
    ) -> Tensor:
        """The same, not counted."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **self._keep}
        if self.takes_position_ids:
            inputs["position_ids"] = position_ids
        return self.model(**inputs, past_key_values=cache, use_cache=True, return_dict=True).logits[
            :, -1
        ]


def left_pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids (B, P) with ``NO_TOKEN`` on the left of shorter prompts, their mask and position ids."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor(
        [[NO_TOKEN] * (width - len(prompt)) + prompt for prompt in prompts], device=device
    )
    mask = (ids != NO_TOKEN).long()
    return ids, mask, (mask.cumsum(dim=1) - 1).clamp_(min=0)


@dataclass
class DecodedBatch:
    """Decoded responses; entries beyond ``lengths`` mean nothing."""

    tokens: Tensor  # (B, max_new_tokens) long
    log_probs: Tensor  # (B, max_new_tokens) float32
    lengths: Tensor  # (B,) tokens of each response, the stop id included
    stopped: Tensor  # (B,) bool: ended by a stop id or string, not by the token limit


Group = tuple[list[int], list[int]]  # a prompt, and the numbers of its requests
# further requests, (prompt, most new tokens) each, whose numbers go on; None: there will be none.
# With True it waits for one.
More = Callable[[bool], list[tuple[list[int], int]] | None]
Uniforms = Callable[[list[int]], Tensor]  # numbers of requests -> (k, max_new_tokens) float64
Decoded = Iterator[tuple[list[int], DecodedBatch]]  # numbers of requests and their responses


@dataclass
class Decoder:
    """Decodes many requests with one model, at most ``slots`` at a time.

    ``run(prompts, uniforms)`` yields some requests (their places in ``prompts``) and their responses, until all are
    done; put the longest prompts first. With ``more``, requests may come while others decode; a prompt and its
    response then have at most ``max_columns`` tokens.
    """

    forward: CachedForward
    sampler: TokenSampler
    stop: StopCriteria
    slots: int
    max_new_tokens: int
    device: torch.device
    # of a prompt and its response; None: as the prompts say
    max_columns: int | None = field(default=None, kw_only=True)
    # slots that requests to come may need; None: all
    most_rows: int | None = field(default=None, kw_only=True)
    # rows that have ended, for requests that go on from them; None: none is kept
    kept: KeptRows | None = field(default=None, kw_only=True)


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
    # attention gets the buffers' full width and masks unused columns; else only the used ones
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
        plain = DynamicCache(config=config).layers
        layers = [SlotLayer(self.span, getattr(layer, "sliding_window", None)) for layer in plain]
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

    def fix(self, device: torch.device) -> None:
        """Call it first: all columns are there from the start, and the buffers stay where they are."""
        self.fixed = True
        self.columns = self.span.end + self._more(self.span.end)
        self.span.column = torch.full((1,), self.span.end, device=device)

    def append(self, prompts: Cache, rows: list[int], width: int) -> None:
        """Adds ``rows`` of a cache of left-padded prompts, at most ``width`` tokens, to end in the last column."""
        span = self.span
        for layer, source in zip(self.layers, prompts.layers):
            states = source.keys, source.values
            if not layer.buffers:
                layer.buffers = [
                    x.new_empty(self.slots, x.shape[1], self.columns, x.shape[3]) for x in states
                ]
                layer.dtype = source.keys.dtype
                layer.device = source.keys.device
                layer.is_initialized = True
            kept = min(width, source.keys.shape[2])  # a sliding layer keeps its window only
            index = torch.tensor(rows, device=layer.device)
            for buffer, x in zip(layer.buffers, states):
                target = buffer[span.rows : span.rows + len(rows)].zero_()
                target[:, :, span.end - kept : span.end] = x[
                    :, :, x.shape[2] - kept :
                ].index_select(0, index)
        span.rows += len(rows)

    def states(self, row: int, start: int, length: int) -> list[Tensor]:
        """Views of a row's keys and values, of each layer, (heads, length, head width)."""
        columns = slice(start, start + length)
        return [buffer[row, :, columns] for layer in self.layers for buffer in layer.buffers]

    def move_rows(self, sources: list[int], targets: list[int], rows: int) -> None:
        """Copies some rows over others; afterwards ``rows`` rows are in use."""
        for layer in self.layers if sources else ():
            index = torch.tensor([sources, targets], device=layer.device)
            columns = slice(layer.first(self.span.end), self.span.end)
            for buffer in layer.buffers:
                buffer[index[1], :, columns] = buffer[index[0], :, columns]
        self.span.rows = rows

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
            # one after the other: little memory is held twice
            for i, old in enumerate(layer.buffers):
                new = old.new_empty(self.slots, old.shape[1], self.columns, old.shape[3])
                new[: span.rows, :, :first] = 0
                new[: span.rows, :, first:end] = old[: span.rows, :, span.first : span.end]
                new[: span.rows, :, end:] = 0
                layer.buffers[i] = old.copy_(new) if self.fixed else new
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


def can_use_slots(config) -> bool:
    """Whether a :class:`SlotCache` can replace the model's cache: all layers attend fully or in a sliding window."""
    text_config = config.get_text_config(decoder=True)
    chunked = getattr(text_config, "attention_chunk_size", None) is not None
    chunked |= "chunked_attention" in (getattr(text_config, "layer_types", None) or [])
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return not chunked and bool(kinds) and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


# -- continuous batching ----------------------------------------------------------------------------------------------


@dataclass
class Prefilled:
    """Some prompts after their forward."""

    prompts: list[list[int]]
    cache: Cache  # keys and values of the left-padded prompts
    logits: Tensor  # (P, V) behind the last token of each prompt
    # row of the prompt, number of the request: samples without a slot yet
    waiting: deque[tuple[int, int]]


class PromptQueue:
    """The requests of one call in order, requests with equal prompts together."""

    def __init__(
        self,
        forward: CachedForward,
        requests: list[list[int]],
        max_prompts: int,
        device: torch.device,
        kept: KeptRows | None = None,
    ):
        self._forward = forward
        self._kept = kept
        self._device = device
        self._max_prompts = max_prompts  # in one forward
        self._groups: deque[Group] = deque()
        self._parts: deque[list[Group]] = deque()  # each for one forward
        self._block: Prefilled | None = None
        self._count = 0  # of all requests so far
        self.waiting = 0  # requests without a slot
        self.add(requests)

    def add(self, requests: list[list[int]]) -> None:
        """More requests, behind those that are there."""
        same: dict[tuple[int, ...], list[int]] = {}
        for number, ids in enumerate(requests, start=self._count):
            same.setdefault(tuple(ids), []).append(number)
        self._groups.extend((list(ids), numbers) for ids, numbers in same.items())
        self._count += len(requests)
        self.waiting += len(requests)

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
        while self._groups and count > 0 and len(groups) < self._max_prompts:
            groups.append(self._groups.popleft())
            count -= len(groups[-1][1])
        call_cost = CALL_COST["cpu" if self._device.type == "cpu" else "other"]
        known = [self._known(numbers) for _, numbers in groups]
        new = [len(ids) - count for (ids, _), count in zip(groups, known)]
        parts = cheapest_parts(new, call_cost)
        self._parts.extend(groups[first:end] for first, end in parts)

    def _through_the_model(self, groups: list[Group]) -> Prefilled:
        prompts = [ids for ids, _ in groups]
        known = [self._known(numbers) for _, numbers in groups]
        if any(known):
            padded, mask, positions, used = new_tokens(prompts, known, self._device)  # (P, M)
            first = [numbers[0] for _, numbers in groups]
            cache = self._kept.cache(self._forward.config, first, used)
        else:
            padded, mask, positions = left_pad(prompts, self._device)  # (P, L)
            cache = DynamicCache(config=self._forward.config)
        if self._kept is not None:
            self._kept.forget([number for _, numbers in groups for number in numbers])
        logits = self._forward(padded.clamp(min=0), mask, positions, cache)
        waiting = deque(
            (row, number) for row, (_, numbers) in enumerate(groups) for number in numbers
        )
        return Prefilled(prompts, cache, logits, waiting)

    def _known(self, numbers: list[int]) -> int:
        """Tokens at the beginning of a prompt whose keys and values were kept."""
        return 0 if self._kept is None else self._kept.length(numbers[0])


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
        self.uniforms = torch.zeros(slots, max_new_tokens, dtype=torch.float64, device=device)
        self.ages = torch.zeros(slots, dtype=torch.long, device=device)  # tokens so far
        # most tokens of each; entries beyond the rows in use mean nothing
        self.limits = torch.full((slots,), max_new_tokens, device=device)
        # of the newest token in prompt + response
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)

    def __len__(self) -> int:
        return len(self.numbers)

    def append(
        self,
        numbers: list[int],
        starts: list[int],
        positions: Tensor,
        uniforms: Tensor,
        prompts: Tensor | None,
        limits: Tensor | None = None,
    ) -> slice:
        """Adds rows without tokens; returns where they are. ``prompts`` (k, ·): kept for :meth:`history`."""
        new = slice(len(self), len(self) + len(numbers))
        self.numbers += numbers
        self.starts += starts
        self.uniforms[new], self.ages[new], self.positions[new] = uniforms, 0, positions
        if limits is not None:
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
                self.uniforms,
                self.ages,
                self.limits,
                self.positions,
            ):
                x[index[1]] = x[index[0]]
        self.ages[left : left + len(gone)] = self.tokens.shape[1]
        return movers, holes


class DecodingRunner(AbstractContextManager, Protocol):
    """Has decoding steps run in another way; entered around the steps of one ``generate``."""

    def decoder(self, kind: type[Decoder]) -> Callable[..., Decoder]:
        """What makes the decoder, in place of ``kind`` and with its arguments; ``kind`` itself changes nothing."""


class SlotDecoder(Decoder):
    """Decodes in a fixed number of slots; needs a model with ``can_use_slots``."""

    attention: ClassVar[str] = SLOT_SDPA  # what steps attend by

    @torch.no_grad()
    def run(
        self, prompts: list[list[int]], uniforms: Uniforms, more: More | None = None
    ) -> Decoded:
        """See :class:`Decoder`."""
        queue = self._start(prompts, goes_on=more is not None)
        while True:
            heartbeat.beat()
            if more is not None:
                came = more(not len(self.rows) and not queue.waiting)
                if came is None:
                    more = None
                else:
                    queue.add([ids for ids, _ in came])
                    self.limits += [most for _, most in came]
            if self._refills(queue):
                self._admit(*queue.take(self.slots - len(self.rows)), uniforms)
            elif not len(self.rows):
                if more is None:
                    break
                continue
            else:
                self._step(queue)
            # the only wait for the device in a step
            gone = self._ended().cpu().nonzero().squeeze(1).tolist()
            if gone:
                yield self._leave(gone)

    def _start(self, prompts: list[list[int]], goes_on: bool = False) -> PromptQueue:
        self.text_config = self.forward.config.get_text_config(decoder=True)
        can_attend = can_attend_to_slots(self.forward.model, self.text_config)
        self.prepares_masks = self.forward.takes_position_ids and can_attend
        self.goes_on = goes_on  # more requests may come
        self._gathers_since: int | None = (
            None  # calls of the model when the first one began to wait
        )
        if not goes_on:
            self.slots = min(self.slots, len(prompts))
        self.limits = [self.max_new_tokens] * len(prompts)  # of each request
        longest = max(map(len, prompts), default=0)
        most = self.max_columns or longest + self.max_new_tokens
        tight = self.device.type == "cpu"
        self.cache = SlotCache(
            self.forward.config,
            slots=self.slots,
            prompt_columns=longest,
            max_columns=most,
            tight=tight,
        )
        history = most if goes_on else longest
        history = history if self.sampler.needs_history else 0
        self.rows = Rows(
            self.slots,
            self.max_new_tokens,
            self.device,
            prompt_width=history,
        )
        if self.cache.window is not None or not self.forward.takes_position_ids:
            self.kept = None  # columns before the window are not whole, or positions cannot be said
        return PromptQueue(self.forward, prompts, self.slots, self.device, self.kept)

    def _refills(self, queue: PromptQueue) -> bool:
        free = self.slots - len(self.rows)
        if queue.at_hand:
            return free > 0
        if self.goes_on and self._gathers(queue, free):
            return False
        return queue.waiting > 0 and free >= min(
            max(1, REFILL_SHARE * self.slots), queue.waiting, self.slots
        )

    def _gathers(self, queue: PromptQueue, free: int) -> bool:
        """Whether requests that came wait for others, while rows decode."""
        few = queue.waiting < min(REFILL_SHARE * self.slots, free)
        if not (few and queue.waiting and len(self.rows)):
            self._gathers_since = None
            return False
        if self._gathers_since is None:
            self._gathers_since = self.forward.calls
        return self.forward.calls - self._gathers_since < GATHER_STEPS

    def _admit(
        self,
        block: Prefilled,
        rows: list[int],
        numbers: list[int],
        uniforms_of: Uniforms,
    ) -> None:
        """Gives requests a slot and their first token."""
        uniforms = uniforms_of(numbers)
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
            uniforms,
            history,
            limits=torch.tensor([self.limits[number] for number in numbers], device=self.device),
        )
        self.cache.append(block.cache, rows, max(lengths))
        self.rows.write(new, *self.sampler(block.logits[index[0]], uniforms[:, 0], 0, history))
        self._see_starts()

    def _step(self, queue: PromptQueue) -> None:
        """Decodes one more token for every row."""
        rows = self.rows
        span = self.cache.span
        self._make_room(queue)
        active = slice(0, len(rows))
        ages = rows.ages[active]
        newest = rows.tokens[active].gather(1, ages.unsqueeze(1) - 1)  # (b, 1)
        attends = attention_to_slots(self.text_config, self.attention)
        with attends if self.prepares_masks else nullcontext():
            logits = self.forward(
                newest, self._step_mask(), rows.positions[active].unsqueeze(1), self.cache
            )
        span.end += 1
        uniforms = rows.uniforms[active].gather(1, ages.unsqueeze(1)).squeeze(1)
        history = (
            rows.history(active, span.end - span.first) if self.sampler.needs_history else None
        )
        rows.write(active, *self.sampler(logits, uniforms, ages, history))

    def _make_room(self, queue: PromptQueue) -> None:
        """A free column, if there is none."""
        if self.cache.span.end == self.cache.columns:
            most = self.most_rows if self.goes_on else len(self.rows) + queue.waiting
            self._move_columns(min(self.slots, most or self.slots), queue.longest)

    def _move_columns(self, slots: int, at_least: int) -> None:
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
        # a copy, even of a single row: a GPU reads a mask in pieces of 16 bytes, from such a border
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
        if self.kept is not None:
            # those that went through the model: all but the newest token
            lengths = rows.positions[index].tolist()
            for row, number, length in zip(gone, numbers, lengths):
                self.kept.add(number, self.cache.states(row, rows.starts[row], length))
        movers, holes = rows.remove(gone)
        self.cache.move_rows(movers, holes, len(rows))
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
        added = torch.zeros(hidden.shape, dtype=self.cache.layers[0].dtype, device=self.device)
        self._added = added.masked_fill_(hidden, torch.finfo(added.dtype).min)  # (b, columns)


class BatchDecoder(Decoder):
    """Decodes one micro batch after the other, for caches with recurrent states, chunked attention, indexed layers."""

    @torch.no_grad()
    def run(
        self, prompts: list[list[int]], uniforms: Uniforms, more: More | None = None
    ) -> Decoded:
        """See :class:`Decoder`."""
        waiting = deque(enumerate(prompts))
        limits = [self.max_new_tokens] * len(prompts)
        while waiting or more is not None:
            if more is not None:
                came = more(not waiting)
                if came is None:
                    more = None
                    continue
                waiting.extend(enumerate((ids for ids, _ in came), start=len(limits)))
                limits += [most for _, most in came]
            if waiting:
                batch = [waiting.popleft() for _ in range(min(self.slots, len(waiting)))]
                numbers = [number for number, _ in batch]
                limits_of_batch = torch.tensor([limits[i] for i in numbers], device=self.device)
                prompts_of_batch = [ids for _, ids in batch]
                yield (
                    numbers,
                    self._decode(prompts_of_batch, uniforms(numbers), limits_of_batch),
                )

    def _decode(self, prompts: list[list[int]], uniforms: Tensor, limits: Tensor) -> DecodedBatch:
        """Decodes until every row has ended or has its limit of new tokens, ``limits`` (B,)."""
        batch_size, most = uniforms.shape
        prompt_ids, mask, positions = left_pad(prompts, self.device)  # (B, P)
        prompt_width = prompt_ids.shape[1]
        ids = pad(prompt_ids, (0, most))  # (B, P + max_new)
        responses = ids[:, prompt_width:]  # a view: what is written here is seen in ids
        log_probs = torch.zeros(batch_size, most, device=self.device)
        lengths = limits.clone()
        stopped = torch.zeros(batch_size, dtype=torch.bool, device=self.device)

        # What follows has b rows: those still in the batch, of which `done` have ended but have not left it yet.
        rows = torch.arange(batch_size, device=self.device)
        done = stopped.clone()
        mask = pad(mask, (0, most), value=1)  # (b, P + max_new)
        inputs = prompt_ids.clamp(min=0)  # (b, P), later (b, 1)
        cache = DynamicCache(config=self.forward.config)
        for step in range(most):
            heartbeat.beat()
            width = prompt_width + step
            logits = self.forward(inputs, mask[:, :width], positions, cache)  # (b, V)
            history = ids[rows, :width] if self.sampler.needs_history else None
            tokens, log_probs[rows, step] = self.sampler(logits, uniforms[:, step], step, history)
            responses[rows, step] = tokens

            ended = self.stop.ended(responses, rows, step + 1) & ~done
            lengths[rows] = torch.where(ended, step + 1, lengths[rows])
            stopped[rows] |= ended
            done |= ended | (limits[rows] == step + 1)
            running = len(rows) - int(done.sum())
            if running == 0:
                break
            inputs = tokens.unsqueeze(1)
            positions = positions[:, -1:] + 1
            if running <= COMPACT_BELOW * len(rows) and _can_drop_rows(cache):
                kept = (~done).nonzero().squeeze(1)
                cache.batch_select_indices(kept)
                rows, mask, inputs, positions, uniforms = (
                    x[kept] for x in (rows, mask, inputs, positions, uniforms)
                )
                done = done.new_zeros(running)
        return DecodedBatch(responses, log_probs, lengths, stopped)


def _can_drop_rows(cache: Cache) -> bool:
    """Whether the cache can drop rows: not with recurrent states, which would stay behind."""
    recurrent = any(hasattr(layer, "update_recurrent_state") for layer in cache.layers)
    return not recurrent and all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
