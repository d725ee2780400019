"""Decoding with the trainer's own model: a micro batch after the other, or continuous batching in slots.

:class:`SlotDecoder` follows Orca's iteration-level scheduling (Yu et al. 2022, OSDI '22): a finished response leaves at
once, and a waiting request takes its slot.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lightppo.models.attention.recurrent import RECURRENT_LAYERS, recurrent_slots
from lightppo.models.attention.slot_layers import (
    EMPTY_LAYER,
    SLOT_SDPA,
    NoSlots,
    SlotLayer,
    Span,
    attention_to_slots,
    can_attend_to_slots,
)
from lightppo.models.batches import cache_argument, cheapest_parts
from lightppo.ranks import heartbeat
from lightppo.rollout.recorded_experts import ExpertRecorder
from lightppo.rollout.sampling import NO_TOKEN, StopCriteria, TokenSampler

# share of rows that still run at which finished ones leave a BatchDecoder's cache, by a copy
COMPACT_BELOW = 0.75


class CachedForward:
    """One decoding step of a Hugging Face model: last-position logits from new ids and a growing cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        model_name = type(model).__name__
        parameters = inspect.signature(model.forward).parameters
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"HF rollouts need a decoder-only model; {model_name} is an encoder-decoder"
            )
        self._cache = cache_argument(model)
        if self._cache is None or not model._supports_default_dynamic_cache():
            raise ValueError(
                f"HF rollouts need a model that takes a DynamicCache; {model_name} does not"
            )
        self.model = model
        self.config = model.config
        self.takes_position_ids = "position_ids" in parameters
        self.calls = 0
        self.positions = 0  # computed in them, with the padding of prompts
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.recorder: ExpertRecorder | None = None  # of a mixture of experts, with --router_replay

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Cache,
        is_counted: bool = True,
    ) -> Tensor:
        """Return logits (B, V) behind the last of ``input_ids`` (B, L); the mask covers the cache too."""
        if is_counted:
            self.calls += 1
            self.positions += input_ids.numel()
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **self._keep}
        if self.takes_position_ids:
            inputs["position_ids"] = position_ids
        inputs |= {self._cache: cache, "use_cache": True, "return_dict": True}
        if self.recorder is not None:
            with self.recorder.forward(*input_ids.shape):
                return self.model(**inputs).logits[:, -1]
        return self.model(**inputs).logits[:, -1]


def left_pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids (B, P) with ``NO_TOKEN`` on the left of shorter prompts, their mask and position ids."""
    width = max(len(prompt) for prompt in prompts)
    padded_ids = torch.tensor(
        [[NO_TOKEN] * (width - len(prompt)) + prompt for prompt in prompts], device=device
    )
    mask = (padded_ids != NO_TOKEN).long()
    return padded_ids, mask, (mask.cumsum(dim=1) - 1).clamp_(min=0)


@dataclass
class DecodedBatch:
    """Decoded responses; entries beyond ``lengths`` mean nothing."""

    tokens: Tensor  # (B, max_new_tokens) long
    log_probs: Tensor  # (B, max_new_tokens) float32
    lengths: Tensor  # (B,) tokens of each response, the stop id included
    stopped: Tensor  # (B,) bool: ended by a stop id or string, not by the token limit


Seeds = Callable[[list[int]], Tensor]  # numbers of requests -> (k, max_new_tokens) long
Decoded = Iterator[tuple[list[int], DecodedBatch]]  # numbers of requests and their responses


@dataclass
class Decoder:
    """Decode many requests with one model, at most ``slots`` at a time.

    ``run(queue, seeds)`` yields the numbers of some requests and their responses, until all of a queue are done.
    """

    forward: CachedForward
    sampler: TokenSampler
    stop: StopCriteria
    slots: int
    max_new_tokens: int
    device: torch.device

    def run(self, queue: PromptQueue, seeds: Seeds) -> Decoded:
        raise NotImplementedError


class BatchDecoder(Decoder):
    """Decode one micro batch after the other, with the cache that transformers makes for the model."""

    @torch.no_grad()
    def run(self, queue: PromptQueue, seeds: Seeds) -> Decoded:
        """See :class:`Decoder`."""
        while queue.look(idle=True) or queue.waiting:
            if not queue.waiting:
                continue
            numbers = queue.take_in_order(self.slots)
            prompts = [queue.prompts[number] for number in numbers]
            limits = torch.tensor(queue.limits(numbers), device=self.device)
            yield numbers, self._decode(numbers, prompts, seeds(numbers), limits)

    def _decode(
        self, numbers: list[int], prompts: list[list[int]], seeds: Tensor, limits: Tensor
    ) -> DecodedBatch:
        """Decode until every row has ended or has its limit of new tokens, ``limits`` (B,)."""
        batch_size, max_new_tokens = seeds.shape
        prompt_ids, mask, positions = left_pad(prompts, self.device)  # (B, P)
        prompt_width = prompt_ids.shape[1]
        ids = pad(prompt_ids, (0, max_new_tokens))  # (B, P + max_new)
        responses = ids[:, prompt_width:]  # a view: what is written here is seen in ids
        log_probs = torch.zeros(batch_size, max_new_tokens, device=self.device)
        lengths = limits.clone()
        stopped = torch.zeros(batch_size, dtype=torch.bool, device=self.device)

        # What follows has b rows: those still in the batch, of which `has_ended` have ended but have not left it yet.
        active_rows = torch.arange(batch_size, device=self.device)
        has_ended = stopped.clone()
        mask = pad(mask, (0, max_new_tokens), value=1)  # (b, P + max_new)
        inputs = prompt_ids.clamp(min=0)  # (b, P), later (b, 1)
        cache = DynamicCache(config=self.forward.config)
        for step in range(max_new_tokens):
            heartbeat.beat()
            column_count = prompt_width + step
            logits = self.forward(inputs, mask[:, :column_count], positions, cache)  # (b, V)
            if (recorder := self.forward.recorder) is not None and step == 0:
                recorder.add_prompts([(ids, [number]) for ids, number in zip(prompts, numbers)])
            elif recorder is not None:
                recorder.add_steps([numbers[row] for row in active_rows.tolist()])
            history = ids[active_rows, :column_count] if self.sampler.needs_history else None
            tokens, log_probs[active_rows, step] = self.sampler(
                logits, seeds[:, step], step, history
            )
            responses[active_rows, step] = tokens

            ended = self.stop.ended(responses, active_rows, step + 1) & ~has_ended
            lengths[active_rows] = torch.where(ended, step + 1, lengths[active_rows])
            stopped[active_rows] |= ended
            has_ended |= ended | (limits[active_rows] == step + 1)
            running = len(active_rows) - int(has_ended.sum())
            if running == 0:
                break
            inputs = tokens.unsqueeze(1)
            positions = positions[:, -1:] + 1
            if running <= COMPACT_BELOW * len(active_rows) and _can_drop_rows(cache):
                remaining = (~has_ended).nonzero().squeeze(1)
                cache.batch_select_indices(remaining)
                active_rows, mask, inputs, positions, seeds = (
                    tensor[remaining] for tensor in (active_rows, mask, inputs, positions, seeds)
                )
                has_ended = has_ended.new_zeros(running)
        return DecodedBatch(responses, log_probs, lengths, stopped)


def _can_drop_rows(cache: Cache) -> bool:
    """Return whether the cache can drop rows: not with recurrent states, which would stay behind."""
    return all(
        hasattr(layer, "batch_select_indices") and not hasattr(layer, "update_recurrent_state")
        for layer in cache.layers
    )


# -- continuous batching: a cache written in place, one pass per prompt -----------------------------------------------

# added to a cache at a time on the CPU, where attention is faster over a whole buffer than a part
CPU_COLUMNS = 16
OTHER_COLUMNS = 128  # elsewhere: at least so many, and half of the columns in use
# columns beyond the longest row in a fixed cache, whose number is a multiple of it
FIXED_SPARE = 64
# fixed cost of a forward, in positions
CALL_COST = {"cpu": 64}
OTHER_CALL_COST = 2048
# of the slots free: prompts go through the model together, which costs less than one by one
REFILL_SHARE = 1 / 8
Group = tuple[list[int], list[int]]  # a prompt, and the numbers of its requests


# -- the cache --------------------------------------------------------------------------------------------------------


class SlotCache(DynamicCache):
    """The layers' buffers with one common :class:`Span`, whose end moves by one after each forward.

    The first rows end at ``prompt_columns``; a row has at most ``max_columns``. ``tight``: add few columns at a time.
    """

    def __init__(
        self, config, *, slots: int, prompt_columns: int, max_columns: int, tight: bool
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

    def fix(self, device: torch.device) -> None:
        """Make all columns at once, and leave the buffers where they are; call it first."""
        self.fixed = True
        self.columns = self.span.end + self._more(self.span.end)
        self.span.column = torch.full((1,), self.span.end, device=device)

    def append(self, prompts: Cache, rows: list[int], width: int) -> None:
        """Add ``rows`` of a cache of left-padded prompts, at most ``width`` tokens, to end in the last column."""
        for layer, source in zip(self.layers, prompts.layers):
            layer.append(source, rows, width, self.slots, self.columns)
        self._set_rows(self.span.rows + len(rows))

    def move_rows(
        self, sources: list[int], targets: list[int], rows: int, *, exchange: bool = False
    ) -> None:
        """Copy some rows over others, or have them change places; afterwards ``rows`` rows are in use."""
        if exchange:
            sources, targets = sources + targets, targets + sources
        for layer in self.layers if sources else ():
            layer.move_rows(sources, targets)
        self._set_rows(rows)

    def _set_rows(self, row_count: int) -> None:
        self.span.rows = row_count
        for layer in self.layers:
            layer.see_rows()

    def make_room(self, slots: int, at_least: int) -> int:
        """Move everything into new buffers of ``slots`` rows (unless they are fixed), in which a column is free.

        The first free column is at least number ``at_least``. Returns how many columns everything moved left.
        """
        span = self.span
        end_column = max(span.end - span.first, at_least)
        first_column = end_column - (span.end - span.first)
        column_shift = span.end - end_column
        if not self.fixed:
            self.slots = slots
        self.columns = end_column + self._more(end_column)
        for layer in self.layers:
            # One layer after the other, so that little memory is held twice.
            layer.make_room(self.slots, self.columns, first_column, end_column, self.fixed)
            layer.see_rows()
        span.first = first_column
        span.end = end_column
        return column_shift

    def _more(self, columns: int) -> int:
        if self.fixed:
            return -(-(self.max_columns + FIXED_SPARE) // FIXED_SPARE) * FIXED_SPARE - columns
        # Rows end at different columns: without room beyond the longest row's, all would move at every step.
        if self.tight:
            return CPU_COLUMNS
        return max(OTHER_COLUMNS, min(columns // 2, self.max_columns - columns))


def slot_layer(layer: Any, span: Span) -> SlotLayer:
    """Return what takes the place of a layer of transformers' cache."""
    if type(layer).__name__ == EMPTY_LAYER:
        return NoSlots()
    if type(layer) in RECURRENT_LAYERS:
        return recurrent_slots(layer, span)
    return SlotLayer(span, getattr(layer, "sliding_window", None))


def can_use_slots(config) -> bool:
    """Tell whether a :class:`SlotCache` can replace the model's cache: layers attend fully or in a sliding window, are
    recurrent, or keep nothing, and none runs several times, which appends copies of layers to the cache."""
    text_config = config.get_text_config(decoder=True)
    if (
        max(getattr(text_config, loops, 1) for loops in ("n_recurrent_loops", "loop_num_passes"))
        > 1
    ):
        return False
    chunked = getattr(text_config, "attention_chunk_size", None) is not None
    chunked |= "chunked_attention" in (getattr(text_config, "layer_types", None) or [])
    layers = DynamicCache(config=config).layers
    attends = any(isinstance(layer, DynamicLayer) for layer in layers)
    return (
        not chunked
        and attends
        and all(
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, *RECURRENT_LAYERS)
            or type(layer).__name__ == EMPTY_LAYER
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


class PromptQueue:
    """The requests of one call by their numbers, the longest prompts first; equal prompts go through the model once.

    Decoders ask it for all that concerns requests. A subclass may bring more of them while others decode, and may keep
    rows that have ended.
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
        self.forward = forward
        self.device = device
        self.max_new_tokens = max_new_tokens
        self.prompts: list[list[int]] = []  # of all requests so far
        self.waiting = 0  # requests that nobody decodes yet
        self.prompt_columns = max(map(len, prompts), default=0)  # most tokens of a prompt
        self.columns = self.prompt_columns + max_new_tokens  # and of its response
        self._groups: deque[Group] = deque()
        self._parts: deque[list[Group]] = deque()  # each for one forward
        self._block: Prefilled | None = None
        self.add(prompts)

    def add(self, prompts: list[list[int]]) -> None:
        """Add requests behind those that are there."""
        numbers_of_prompt: dict[tuple[int, ...], list[int]] = {}
        for number, ids in enumerate(prompts, start=len(self.prompts)):
            numbers_of_prompt.setdefault(tuple(ids), []).append(number)
        self._groups.extend((list(ids), numbers) for ids, numbers in numbers_of_prompt.items())
        self.prompts += prompts
        self.waiting += len(prompts)

    # -- for subclasses --------------------------------------------------------------------------------------------

    def look(self, idle: bool) -> bool:
        """Return whether further requests may come; those that are there are added. ``idle``: nothing decodes."""
        return False

    def limits(self, numbers: list[int]) -> list[int]:
        """Return the most new tokens of each request."""
        return [self.max_new_tokens] * len(numbers)

    def most_rows(self, running: int) -> int:
        """Return how many slots may be needed from now on, while so many rows run."""
        return running + self.waiting

    def is_ready(self, free_slots: int, slots: int) -> bool:
        """Tell whether waiting requests should get some of the free slots now."""
        if self.at_hand:
            return free_slots > 0
        return self.waiting > 0 and free_slots >= min(max(1, REFILL_SHARE * slots), self.waiting)

    def new_tokens(self, group: Group) -> int:
        """Return how many tokens of a prompt go through the model."""
        return len(group[0])

    def inputs(self, groups: list[Group]) -> tuple[Tensor, Tensor, Tensor, Cache]:
        """Return the inputs of prompts: padded ids (P, L), mask, position ids, and a cache of what is known of them."""
        padded_ids, mask, positions = left_pad([ids for ids, _ in groups], self.device)
        return padded_ids.clamp(min=0), mask, positions, DynamicCache(config=self.forward.config)

    def keep(self, number: int, cache: SlotCache, slot: int, start: int, length: int) -> None:
        """Note that a request has ended, whose keys and values stay in a slot, from column ``start`` on."""

    def give_way(self, slots: range) -> None:
        """Give up these slots, which are about to be written over."""

    # -- for decoders ----------------------------------------------------------------------------------------------

    def take_in_order(self, count: int) -> list[int]:
        """Return numbers of the next requests, at most ``count``."""
        start = len(self.prompts) - self.waiting
        self.waiting -= min(count, self.waiting)
        return list(range(start, len(self.prompts) - self.waiting))

    @property
    def at_hand(self) -> bool:
        """Tell whether requests wait whose prompts have been through the model, or are already divided into parts."""
        return self._block is not None or bool(self._parts)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest waiting prompt; 0 if no prompt waits."""
        lengths = [len(ids) for groups in (*self._parts, self._groups) for ids, _ in groups]
        if self._block is not None:
            lengths += [len(self._block.prompts[row]) for row, _ in self._block.waiting]
        return max(lengths, default=0)

    def take(self, count: int) -> tuple[Prefilled, list[int], list[int]]:
        """Return the next requests, 1 to ``count``: a block of prompts, the requests' rows in it, and their numbers."""
        if not self.at_hand:  # divide the prompts of these requests into parts
            groups: list[Group] = []
            requests = 0
            while self._groups and requests < count:
                groups.append(self._groups.popleft())
                requests += len(groups[-1][1])
            lengths = [self.new_tokens(group) for group in groups]
            call_cost = CALL_COST.get(self.device.type, OTHER_CALL_COST)
            parts = cheapest_parts(lengths, call_cost)
            self._parts.extend(groups[start:end] for start, end in parts)
        block = self._block or self._prefill(self._parts.popleft())
        admitted = [block.waiting.popleft() for _ in range(min(count, len(block.waiting)))]
        rows, numbers = map(list, zip(*admitted))
        self._block = block if block.waiting else None
        self.waiting -= len(rows)
        return block, rows, numbers

    def _prefill(self, groups: list[Group]) -> Prefilled:
        ids, mask, positions, cache = self.inputs(groups)
        logits = self.forward(ids, mask, positions, cache)
        if self.forward.recorder is not None:
            self.forward.recorder.add_prompts(groups)
        waiting = [(row, number) for row, (_, numbers) in enumerate(groups) for number in numbers]
        return Prefilled([ids for ids, _ in groups], cache, logits, deque(waiting))


class SlotRows:
    """The responses in the slots; row r of every tensor is row r of the cache."""

    def __init__(
        self, slots: int, max_new_tokens: int, device: torch.device, prompt_width: int = 0
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
        """Add rows without tokens; return where they are. ``prompts`` (k, ·): kept for :meth:`history`."""
        new_rows = slice(len(self), len(self) + len(numbers))
        self.numbers += numbers
        self.starts += starts
        self.seeds[new_rows], self.ages[new_rows], self.positions[new_rows] = seeds, 0, positions
        self.limits[new_rows] = limits
        if prompts is not None:
            width = self.ids.shape[1] - self.tokens.shape[1]
            self.ids[new_rows, :width] = pad(prompts, (width - prompts.shape[1], 0), value=NO_TOKEN)
        return new_rows

    def history(self, rows: slice, width: int) -> Tensor:
        """Return the last ids of some rows' prompts and responses, left padding ``NO_TOKEN``: (b, width)."""
        end_columns = self.ages[rows] + (self.ids.shape[1] - self.tokens.shape[1])
        columns = end_columns.unsqueeze(1) + torch.arange(-width, 0, device=end_columns.device)
        return self.ids[rows].gather(1, columns.clamp(min=0))

    def write(self, rows: slice, tokens: Tensor, log_probs: Tensor) -> None:
        """Write the newest token of some rows."""
        ages = self.ages[rows].unsqueeze(1)
        self.tokens[rows].scatter_(1, ages, tokens.unsqueeze(1))
        self.log_probs[rows].scatter_(1, ages, log_probs.unsqueeze(1))
        self.ages[rows] += 1
        self.positions[rows] += 1

    def remove(self, ended_rows: list[int]) -> tuple[list[int], list[int]]:
        """Remove rows; the last rows move into the holes. Return their old and new places."""
        remaining = len(self) - len(ended_rows)
        free_rows = [row for row in ended_rows if row < remaining]
        moving_rows = sorted(set(range(remaining, len(self))) - set(ended_rows))
        for moving_row, free_row in zip(moving_rows, free_rows):
            self.numbers[free_row] = self.numbers[moving_row]
            self.starts[free_row] = self.starts[moving_row]
        del self.numbers[remaining:], self.starts[remaining:]
        if free_rows:
            sources, targets = torch.tensor([moving_rows, free_rows], device=self.ages.device)
            tensors = [self.ids, self.log_probs, self.seeds, self.ages, self.limits, self.positions]
            for tensor in tensors:
                tensor[targets] = tensor[sources]
        self.ages[remaining : remaining + len(ended_rows)] = self.tokens.shape[1]
        return moving_rows, free_rows


class SlotDecoder(Decoder):
    """Decode in a fixed number of slots; needs a model with ``can_use_slots``."""

    attention: ClassVar[str] = SLOT_SDPA  # what steps attend by

    @torch.no_grad()
    def run(self, queue: PromptQueue, seeds: Seeds) -> Decoded:
        """See :class:`Decoder`."""
        self._start(queue)
        while True:
            heartbeat.beat()
            goes_on = queue.look(idle=not len(self.rows))
            free_slots = self.slots - len(self.rows)
            if queue.is_ready(free_slots, self.slots):
                self._admit(*queue.take(free_slots), seeds)
            elif len(self.rows):
                self._step()
            elif goes_on:
                continue
            else:
                break
            active_rows = torch.arange(len(self.rows), device=self.device)
            ages = self.rows.ages[: len(self.rows)]
            self._stopped = self.stop.ended(self.rows.tokens, active_rows, ages)  # (b,)
            has_ended = self._stopped | (ages == self.rows.limits[: len(self.rows)])
            # In a step, this is the only wait for the device.
            ended_rows = has_ended.cpu().nonzero().squeeze(1).tolist()
            if ended_rows:
                yield self._leave(ended_rows)

    def _start(self, queue: PromptQueue) -> None:
        self.queue = queue
        self.text_config = self.forward.config.get_text_config(decoder=True)
        can_attend = can_attend_to_slots(self.forward.model, self.text_config)
        self.prepares_masks = self.forward.takes_position_ids and can_attend
        self.slots = min(self.slots, queue.most_rows(0))
        self.cache = SlotCache(
            self.forward.config,
            slots=self.slots,
            prompt_columns=queue.longest,
            max_columns=queue.columns,
            tight=self.device.type == "cpu",
        )
        self.rows = SlotRows(
            self.slots,
            self.max_new_tokens,
            self.device,
            prompt_width=queue.prompt_columns if self.sampler.needs_history else 0,
        )
        # A window drops a row's first tokens, a recurrent state keeps none, and some models take no positions.
        is_whole = self.cache.window is None and self.cache.keeps_tokens
        self._keeps_rows = queue.keeps_rows and is_whole and self.forward.takes_position_ids

    def _admit(
        self, block: Prefilled, rows: list[int], numbers: list[int], seeds_of: Seeds
    ) -> None:
        """Give requests a slot and their first token."""
        seeds = seeds_of(numbers)
        prompts = [block.prompts[row] for row in rows]
        lengths = [len(prompt) for prompt in prompts]
        if max(lengths) > self.cache.span.end:  # it came after the others
            self._move_columns(self.slots, max(lengths))
        end = self.cache.span.end
        indices = torch.tensor([rows, lengths], device=self.device)
        history = left_pad(prompts, self.device)[0] if self.sampler.needs_history else None
        new_rows = self.rows.append(
            numbers,
            [end - length for length in lengths],
            indices[1] - 1,
            seeds,
            history,
            torch.tensor(self.queue.limits(numbers), device=self.device),
        )
        if self.queue.keeps_rows:
            self.queue.give_way(range(new_rows.start, new_rows.stop))
        self.cache.append(block.cache, rows, max(lengths))
        self.rows.write(new_rows, *self.sampler(block.logits[indices[0]], seeds[:, 0], 0, history))
        self._see_starts()

    def _step(self) -> None:
        """Decode one more token for every row."""
        rows = self.rows
        span = self.cache.span
        self._make_room()
        active_rows = slice(0, len(rows))
        ages = rows.ages[active_rows]
        newest_tokens = rows.tokens[active_rows].gather(1, ages.unsqueeze(1) - 1)  # (b, 1)
        attends = attention_to_slots(self.text_config, self.attention)
        with attends if self.prepares_masks else nullcontext():
            logits = self.forward(
                newest_tokens,
                self._step_mask(),
                rows.positions[active_rows].unsqueeze(1),
                self.cache,
            )
        if self.forward.recorder is not None:
            self.forward.recorder.add_steps(rows.numbers)
        span.end += 1
        seeds = rows.seeds[active_rows].gather(1, ages.unsqueeze(1)).squeeze(1)
        history = None
        if self.sampler.needs_history:
            history = rows.history(active_rows, span.end - span.first)
        rows.write(active_rows, *self.sampler(logits, seeds, ages, history))

    def _make_room(self) -> None:
        """Make a free column, if there is none."""
        if self.cache.span.end == self.cache.columns:
            max_rows = self.queue.most_rows(len(self.rows))
            self._move_columns(min(self.slots, max_rows), self.queue.longest)

    def _move_columns(self, slots: int, min_columns: int) -> None:
        if self.queue.keeps_rows:
            self.queue.give_way(range(self.slots))
        column_shift = self.cache.make_room(slots, min_columns)
        self.rows.starts = [start - column_shift for start in self.rows.starts]
        if len(self.rows):
            self._see_starts()

    def _step_mask(self) -> Tensor:
        """Return the mask of one new token per row: ready for every layer, or (b, width) as input for transformers."""
        span = self.cache.span
        columns = self.cache.columns
        is_prepared = self.prepares_masks and (
            self.cache.window is None or self.cache.window >= columns
        )
        span.whole = is_prepared and self.cache.tight
        self._added[:, span.end] = 0
        if not is_prepared:
            return (self._added[:, span.first : span.end + 1] == 0).long()
        if span.whole:
            return self._added[:, None, None]
        # A copy, even of a single row, because a GPU reads masks in pieces that begin at a multiple of 16 bytes.
        return self._added[:, None, None, span.first : span.end + 1].clone(
            memory_format=torch.contiguous_format
        )

    def _leave(self, ended_rows: list[int]) -> tuple[list[int], DecodedBatch]:
        """Take finished rows out of the batch."""
        rows = self.rows
        numbers = [rows.numbers[row] for row in ended_rows]
        index = torch.tensor(ended_rows, device=self.device)
        ended = DecodedBatch(
            rows.tokens[index], rows.log_probs[index], rows.ages[index], self._stopped[index]
        )
        starts = [rows.starts[row] for row in ended_rows]
        # The tokens that went through the model: all but the newest one.
        lengths = rows.positions[index].tolist() if self._keeps_rows else []
        moving_rows, free_rows = rows.remove(ended_rows)
        self.cache.move_rows(moving_rows, free_rows, len(rows), exchange=self._keeps_rows)
        slots = dict(zip(free_rows, moving_rows))
        for row, number, start, length in zip(ended_rows, numbers, starts, lengths):
            self.queue.keep(number, self.cache, slots.get(row, row), start, length)
        self._see_starts()
        return numbers, ended

    def _see_starts(self) -> None:
        """Update the columns in use and the mask from the rows' first columns."""
        span = self.cache.span
        starts = self.rows.starts
        span.first = min(starts, default=span.end)
        columns = torch.arange(self.cache.columns, device=self.device)
        is_hidden = columns < torch.tensor(starts, device=self.device).unsqueeze(1)
        is_hidden |= columns >= span.end
        dtype = next(layer.dtype for layer in self.cache.layers if layer.buffers)
        additive_mask = torch.zeros(is_hidden.shape, dtype=dtype, device=self.device)
        self._added = additive_mask.masked_fill_(
            is_hidden, torch.finfo(additive_mask.dtype).min
        )  # (b, columns)
