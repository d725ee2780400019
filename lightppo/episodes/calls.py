"""Calls of an episode to its environment and its engine: directly, or by way of the tape."""

from __future__ import annotations

import array
import base64
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightppo.data.records import Rollout
from lightppo.episodes.env_failures import CallKind, Contract, EnvironmentFailed, Reply, Step
from lightppo.episodes.environments import Environments, routed
from lightppo.episodes.tape import END, Tape, digest_of
from lightppo.episodes.tape_files import Entry, TapeError, described
from lightppo.redaction import without_secrets
from lightppo.rollout.engine import Turn

_SLOW = 0.01  # seconds

Call = Callable[[], Awaitable[Any]]
Sample = Callable[[Turn], Awaitable[Rollout]]


class Direct:
    """Ask the environment and the engine, and keep nothing."""

    seconds = 0.0  # that the last call took
    tries: int | None = None  # how often the episode is tried; None: as the options say

    def begin_try(self, try_number: int) -> None:
        """Begin a try, counted from 0: the next calls are of it."""

    def end(self) -> None:
        """End the episode, well or not."""

    def flush(self) -> None:
        """Write what waits: nothing more comes."""

    async def ask(self, call_kind: CallKind, turn: int, make_call: Call, **details: Any) -> Any:
        """Return what the environment answers to a call in a turn, from 1. EnvironmentFailed: it failed."""
        begin = time.monotonic()
        try:
            return await make_call()
        finally:
            self.seconds = time.monotonic() - begin

    async def sample(self, turn: Turn, sample: Sample) -> Rollout:
        """Return what the engine samples."""
        return await sample(turn)


def _plain(call_kind: CallKind, result: Any) -> Any:
    """Return what a call gave, as plain values."""
    if call_kind == "reset":
        session_fields = ("name", "contract", "has_step", "has_reward", "opening", "is_agent")
        return {field_name: getattr(result, field_name) for field_name in session_fields}
    if isinstance(result, Reply | Step):
        return asdict(result)
    return result


def _restored(call_kind: CallKind, reply: Any) -> Any:
    """Invert :func:`_plain`."""
    if call_kind == "reset":
        return AnsweredSession(**reply)
    result_types = {"tool": Reply, "step": Step}
    return result_types[call_kind](**reply) if call_kind in result_types else reply


@dataclass
class AnsweredSession:
    """Hold what an episode reads of its session. Its calls never come: the tape answers them."""

    name: str
    contract: Contract
    has_step: bool
    has_reward: bool
    opening: Any
    environment: None = None
    is_agent: bool = False  # tapes from before there were agent programs do not say it

    async def call(self, *_: Any, **__: Any) -> Any:
        raise TapeError("an environment is asked, and there is none")

    step = get_reward = call

    async def close(self) -> None:
        """Do nothing: nothing is open."""


class AnsweredEnvironments:
    """Stand in for :class:`Environments` that may be gone, with what a tape knows of them."""

    timeout = 0.0  # seconds of a call: there are none

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.contract: Contract = description["contract"]
        self._tools: dict[str, list[dict[str, Any]]] = description["tools"]
        self._agents: list[str] = description.get("agents", [])

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    def tools(self, environment_name: str) -> list[dict[str, Any]]:
        return self._tools[environment_name]

    def is_agent(self, environment_name: str) -> bool:
        return environment_name in self._agents

    def route(self, columns: Mapping[str, Any]) -> str:
        return routed(columns, self.names, self.contract)

    async def open(self, row: Mapping[str, Any], *, seed: int) -> Any:
        raise TapeError("an environment is opened, and there is none")

    async def close(self) -> None:
        """Do nothing: nothing is open."""


def description_of(environments: Environments) -> dict[str, Any]:
    """Return what a tape keeps of environments, for :class:`AnsweredEnvironments`."""
    tool_schemas = {name: environments.tools(name) for name in environments.names}
    agent_names = [name for name in environments.names if environments.is_agent(name)]
    return {"contract": environments.contract, "tools": tool_schemas, "agents": agent_names}


# -- one sample's episode on the tape ------------------------------------------------------------------------------------


class EpisodeTape(Direct):
    """Ask and write down what comes; or answer by what is written, without the environment and the engine.

    What the run asks must be what was asked then; TapeError names the first call that is not.

    Entries are written together at the end of a try, as an episode that breaks off is played again, and a write of each
    would cost more than all else. What took long to get, such as a reply of a paid service, is written at once.

    Args:
        episode_key: batch, prompt and sample.
        sample_index: of the sample, as files of samples show it.
        may_answer: else a tape that does not play is written anew, whatever it has.
    """

    def __init__(
        self,
        tape: Tape,
        episode_key: tuple[int, int, int],
        sample_index: int,
        may_answer: bool = True,
    ) -> None:
        self.tape = tape
        self.key = episode_key
        self.taken: list[Entry] | None = None
        if may_answer or tape.plays:
            self.taken = tape.whole_take(episode_key)
        if self.taken and self.taken[-1]["kind"] == END:
            self.tries = self.taken[-1]["tries"]
        self.number = 0  # of the try
        self._next = 0  # entry
        self._waiting: list[Entry] = []  # to be written
        batch, prompt_index, stream = episode_key
        self._place = {"batch": batch, "prompt": prompt_index, "sample": stream}
        self._place |= {"sample_index": sample_index, "take": tape.next_take(episode_key)}

    @property
    def answers(self) -> bool:
        """Tell whether the entries answer; else they are written."""
        return self.taken is not None

    def begin_try(self, try_number: int) -> None:
        self.number = try_number

    async def ask(self, call_kind: CallKind, turn: int, make_call: Call, **details: Any) -> Any:
        if self.answers:
            return self._answer(call_kind, turn, details)
        try:
            result = await super().ask(call_kind, turn, make_call)
        except EnvironmentFailed as error:
            text = without_secrets(error.text)
            details["failure"] = {"kind": error.kind, "place": error.place, "text": text}
            self.write("call", turn, place=call_kind, **details, seconds=self.seconds)
            raise
        details["reply"] = _plain(call_kind, result)
        self.write("call", turn, place=call_kind, **details, seconds=self.seconds)
        return result

    def _answer(self, call_kind: CallKind, turn: int, details: Mapping[str, Any]) -> Any:
        if call_kind == "close" and not self.is_next(kind="call", place=call_kind):
            return None  # the run broke the episode off, and an error is on its way
        entry = self.read("call", turn, place=call_kind, **details)
        self.seconds = entry["seconds"]
        if "failure" in entry:
            raise EnvironmentFailed(**entry["failure"])
        return _restored(call_kind, entry["reply"])

    async def sample(self, turn: Turn, sample: Sample) -> Rollout:
        context = digest_of(turn.token_ids)
        if self.answers:
            entry = self.read("turn", turn.number + 1, context=context)
            sampled = (entry["tokens"], "", entry["finish"], unpacked(entry["log_probs"]))
            return Rollout(turn.prompt, turn.sample_index, *sampled)
        rollout = await sample(turn)
        self.write(
            "turn",
            turn.number + 1,
            tokens=rollout.response_ids,
            log_probs=packed(rollout.log_probs),
            finish=rollout.finish_reason,
            context=context,
        )
        return rollout

    def write(self, kind: str, turn: int, **content: Any) -> None:
        """Add an entry; at once, if it took ``seconds``."""
        position = {**self._place, "try": self.number, "turn": turn}
        self._waiting.append({"kind": kind, **position, **content})
        if content.get("seconds", 0.0) >= _SLOW:
            self.flush()

    def flush(self) -> None:
        waiting_entries = self._waiting
        self._waiting = []
        if waiting_entries:
            self.tape.write(*waiting_entries)

    def end(self) -> None:
        if not self.answers:
            self._waiting.append({"kind": END, **self._place, "tries": self.number + 1})
            self.flush()

    def is_next(self, **content: Any) -> bool:
        """Tell whether the next entry is such a one."""
        next_entry = self.taken[self._next] if self._next < len(self.taken) else {}
        return content.items() <= next_entry.items()

    def read(self, kind: str, turn: int, **content: Any) -> Entry:
        """Return the next entry, which must be of this kind, turn and content.

        Raises:
            TapeError: it is another one, or there is none.
        """
        request = {**self._place, "try": self.number, "turn": turn, **content}
        if self._next >= len(self.taken):
            raise self.tape.lacks(described({"kind": kind, **request}))
        next_entry = self.taken[self._next]
        expected_fields = {"kind": kind, "try": self.number, "turn": turn, **content}
        for field_name, expected in expected_fields.items():
            # As JSON, NaN is equal to itself.
            if json.dumps(next_entry.get(field_name)) != json.dumps(expected):
                raise TapeError(
                    f"the tape goes another way than the run: it has {described(next_entry)}, with {field_name} "
                    f"{next_entry.get(field_name)!r}, and the run has {expected!r} there"
                )
        self._next += 1
        self.tape.answered += 1
        return next_entry


def packed(numbers: Sequence[float]) -> Mapping[str, str]:
    """Return numbers as text, exactly: four bytes each where that is exact, else eight."""
    float32_numbers = array.array("f", numbers)
    if float32_numbers.tolist() == list(numbers):
        return {"float32": base64.b64encode(float32_numbers).decode()}
    return {"float64": base64.b64encode(array.array("d", numbers)).decode()}


def unpacked(encoded: Mapping[str, str]) -> list[float]:
    """Invert :func:`packed`."""
    ((number_type, encoded_bytes),) = encoded.items()
    numbers = array.array({"float32": "f", "float64": "d"}[number_type])
    numbers.frombytes(base64.b64decode(encoded_bytes))
    return numbers.tolist()
