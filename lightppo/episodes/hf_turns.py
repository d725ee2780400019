"""Turns of conversations on :class:`~lightppo.rollout.hf.HFRolloutEngine`; a follow-up runs its new tokens alone."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from lightppo.data.records import Rollout
from lightppo.episodes.kv_reuse import KeptRows, SlotRow, free_bytes, new_tokens
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
        self._kept_rows = KeptRows(
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
            self._kept_rows.remove(before)

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
        return self._kept_rows.length(self._follows.get(number, -1))

    def inputs(self, groups: list[Group]) -> tuple[Tensor, Tensor, Tensor, Cache]:
        first = [numbers[0] for _, numbers in groups]
        known = [self._known(number) for number in first]
        if any(known):
            prompts = [ids for ids, _ in groups]
            ids, mask, positions, used = new_tokens(prompts, known, self.device)
            past = [self._follows.get(number, -1) for number in first]
            inputs = ids, mask, positions, self._kept_rows.cache(self.forward.config, past, used)
        else:
            inputs = super().inputs(groups)
        for _, numbers in groups:
            for number in numbers:
                self._kept_rows.remove(self._follows.pop(number, -1))
        return inputs

    def keep(self, number: int, cache: SlotCache, slot: int, start: int, length: int) -> None:
        self._kept_rows.add(number, SlotRow(cache, slot, start, length))

    def give_way(self, slots: range) -> None:
        self._kept_rows.give_way(slots)
