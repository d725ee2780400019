"""Continuous batching: finished responses leave at once, waiting prompts take their slots.

After Orca's iteration-level scheduling (Yu et al. 2022, OSDI '22), with the cache of :mod:`lightppo.rollout.cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from lightppo.rollout.cache import SlotCache
from lightppo.rollout.decoding import CachedForward, DecodedBatch, left_pad
from lightppo.rollout.prefill import Prefilled, PromptQueue
from lightppo.rollout.sampling import NO_TOKEN, TokenSampler
from lightppo.rollout.slot_attention import attention_to_slots, can_attend_to_slots
from lightppo.rollout.stopping import StopCriteria

# Prompts go through the model when this share of the slots is free: together they cost less than one by one.
REFILL_SHARE = 1 / 8


class Rows:
    """What is known of each response in a slot; row r of every tensor, as in the cache.

    Attributes:
        numbers: of the requests.
        starts: first column of each row.
        tokens, log_probs: (slots, max_new_tokens) so far.
        uniforms: (slots, max_new_tokens).
        ages: (slots,) tokens so far.
        positions: (slots,) of the newest token, from 0 at the prompt's first.
    """

    def __init__(self, slots: int, max_new_tokens: int, device: torch.device) -> None:
        self.numbers: list[int] = []
        self.starts: list[int] = []
        self.tokens = torch.zeros(slots, max_new_tokens, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(slots, max_new_tokens, device=device)
        self.uniforms = torch.zeros(slots, max_new_tokens, dtype=torch.float64, device=device)
        self.ages = torch.zeros(slots, dtype=torch.long, device=device)
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)

    def __len__(self) -> int:
        return len(self.numbers)

    def append(self, numbers: list[int], starts: list[int], positions: Tensor, uniforms: Tensor) -> None:
        """New rows, without a token yet."""
        new = slice(len(self), len(self) + len(numbers))
        self.numbers += numbers
        self.starts += starts
        self.uniforms[new] = uniforms
        self.ages[new] = 0
        self.positions[new] = positions

    def write(self, new: slice, tokens: Tensor, log_probs: Tensor) -> None:
        """The newest token of some rows."""
        ages = self.ages[new].unsqueeze(1)
        self.tokens[new].scatter_(1, ages, tokens.unsqueeze(1))
        self.log_probs[new].scatter_(1, ages, log_probs.unsqueeze(1))
        self.ages[new] += 1
        self.positions[new] += 1

    def remove(self, gone: list[int]) -> tuple[list[int], list[int]]:
        """Takes rows out: the last ones move into the holes. Gives their old and new places."""
        left = len(self) - len(gone)
        holes = [row for row in gone if row < left]
        movers = sorted(set(range(left, len(self))) - set(gone))
        for mover, hole in zip(movers, holes):
            self.numbers[hole], self.starts[hole] = self.numbers[mover], self.starts[mover]
        del self.numbers[left:], self.starts[left:]
        if holes:
            index = torch.tensor([movers, holes], device=self.ages.device)
            for x in (self.tokens, self.log_probs, self.uniforms, self.ages, self.positions):
                x[index[1]] = x[index[0]]
        return movers, holes


class SlotDecoder:
    """Decodes many requests in a fixed number of slots.

    Args:
        forward: the model; ``can_use_slots`` holds for it.
        sampler: draws the tokens.
        stop: tells which rows have ended.
        slots: most rows at a time.
        max_new_tokens: of a response.
        device: of the model.

    Attributes:
        steps: forward passes made.
        positions: positions computed in them: padding of prompts included, else only tokens.
    """

    def __init__(
        self,
        forward: CachedForward,
        sampler: TokenSampler,
        stop: StopCriteria,
        *,
        slots: int,
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        self.forward = forward
        self.sampler = sampler
        self.stop = stop
        self.slots = slots
        self.max_new_tokens = max_new_tokens
        self.device = device
        self.steps = 0
        self.positions = 0
        self.text_config = forward.config.get_text_config(decoder=True)
        self.prepares_masks = forward.takes_position_ids and can_attend_to_slots(forward.base, self.text_config)

    @torch.no_grad()
    def run(
        self, prompts: list[list[int]], uniforms: Callable[[list[int]], Tensor]
    ) -> Iterator[tuple[list[int], DecodedBatch]]:
        """Decodes all requests, the longest prompts best first.

        Args:
            prompts: non-empty lists of token ids.
            uniforms: gives those of some requests by their numbers (places in ``prompts``), (k, max_new_tokens)
                float64 on the device.

        Yields:
            Numbers of requests that have ended, and their responses.
        """
        queue = self._start(prompts)
        while True:
            if self._refills(queue):
                self._admit(*queue.take(self.slots - len(self.rows)), uniforms)
            elif not len(self.rows):
                break
            else:
                self._step(queue)
            gone = self._ended().nonzero().squeeze(1).tolist()  # the one wait for the device in a step
            if gone:
                yield self._leave(gone)
        self.steps += queue.forwards
        self.positions += queue.positions

    def _start(self, prompts: list[list[int]]) -> PromptQueue:
        self.slots = min(self.slots, len(prompts))
        longest = max(map(len, prompts), default=0)
        self.cache = SlotCache(
            self.forward.config,
            slots=self.slots,
            prompt_columns=longest,
            max_columns=longest + self.max_new_tokens,
            tight=self.device.type == "cpu",
        )
        self.rows = Rows(self.slots, self.max_new_tokens, self.device)
        self.history = self._blank_history() if self.sampler.needs_history else None
        return PromptQueue(self.forward, prompts, self.slots, self.device)

    def _blank_history(self) -> Tensor:
        return torch.full((self.slots, self.cache.columns), NO_TOKEN, device=self.device)

    def _refills(self, queue: PromptQueue) -> bool:
        free = self.slots - len(self.rows)
        if queue.at_hand:
            return free > 0
        return queue.waiting > 0 and free >= min(max(1, REFILL_SHARE * self.slots), queue.waiting, self.slots)

    def _admit(
        self, block: Prefilled, rows: list[int], numbers: list[int], uniforms_of: Callable[[list[int]], Tensor]
    ) -> None:
        """Gives requests a slot and their first token."""
        uniforms, span = uniforms_of(numbers), self.cache.span
        new = slice(len(self.rows), len(self.rows) + len(rows))
        prompts = [block.prompts[row] for row in rows]
        lengths = [len(prompt) for prompt in prompts]
        history = None
        if self.history is not None:
            history = left_pad(prompts, self.device)
            self.history[new] = NO_TOKEN
            self.history[new, span.end - history.shape[1] : span.end] = history
        index = torch.tensor([rows, lengths], device=self.device)
        tokens, log_probs = self.sampler(block.logits[index[0]], uniforms[:, 0], 0, history)
        self.cache.append(block.cache, rows, max(lengths))
        self.rows.append(numbers, [span.end - length for length in lengths], index[1] - 1, uniforms)
        self.rows.write(new, tokens, log_probs)
        self._see_starts()

    def _step(self, queue: PromptQueue) -> None:
        """One more token for every row."""
        self._make_room(queue)
        rows, span, end = self.rows, self.cache.span, self.cache.span.end
        active = slice(0, len(rows))
        ages = rows.ages[active]
        newest = rows.tokens[active].gather(1, ages.unsqueeze(1) - 1)  # (b, 1)
        if self.history is not None:
            self.history[active, end] = newest.squeeze(1)
        with attention_to_slots(self.text_config) if self.prepares_masks else nullcontext():
            logits = self.forward(newest, self._step_mask(), rows.positions[active].unsqueeze(1), self.cache)
        self.cache.advance()
        self.steps += 1
        self.positions += len(rows)
        uniforms = rows.uniforms[active].gather(1, ages.unsqueeze(1)).squeeze(1)
        history = None if self.history is None else self.history[active, span.first : end + 1]
        rows.write(active, *self.sampler(logits, uniforms, ages, history))

    def _make_room(self, queue: PromptQueue) -> None:
        span = self.cache.span
        first, end, columns = span.first, span.end, self.cache.columns
        slots = min(self.slots, len(self.rows) + queue.waiting)
        shift = self.cache.make_room(slots, queue.longest) if end == columns else 0
        if end < columns:
            return
        self.rows.starts = [start - shift for start in self.rows.starts]
        if self.history is not None:
            before, self.history = self.history, self._blank_history()
            self.history[:, span.first : span.end] = before[:, first:end]
        self._see_starts()

    def _step_mask(self) -> Tensor:
        """The mask of one new token per row, ready for every layer or (b, width) for transformers to build on."""
        span, columns = self.cache.span, self.cache.columns
        prepared = self.prepares_masks and (self.cache.window is None or self.cache.window >= columns)
        span.whole = prepared and self.cache.tight
        self._added[:, span.end] = 0
        if not prepared:
            return (self._added[:, span.first : span.end + 1] == 0).long()
        if span.whole:
            return self._added[:, None, None]
        return self._added[:, None, None, span.first : span.end + 1].contiguous()

    def _ended(self) -> Tensor:
        """(b,) bool."""
        rows = torch.arange(len(self.rows), device=self.device)
        ages = self.rows.ages[: len(self.rows)]
        self._stopped = self.stop.ended(self.rows.tokens, rows, ages)
        return self._stopped | (ages == self.max_new_tokens)

    def _leave(self, gone: list[int]) -> tuple[list[int], DecodedBatch]:
        """Takes finished rows out of the batch."""
        rows = self.rows
        numbers = [rows.numbers[row] for row in gone]
        index = torch.tensor(gone, device=self.device)
        ended = DecodedBatch(rows.tokens[index], rows.log_probs[index], rows.ages[index], self._stopped[index])
        movers, holes = rows.remove(gone)
        self.cache.move_rows(movers, holes, len(rows))
        if self.history is not None and holes:
            self.history[holes] = self.history[movers]
        self._see_starts()
        return numbers, ended

    def _see_starts(self) -> None:
        """What follows from the rows' first columns: the columns in use and the mask."""
        span, starts = self.cache.span, self.rows.starts
        span.first = min(starts, default=span.end)
        columns = torch.arange(self.cache.columns, device=self.device)
        hidden = columns < torch.tensor(starts, device=self.device).unsqueeze(1)
        hidden |= columns >= span.end
        added = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=self.device)
        self._added = added.masked_fill_(hidden, torch.finfo(added.dtype).min)  # (b, columns)
