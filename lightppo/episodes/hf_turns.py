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
    start_time = time.perf_counter()
    forward = CachedForward(engine.model)
    generated_tokens = 0
    with engine.decoding(forward, sampling) as decoder:
        queue = TurnQueue(forward, turns, sampling, engine.positions, decoder.device)
        for numbers, decoded in decoder.run(queue, queue.seeds):
            ended_turns = [queue.turns[number] for number in numbers]
            samples = [(turn.prompt, turn.sample_index) for turn in ended_turns]
            # Without texts: an episode decodes the ids of its turns itself.
            rollouts = engine.to_rollouts(samples, decoded, decoder.stop, with_text=False)
            for number, rollout in zip(numbers, rollouts):
                generated_tokens += len(rollout.response_ids)
                queue.end(number, rollout)
    engine.last_stats = {
        "generated_tokens": generated_tokens,
        "prompt_tokens": sum(len(turn.token_ids) for turn in queue.turns),
        "decode_steps": forward.calls,
        "decode_positions": forward.positions,
        "seconds": time.perf_counter() - start_time,
    }


class TurnQueue(PromptQueue):
    """Take the turns of a source while others decode; the numbers of requests are places in ``turns``."""

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
            partial(free_bytes, device), lambda turn_number: source.goes_on(self.turns[turn_number])
        )
        # Calls of the model when the first turn began to wait.
        self._gathers_since: int | None = None

    # -- turns -----------------------------------------------------------------------------------------------------

    def look(self, idle: bool) -> bool:
        new_turns = self._source.take(idle and not self.waiting) if self._more_come else None
        self._more_come = new_turns is not None
        if new_turns:
            for turn_number, turn in enumerate(new_turns, start=len(self.turns)):
                self._begin(turn_number, turn)
            self.turns += new_turns
            self.add([turn.token_ids for turn in new_turns])
        return self._more_come

    def _begin(self, turn_number: int, turn: Turn) -> None:
        check_length(turn.prompt.index, len(turn.token_ids), turn.max_new_tokens, self._positions)
        conversation = (turn.prompt.index, turn.sample_index)
        previous_turn, previous_ids = self._last.get(conversation, (-1, []))
        self._last[conversation] = turn_number, turn.token_ids
        if turn.token_ids[: len(previous_ids)] == previous_ids:
            self._follows[turn_number] = previous_turn
        else:  # it began anew
            self._ended_rows.remove(previous_turn)

    def end(self, turn_number: int, rollout: Rollout) -> None:
        """Bring a turn and its tokens to the source."""
        turn = self.turns[turn_number]
        self._last[turn.prompt.index, turn.sample_index] = (
            turn_number,
            turn.token_ids + rollout.response_ids,
        )
        self._source.ended(turn, rollout)

    def seeds(self, numbers: list[int]) -> Tensor:
        """Return the seeds of turns' tokens, (B, max_new_tokens)."""
        seed_table = np.ones((len(numbers), self.max_new_tokens), dtype=np.int64)
        for turn_seeds, turn in zip(
            seed_table, (self.turns[turn_number] for turn_number in numbers)
        ):
            stream_end = turn.sampled + turn.max_new_tokens
            stream_key = (self._seed, turn.prompt.index, turn.sample_index)
            turn_seeds[: turn.max_new_tokens] = token_seeds(*stream_key, stream_end)[turn.sampled :]
        return torch.from_numpy(seed_table).to(self.device)

    def limits(self, numbers: list[int]) -> list[int]:
        return [self.turns[turn_number].max_new_tokens for turn_number in numbers]

    # -- slots -----------------------------------------------------------------------------------------------------

    def most_rows(self, running: int) -> int:
        return max(self._source.left, 1)

    def is_ready(self, free: int, slots: int) -> bool:
        if not self.at_hand and self._gathers(free, slots):
            return False
        return super().is_ready(free, slots)

    def _gathers(self, free: int, slots: int) -> bool:
        """Tell whether turns that came wait for others, while rows decode."""
        are_few = self.waiting < min(REFILL_SHARE * slots, free)
        if not (are_few and self.waiting and free < slots):
            self._gathers_since = None
            return False
        if self._gathers_since is None:
            self._gathers_since = self.forward.calls
        return self.forward.calls - self._gathers_since < GATHER_STEPS

    # -- what is known of a conversation ---------------------------------------------------------------------------

    def new_tokens(self, group: Group) -> int:
        ids, numbers = group
        return len(ids) - self._known(numbers[0])

    def _known(self, turn_number: int) -> int:
        """Return tokens at the beginning of a turn whose keys and values are kept."""
        return self._ended_rows.length(self._follows.get(turn_number, -1))

    def inputs(self, groups: list[Group]) -> tuple[Tensor, Tensor, Tensor, Cache]:
        first_numbers = [numbers[0] for _, numbers in groups]
        cached_lengths = [self._known(turn_number) for turn_number in first_numbers]
        if any(cached_lengths):
            prompts = [ids for ids, _ in groups]
            ids, mask, positions, used_lengths = new_tokens(prompts, cached_lengths, self.device)
            earlier_turns = [self._follows.get(turn_number, -1) for turn_number in first_numbers]
            inputs = (
                ids,
                mask,
                positions,
                self._ended_rows.cache(self.forward.config, earlier_turns, used_lengths),
            )
        else:
            inputs = super().inputs(groups)
        for _, numbers in groups:
            for turn_number in numbers:
                self._ended_rows.remove(self._follows.pop(turn_number, -1))
        return inputs

    def keep(self, turn_number: int, cache: SlotCache, slot: int, start: int, length: int) -> None:
        self._ended_rows.add(turn_number, SlotRow(cache, slot, start, length))

    def give_way(self, slots: range) -> None:
        self._ended_rows.give_way(slots)


SHARE = 4  # copies take at most one such part of the memory that is free or theirs


@dataclass(frozen=True)
class SlotRow:
    """Point to a row where it was decoded."""

    cache: SlotCache
    slot: int
    start: int  # its first column
    length: int  # tokens

    def states(self) -> list[Tensor]:
        """Return views of each layer's keys, then values, (heads, tokens, head width)."""
        columns = slice(self.start, self.start + self.length)
        layers = self.cache.layers
        return [buffer[self.slot, :, columns] for layer in layers for buffer in layer.buffers]


@dataclass
class EndedRows:
    """Keep rows that have ended, by their numbers. The oldest copies go when there is no room for more."""

    free: Callable[[], int]  # bytes of memory that nobody has now
    goes_on: Callable[[int], bool]  # whether a row may still be needed
    in_slots: dict[int, SlotRow] = field(default_factory=dict)
    copies: dict[int, list[Tensor]] = field(default_factory=dict)  # as of SlotRow.states
    bytes: int = 0  # of the copies

    def add(self, row_number: int, ended_row: SlotRow) -> None:
        """Keep a row in its slot."""
        if self.goes_on(row_number):
            self.in_slots[row_number] = ended_row

    def give_way(self, slots: range) -> None:
        """Copy what is still needed of these slots."""
        leaving = [number for number, row in self.in_slots.items() if row.slot in slots]
        leaving_rows = {number: self.in_slots.pop(number) for number in leaving}
        needed_rows = {number: row for number, row in leaving_rows.items() if self.goes_on(number)}
        if needed_rows:
            for number in [number for number in self.copies if not self.goes_on(number)]:
                self.remove(number)
        for number, row in needed_rows.items():
            self._copy(number, row)

    def _copy(self, row_number: int, slot_row: SlotRow) -> None:
        states = slot_row.states()
        byte_count = _bytes(states)
        byte_limit = (self.bytes + self.free()) // SHARE  # anew each time: the slots' cache grows
        while self.copies and self.bytes + byte_count > byte_limit:
            self.remove(next(iter(self.copies)))
        if byte_count <= byte_limit:
            self.copies[row_number] = [state.clone() for state in states]
            self.bytes += byte_count

    def remove(self, row_number: int) -> None:
        """Forget a row, if there is one."""
        self.in_slots.pop(row_number, None)
        self.bytes -= _bytes(self.copies.pop(row_number, []))

    def length(self, row_number: int) -> int:
        """Return tokens of a row; 0 if there is none."""
        if row_number in self.in_slots:
            return self.in_slots[row_number].length
        copied_states = self.copies.get(row_number)
        return copied_states[0].shape[1] if copied_states else 0

    def _states(self, row_number: int) -> list[Tensor]:
        if row_number in self.in_slots:
            return self.in_slots[row_number].states()
        return self.copies[row_number]

    def cache(
        self, config: PretrainedConfig, row_numbers: Sequence[int], used_lengths: list[int]
    ) -> DynamicCache:
        """Return a cache of the first ``used_lengths`` tokens of rows, zeros on the left of shorter ones."""
        cache = DynamicCache(config=config)
        row_states = [
            self._states(row_number) if used_length else []
            for row_number, used_length in zip(row_numbers, used_lengths)
        ]
        width = max(used_lengths)
        for layer_index in range(len(cache.layers) if width else 0):
            blocks = []
            for kind in range(2):  # keys, values
                state_index = 2 * layer_index + kind
                example = next(filter(None, row_states))[state_index]
                heads, _, head_width = example.shape
                block = example.new_zeros(len(row_numbers), heads, width, head_width)
                for i, (states, used_length) in enumerate(zip(row_states, used_lengths)):
                    if used_length:
                        block[i, :, width - used_length :] = states[state_index][:, :used_length]
                blocks.append(block)
            cache.update(*blocks, layer_idx=layer_index)
        return cache


def _bytes(states: Sequence[Tensor]) -> int:
    return sum(state.numel() * state.element_size() for state in states)


def new_tokens(
    prompts: list[list[int]], cached_lengths: list[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return what prompts run of which the first tokens are known: equally many tokens each, so that no row has a hole
    between what is known and what is new.

    Returns:
        ids (P, M), 0 on the left of shorter prompts; the mask of known and new columns (P, W + M); positions (P, M);
        how many known tokens each uses, at most W.
    """
    # M
    new_length = max(
        len(prompt) - cached_length for prompt, cached_length in zip(prompts, cached_lengths)
    )
    used_lengths = [max(0, len(prompt) - new_length) for prompt in prompts]
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    row_tokens = [torch.tensor(prompt[-new_length:]) for prompt in prompts]
    padded = [pad(tokens, (new_length - len(tokens), 0)) for tokens in row_tokens]
    ids = torch.stack(padded).to(device)
    total_columns = max(used_lengths) + new_length
    columns = torch.arange(total_columns, device=device)
    mask = (columns >= total_columns - lengths).long()
    positions = (columns[-new_length:] - (total_columns - lengths)).clamp_(min=0)
    return ids, mask, positions, used_lengths


def free_bytes(device: torch.device) -> int:
    """Return the memory that nobody has."""
    if device.type == "cuda":
        free_memory, _ = torch.cuda.mem_get_info(device)
        return (
            free_memory + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        )
    import psutil

    return psutil.virtual_memory().available
