"""Turns of conversations on :class:`~lightppo.rollout.hf.HFRolloutEngine`; a follow-up runs its new tokens alone.

A row that has ended stays in its slot as long as nobody needs the slot. Environments mostly answer sooner: then there
is nothing to copy, as the conversation has ended or goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PretrainedConfig

from lightppo.data.records import Rollout
from lightppo.rollout.decoding import REFILL_SHARE, CachedForward, Group, PromptQueue, SlotCache
from lightppo.rollout.engine import SamplingParams, Turn, TurnSource
from lightppo.rollout.hf import HFRolloutEngine, check_length
from lightppo.rollout.sampling import token_seeds

# steps that turns which come while others decode wait for further ones: they go through the model together
GATHER_STEPS = 4


def generate_turns(engine: HFRolloutEngine, turns: TurnSource, sampling: SamplingParams) -> None:
    """Sample turns until no more come; those that come take the slots of those that have ended.

    A turn's random numbers are those of its conversation's one stream, behind the tokens that were sampled before.

    Raises:
        ValueError: a turn has no tokens or too many for the model, or a stop id or bad word is unknown to it.
        FloatingPointError: as ``engine.generate``.
    """
    start = time.perf_counter()
    forward = CachedForward(engine.model)
    generated = 0
    with engine.decoding(forward, sampling) as decoder:
        queue = TurnQueue(forward, turns, sampling, engine.positions, decoder.device)
        for numbers, decoded in decoder.run(queue, queue.seeds):
            ended = [queue.turns[number] for number in numbers]
            samples = [(turn.prompt, turn.sample_index) for turn in ended]
            # Without texts: an episode decodes the ids of its turns itself.
            rollouts = engine.to_rollouts(samples, decoded, decoder.stop, with_text=False)
            for number, rollout in zip(numbers, rollouts):
                generated += len(rollout.response_ids)
                queue.end(number, rollout)
    engine.last_stats = {
        "generated_tokens": generated,
        "prompt_tokens": sum(len(turn.token_ids) for turn in queue.turns),
        "decode_steps": forward.calls,
        "decode_positions": forward.positions,
        "seconds": time.perf_counter() - start,
    }


class TurnQueue(PromptQueue):
    """Takes the turns of a source while others decode; the numbers of requests are places in ``turns``."""

    keeps_rows = True

    def __init__(
        self,
        forward: CachedForward,
        source: TurnSource,
        sampling: SamplingParams,
        positions: int | None,
        device: torch.device,
    ) -> None:
        """``positions``: the longest sequence that the model takes; None: any."""
        super().__init__(forward, [], sampling.max_new_tokens, device)
        self.prompt_columns = self.columns = source.longest
        self.turns: list[Turn] = []
        self._source = source
        self._seed = sampling.seed
        self._positions = positions
        self._more_come = True
        # By prompt and sample, the last turn of each conversation: its number, and the ids so far.
        self._last: dict[tuple[int, int], tuple[int, list[int]]] = {}
        self._follows: dict[int, int] = {}  # the turn that another one goes on from
        self._ended_rows = EndedRows(
            partial(free_bytes, device), lambda number: source.goes_on(self.turns[number])
        )
        self._gathers_since: int | None = (
            None  # calls of the model when the first turn began to wait
        )

    # -- turns -----------------------------------------------------------------------------------------------------

    def look(self, idle: bool) -> bool:
        came = self._source.take(idle and not self.waiting) if self._more_come else None
        self._more_come = came is not None
        if came:
            for number, turn in enumerate(came, start=len(self.turns)):
                self._begin(number, turn)
            self.turns += came
            self.add([turn.token_ids for turn in came])
        return self._more_come

    def _begin(self, number: int, turn: Turn) -> None:
        check_length(turn.prompt.index, len(turn.token_ids), turn.max_new_tokens, self._positions)
        key = (turn.prompt.index, turn.sample_index)
        before, ids = self._last.get(key, (-1, []))
        self._last[key] = number, turn.token_ids
        if turn.token_ids[: len(ids)] == ids:
            self._follows[number] = before
        else:  # it began anew
            self._ended_rows.remove(before)

    def end(self, number: int, rollout: Rollout) -> None:
        """Bring a turn and its tokens to the source."""
        turn = self.turns[number]
        self._last[turn.prompt.index, turn.sample_index] = (
            number,
            turn.token_ids + rollout.response_ids,
        )
        self._source.ended(turn, rollout)

    def seeds(self, numbers: list[int]) -> Tensor:
        """Return the seeds of turns' tokens, (B, max_new_tokens)."""
        table = np.ones((len(numbers), self.max_new_tokens), dtype=np.int64)
        for row, turn in zip(table, (self.turns[number] for number in numbers)):
            end = turn.sampled + turn.max_new_tokens
            key = (self._seed, turn.prompt.index, turn.sample_index)
            row[: turn.max_new_tokens] = token_seeds(*key, end)[turn.sampled :]
        return torch.from_numpy(table).to(self.device)

    def limits(self, numbers: list[int]) -> list[int]:
        return [self.turns[number].max_new_tokens for number in numbers]

    # -- slots -----------------------------------------------------------------------------------------------------

    def most_rows(self, running: int) -> int:
        return max(self._source.left, 1)

    def is_ready(self, free: int, slots: int) -> bool:
        if not self.at_hand and self._gathers(free, slots):
            return False
        return super().is_ready(free, slots)

    def _gathers(self, free: int, slots: int) -> bool:
        """Tell whether turns that came wait for others, while rows decode."""
        few = self.waiting < min(REFILL_SHARE * slots, free)
        if not (few and self.waiting and free < slots):
            self._gathers_since = None
            return False
        if self._gathers_since is None:
            self._gathers_since = self.forward.calls
        return self.forward.calls - self._gathers_since < GATHER_STEPS

    # -- what is known of a conversation ---------------------------------------------------------------------------

    def new_tokens(self, group: Group) -> int:
        ids, numbers = group
        return len(ids) - self._known(numbers[0])

    def _known(self, number: int) -> int:
        """Return tokens at the beginning of a turn whose keys and values are kept."""
        return self._ended_rows.length(self._follows.get(number, -1))

    def inputs(self, groups: list[Group]) -> tuple[Tensor, Tensor, Tensor, Cache]:
        first = [numbers[0] for _, numbers in groups]
        known = [self._known(number) for number in first]
        if any(known):
            prompts = [ids for ids, _ in groups]
            ids, mask, positions, used = new_tokens(prompts, known, self.device)
            past = [self._follows.get(number, -1) for number in first]
            inputs = ids, mask, positions, self._ended_rows.cache(self.forward.config, past, used)
        else:
            inputs = super().inputs(groups)
        for _, numbers in groups:
            for number in numbers:
                self._ended_rows.remove(self._follows.pop(number, -1))
        return inputs

    def keep(self, number: int, cache: SlotCache, slot: int, start: int, length: int) -> None:
        self._ended_rows.add(number, SlotRow(cache, slot, start, length))

    def give_way(self, slots: range) -> None:
        self._ended_rows.give_way(slots)


SHARE = 4  # copies take at most one such part of the memory that is free or theirs


@dataclass(frozen=True)
class SlotRow:
    """A row where it was decoded."""

    cache: SlotCache
    slot: int
    start: int  # its first column
    length: int  # tokens

    def states(self) -> list[Tensor]:
        """Return views of each layer's keys, then values, (heads, tokens, head width)."""
        columns = slice(self.start, self.start + self.length)
        layers = self.cache.layers
        return [buffer[self.slot, :, columns] for layer in layers for buffer in layer.buffers]


@dataclass(frozen=True)
class CopiedRow:
    """A row whose slot was needed."""

    tensors: list[Tensor]  # as of SlotRow.states
    length: int

    def states(self) -> list[Tensor]:
        return self.tensors


@dataclass
class EndedRows:
    """Rows that have ended, by their numbers. The oldest copies go when there is no room for more."""

    free: Callable[[], int]  # bytes of memory that nobody has now
    goes_on: Callable[[int], bool]  # whether a row may still be needed
    in_slots: dict[int, SlotRow] = field(default_factory=dict)
    copies: dict[int, CopiedRow] = field(default_factory=dict)
    bytes: int = 0  # of the copies

    def add(self, number: int, row: SlotRow) -> None:
        """Keep a row in its slot."""
        if self.goes_on(number):
            self.in_slots[number] = row

    def give_way(self, slots: range) -> None:
        """Copy what is still needed of these slots."""
        leaving = [number for number, row in self.in_slots.items() if row.slot in slots]
        rows = [self.in_slots.pop(number) for number in leaving]
        needed = [(number, row) for number, row in zip(leaving, rows) if self.goes_on(number)]
        if needed:
            for number in [number for number in self.copies if not self.goes_on(number)]:
                self.remove(number)
        for number, row in needed:
            self._copy(number, row)

    def _copy(self, number: int, row: SlotRow) -> None:
        states = row.states()
        size = _bytes(states)
        limit = (self.bytes + self.free()) // SHARE  # anew each time: the slots' cache grows
        while self.copies and self.bytes + size > limit:
            self.remove(next(iter(self.copies)))
        if size <= limit:
            self.copies[number] = CopiedRow([x.clone() for x in states], row.length)
            self.bytes += size

    def remove(self, number: int) -> None:
        """Forget a row, if there is one."""
        self.in_slots.pop(number, None)
        copy = self.copies.pop(number, None)
        if copy is not None:
            self.bytes -= _bytes(copy.tensors)

    def _find(self, number: int) -> SlotRow | CopiedRow | None:
        return self.in_slots.get(number) or self.copies.get(number)

    def length(self, number: int) -> int:
        """Return tokens of a row; 0 if there is none."""
        row = self._find(number)
        return row.length if row else 0

    def cache(
        self, config: PretrainedConfig, numbers: Sequence[int], used: list[int]
    ) -> DynamicCache:
        """Return a cache of the first ``used`` tokens of rows, zeros on the left of shorter ones."""
        cache = DynamicCache(config=config)
        past = [
            self._find(number).states() if count else [] for number, count in zip(numbers, used)
        ]
        width = max(used)
        for i in range(len(cache.layers) if width else 0):
            states = []
            for kind in range(2):  # keys, values
                some = next(row for row in past if row)[2 * i + kind]
                block = some.new_zeros(len(numbers), some.shape[0], width, some.shape[2])
                for b, (row, count) in enumerate(zip(past, used)):
                    if count:
                        block[b, :, width - count :] = row[2 * i + kind][:, :count]
                states.append(block)
            cache.update(*states, layer_idx=i)
        return cache


def _bytes(states: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in states)


def new_tokens(
    prompts: list[list[int]], known: list[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return what prompts run of which the first ``known`` tokens are known: equally many tokens each, so that no row has a
    hole between what is known and what is new.

    Returns:
        ids (P, M), 0 on the left of shorter prompts; the mask of known and new columns (P, W + M); positions (P, M);
        how many known tokens each uses, at most W.
    """
    new = max(len(prompt) - count for prompt, count in zip(prompts, known))  # M
    used = [max(0, len(prompt) - new) for prompt in prompts]
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    last = [torch.tensor(prompt[-new:]) for prompt in prompts]
    ids = torch.stack([pad(x, (new - len(x), 0)) for x in last]).to(device)
    total = max(used) + new
    columns = torch.arange(total, device=device)
    mask = (columns >= total - lengths).long()
    positions = (columns[-new:] - (total - lengths)).clamp_(min=0)
    return ids, mask, positions, used


def free_bytes(device: torch.device) -> int:
    """Memory that nobody has."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return psutil.virtual_memory().available
