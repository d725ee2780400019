"""How an episode asks its environment and its engine: directly, or by way of the tape (``episodes``)."""

from __future__ import annotations

import array
import base64
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightppo.data.records import Rollout
from lightppo.episodes.env_failures import Contract, EnvironmentFailed, Place, Reply, Step
from lightppo.episodes.environments import Environments, routed
from lightppo.episodes.tape import END, Tape, digest_of
from lightppo.episodes.tape_files import Entry, TapeError, described
from lightppo.redaction import without_secrets
from lightppo.rollout.engine import Turn

_SLOW = 0.01  # seconds

Call = Callable[[], Awaitable[Any]]
Sample = Callable[[Turn], Awaitable[Rollout]]


class Direct:
    """Asks, and keeps nothing."""

    seconds = 0.0  # that the last call took
    tries: int | None = None  # how often the episode is tried; None: as the options say

    def begin_try(self, number: int) -> None:
        """Begin a try, counted from 0: the next calls are of it."""

    def end(self) -> None:
        """End the episode, well or not."""

    def flush(self) -> None:
        """Write what waits: nothing more comes."""

    async def ask(self, place: Place, turn: int, call: Call, **given: Any) -> Any:
        """Return what the environment answers to a call in a turn, from 1. EnvironmentFailed: it failed."""
        begin = time.monotonic()
        try:
            return await call()
        finally:
            self.seconds = time.monotonic() - begin

    async def sample(self, turn: Turn, sample: Sample) -> Rollout:
        """Return what the engine samples."""
        return await sample(turn)


class Recording(Direct):
    """Asks, and writes down what comes."""

    def __init__(self, episode_tape: EpisodeTape) -> None:
        self.episode_tape = episode_tape

    def begin_try(self, number: int) -> None:
        self.episode_tape.begin_try(number)

    def end(self) -> None:
        self.episode_tape.end()

    def flush(self) -> None:
        self.episode_tape.flush()

    async def ask(self, place: Place, turn: int, call: Call, **given: Any) -> Any:
        try:
            result = await super().ask(place, turn, call)
        except EnvironmentFailed as error:
            text = without_secrets(error.text)
            failure = {"kind": error.kind, "place": error.place, "text": text}
            self._write(place, turn, given, failure=failure)
            raise
        self._write(place, turn, given, reply=_plain(place, result))
        return result

    def _write(self, place: Place, turn: int, given: Mapping[str, Any], **answer: Any) -> None:
        self.episode_tape.write("call", turn, place=place, **given, **answer, seconds=self.seconds)

    async def sample(self, turn: Turn, sample: Sample) -> Rollout:
        rollout = await sample(turn)
        said = {"tokens": rollout.response_ids, "log_probs": packed(rollout.log_probs)}
        said |= {"finish": rollout.finish_reason, "context": digest_of(turn.token_ids)}
        self.episode_tape.write("turn", turn.number + 1, **said)
        return rollout


class Answered(Direct):
    """Neither the environment nor the engine is asked: the tape has what they said.

    What the run asks must be what was asked then; TapeError names the first call that is not.
    """

    def __init__(self, episode_tape: EpisodeTape) -> None:
        self.episode_tape = episode_tape
        self.tries = episode_tape.tries

    def begin_try(self, number: int) -> None:
        self.episode_tape.begin_try(number)

    async def ask(self, place: Place, turn: int, call: Call, **given: Any) -> Any:
        if place == "close" and not self.episode_tape.is_next(kind="call", place=place):
            return None  # the run broke the episode off, and an error is on its way
        entry = self.episode_tape.read("call", turn, place=place, **given)
        self.seconds = entry["seconds"]
        if "failure" in entry:
            raise EnvironmentFailed(**entry["failure"])
        return _restored(place, entry["reply"])

    async def sample(self, turn: Turn, sample: Sample) -> Rollout:
        context = digest_of(turn.token_ids)
        entry = self.episode_tape.read("turn", turn.number + 1, context=context)
        log_probs = unpacked(entry["log_probs"])
        place = (turn.prompt, turn.sample_index)
        return Rollout(*place, entry["tokens"], "", entry["finish"], log_probs)


def _plain(place: Place, result: Any) -> Any:
    """Return what a call gave, as plain values."""
    if place == "reset":
        names = ("name", "contract", "has_step", "has_reward", "opening", "is_agent")
        return {name: getattr(result, name) for name in names}
    if isinstance(result, Reply | Step):
        return asdict(result)
    return result


def _restored(place: Place, reply: Any) -> Any:
    """Invert :func:`_plain`."""
    if place == "reset":
        return AnsweredSession(**reply)
    kinds = {"tool": Reply, "step": Step}
    return kinds[place](**reply) if place in kinds else reply


@dataclass
class AnsweredSession:
    """What an episode reads of its session. Its calls never come: the tape answers them."""

    name: str
    contract: Contract
    has_step: bool
    has_reward: bool
    opening: Any
    environment: None = None
    is_agent: bool = False  # tapes from before there were agent programs do not say it

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        raise TapeError(f"the tool {name} is asked, and there is no environment")

    async def step(self, said: Any, *, then_reward: bool = False) -> Any:
        raise TapeError("step is asked, and there is no environment")

    async def get_reward(self) -> Any:
        raise TapeError("get_reward is asked, and there is no environment")

    async def close(self) -> None:
        """Do nothing: nothing is open."""


class AnsweredEnvironments:
    """What a tape knows of environments that may be gone, in place of :class:`Environments`."""

    timeout = 0.0  # seconds of a call: there are none

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.contract: Contract = description["contract"]
        self._tools: dict[str, list[dict[str, Any]]] = description["tools"]
        self._agents: list[str] = description.get("agents", [])

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    def tools(self, name: str) -> list[dict[str, Any]]:
        return self._tools[name]

    def is_agent(self, name: str) -> bool:
        return name in self._agents

    def route(self, row: Mapping[str, Any]) -> str:
        return routed(row, self.names, self.contract)

    async def open(self, row: Mapping[str, Any], *, seed: int) -> Any:
        raise TapeError("an environment is opened, and there is none")

    async def close(self) -> None:
        """Do nothing: nothing is open."""


def description_of(environments: Environments) -> dict[str, Any]:
    """Return what a tape keeps of environments, for :class:`AnsweredEnvironments`."""
    tools = {name: environments.tools(name) for name in environments.names}
    agents = [name for name in environments.names if environments.is_agent(name)]
    return {"contract": environments.contract, "tools": tools, "agents": agents}


# -- one sample's episode on the tape ------------------------------------------------------------------------------------


class EpisodeTape:
    """The entries of one episode, tried once or more often.

    Entries are written together at the end of a try, as an episode that breaks off is played again, and a write of each
    would cost more than all else. What took long to get, such as a reply of a paid service, is written at once.

    Args:
        key: batch, prompt and sample.
        sample_index: of the sample, as files of samples show it.
        may_answer: else a tape that does not play is written anew, whatever it has.
    """

    def __init__(
        self, tape: Tape, key: tuple[int, int, int], sample_index: int, may_answer: bool = True
    ) -> None:
        self.tape = tape
        self.key = key
        self.taken = tape.whole_take(key) if may_answer or tape.plays else None
        self.number = 0  # of the try
        self._next = 0  # entry
        self._waiting: list[Entry] = []  # to be written
        batch, prompt, sample = key
        self._place = {"batch": batch, "prompt": prompt, "sample": sample}
        self._place |= {"sample_index": sample_index, "take": tape.next_take(key)}

    @property
    def answers(self) -> bool:
        """Tell whether the entries answer; else they are written."""
        return self.taken is not None

    @property
    def tries(self) -> int | None:
        """Return how often the episode was tried; None: it was not ended."""
        ended = self.taken and self.taken[-1]["kind"] == END
        return self.taken[-1]["tries"] if ended else None

    def begin_try(self, number: int) -> None:
        """Begin a try, counted from 0: the next entries are of it."""
        self.number = number

    def write(self, kind: str, turn: int, **content: Any) -> None:
        """Add an entry; at once, if it took ``seconds``."""
        place = {**self._place, "try": self.number, "turn": turn}
        self._waiting.append({"kind": kind, **place, **content})
        if content.get("seconds", 0.0) >= _SLOW:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        waiting = self._waiting
        self._waiting = []
        if waiting:
            self.tape.write(*waiting)

    def end(self) -> None:
        """End the episode; from here on it answers as a whole."""
        if not self.answers:
            self._waiting.append({"kind": END, **self._place, "tries": self.number + 1})
            self.flush()

    def is_next(self, **content: Any) -> bool:
        """Tell whether the next entry is such a one."""
        following = self.taken[self._next] if self._next < len(self.taken) else {}
        return all(following.get(name) == value for name, value in content.items())

    def read(self, kind: str, turn: int, **content: Any) -> Entry:
        """Return the next entry, which must be of this kind, turn and content.

        Raises:
            TapeError: it is another one, or there is none.
        """
        requested = {**self._place, "try": self.number, "turn": turn, **content}
        if self._next >= len(self.taken):
            raise self.tape.lacks(described({"kind": kind, **requested}))
        entry = self.taken[self._next]
        wanted = {"kind": kind, "try": self.number, "turn": turn, **content}
        for name, value in wanted.items():
            if json.dumps(entry.get(name)) != json.dumps(value):  # NaN is equal to itself
                raise TapeError(
                    f"the tape goes another way than the run: it has {described(entry)}, with {name} "
                    f"{entry.get(name)!r}, and the run has {value!r} there"
                )
        self._next += 1
        self.tape.answered += 1
        return entry


def packed(numbers: Sequence[float]) -> Mapping[str, str]:
    """Return numbers as text, exactly: four bytes each where that is exact, else eight."""
    short = array.array("f", numbers)
    if short.tolist() == list(numbers):
        return {"float32": base64.b64encode(short).decode()}
    return {"float64": base64.b64encode(array.array("d", numbers)).decode()}


def unpacked(text: Mapping[str, str]) -> list[float]:
    """Invert :func:`packed`."""
    ((name, data),) = text.items()
    numbers = array.array({"float32": "f", "float64": "d"}[name])
    numbers.frombytes(base64.b64decode(data))
    return numbers.tolist()
