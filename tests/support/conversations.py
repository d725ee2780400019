"""Conversations for engines that sample turns, without environments: observations are made of what was sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightppo.data.records import Prompt, Rollout
from lightppo.rollout.engine import Turn

FIRST_TURN = 5  # most tokens of a turn
OBSERVATION = [4, 9, 17]  # and the last id that was sampled


@dataclass
class Conversation:
    """One sample of a prompt, with everything that was asked and answered."""

    prompt: Prompt
    sample_index: int
    turns_left: int
    ids: list[int] = field(default_factory=list)
    asked: list[Turn] = field(default_factory=list)
    answers: list[Rollout] = field(default_factory=list)

    def next_turn(self) -> Turn:
        sampled = sum(len(answer.response_ids) for answer in self.answers)
        number = len(self.answers)
        turn = Turn(
            self.prompt,
            self.sample_index,
            [*self.prompt.token_ids, *self.ids],
            max_new_tokens=FIRST_TURN + number % 2,
            number=number,
            sampled=sampled,
        )
        self.asked.append(turn)
        return turn

    def add(self, answer: Rollout) -> None:
        self.answers.append(answer)
        self.turns_left -= 1
        self.ids += [*answer.response_ids, *OBSERVATION, answer.response_ids[-1]]


class Conversations:
    """A :class:`lightppo.rollout.engine.TurnSource`; ``late`` turns come only at every third look."""

    def __init__(self, prompts: list[Prompt], turns: int, samples: int = 1, late: bool = False):
        self.all = [
            Conversation(prompt, i, turns_left=1 + (prompt.index + i) % turns)
            for prompt in prompts
            for i in range(samples)
        ]
        self.longest = max((len(one.prompt.token_ids) for one in self.all), default=1) + turns * 11
        self._late = late
        self._looks = 0
        self._ready = list(self.all)
        self._of_turn: dict[int, Conversation] = {}

    @property
    def left(self) -> int:
        return len(self._ready) + len(self._of_turn)

    def take(self, wait: bool) -> list[Turn] | None:
        self._looks += 1
        if not self._ready:
            return [] if self._of_turn else None
        if self._late and not wait and self._looks % 3:
            return []
        count = 2 if self._late else len(self._ready)
        ready, self._ready = self._ready[:count], self._ready[count:]
        turns = [one.next_turn() for one in ready]
        self._of_turn |= {id(turn): one for turn, one in zip(turns, ready)}
        return turns

    def ended(self, turn: Turn, rollout: Rollout) -> None:
        one = self._of_turn.pop(id(turn))
        one.add(rollout)
        if one.turns_left:
            self._ready.append(one)

    def goes_on(self, turn: Turn) -> bool:
        key = (turn.prompt.index, turn.sample_index)
        ones = [one for one in self.all if (one.prompt.index, one.sample_index) == key]
        return ones[0].turns_left > 0

    def ids(self) -> dict[tuple[int, int], list[int]]:
        return {(one.prompt.index, one.sample_index): one.ids for one in self.all}


class FixedTurns:
    """A source of these turns and no others."""

    def __init__(self, turns: list[Turn]):
        self.longest = max(len(turn.token_ids) + turn.max_new_tokens for turn in turns)
        self.answers: list[Rollout] = []
        self.left = len(turns)
        self._left: list[Turn] | None = turns

    def take(self, wait: bool) -> list[Turn] | None:
        taken, self._left = self._left, None
        return taken

    def ended(self, turn: Turn, rollout: Rollout) -> None:
        self.answers.append(rollout)

    def goes_on(self, turn: Turn) -> bool:
        return not turn.final


class InTurn(FixedTurns):
    """The same, each after the end of the one before."""

    def take(self, wait: bool) -> list[Turn] | None:
        if len(self.answers) < self._given:
            return []
        self._given += 1
        return [self._left.pop(0)] if self._left else None

    _given = 0
