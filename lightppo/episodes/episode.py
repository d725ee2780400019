"""One episode: a coroutine that samples turns, calls an environment between them, and keeps every token id.

Ids are only ever added: those that the engine sampled are trained, all others are not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightppo.data.chat_templates import ids_behind
from lightppo.data.records import Prompt, Rollout
from lightppo.data.rows import template_options
from lightppo.episodes.calls import Call, Direct, Sample
from lightppo.episodes.chat_format import (
    AssistantTurn,
    ChatFormat,
    ChatFormats,
    ObservationError,
    text_of,
)
from lightppo.episodes.env_failures import CallKind, EnvironmentFailed
from lightppo.episodes.environments import Environments, Session, opening_messages
from lightppo.errors import RolloutError
from lightppo.rollout.engine import Turn

_NOT_EXECUTED = "Not executed: another call of this turn cannot be read."


class PlainText:
    """Write conversations without a template, as :class:`ChatFormat` does with one: texts follow as they are."""

    stop_ids = ()

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def ids_of(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the texts of messages behind others; what is written like a special token is text."""
        joined_text = "".join(text_of(message["content"]) for message in messages)
        encode_options = {"add_special_tokens": False, "split_special_tokens": True}

        def encode(texts: list[str]) -> list[list[int]]:
            return self.tokenizer(texts, **encode_options).input_ids

        if not joined_text:
            return []
        continuation_ids = ids_behind(joined_text, encode)
        return encode([joined_text])[0] if continuation_ids is None else continuation_ids

    def of_row(self, options: Mapping[str, Any]) -> PlainText:
        return self  # rows of plain text have none

    def harmless(self, text: str) -> tuple[str, int]:
        return text, 0

    def parse(self, ids: list[int], *, stopped: bool, prompt: list[int]) -> AssistantTurn:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return AssistantTurn(text=text, thinking=None, calls=(), complete=stopped)

    def closing(self, ids: list[int], *, stopped: bool, prompt: list[int]) -> list[int]:
        return []

    def continuation(self, turn: AssistantTurn, messages: list[dict[str, Any]]) -> list[int]:
        return self.ids_of(messages)

    def message(self, turn: AssistantTurn) -> dict[str, Any]:
        return {"role": "assistant", "content": turn.text}


Format = ChatFormat | PlainText


@dataclass(frozen=True)
class Limits:
    """Say where an episode ends, or a text is cut."""

    budget: int  # most tokens behind the opening, observations included
    max_opening: int  # most tokens of the opening
    max_turns: int | None = None
    max_turn_tokens: int | None = None
    max_tool_calls: int | None = None
    max_observation_len: int | None = None  # tokens
    seconds: float | None = None  # that the environment may take in all

    def turn_budget(self, used_tokens: int) -> int:
        """Return the most tokens of the next turn."""
        remaining = self.budget - used_tokens
        if self.max_turn_tokens is None:
            return remaining
        return min(remaining, self.max_turn_tokens)


@dataclass
class Transcript:
    """Hold what was said behind the opening."""

    ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    # For each turn: "end" (the place of its last sampled id), "reward", "calls", "errors", "seconds" (in the
    # environment).
    turns: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""  # of the last turn
    escapes: int = 0  # markers that were broken in observations

    @property
    def sampled(self) -> int:
        return sum(self.trained)

    def add_sampled(self, rollout: Rollout) -> None:
        """Add the ids of a turn, as the engine gave them."""
        self.ids += rollout.response_ids
        self.trained += [True] * len(rollout.response_ids)
        self.log_probs += rollout.log_probs
        last_position = len(self.ids) - 1
        self.turns.append(
            {"end": last_position, "reward": 0.0, "calls": 0, "errors": 0, "seconds": 0.0}
        )

    def add(self, token_ids: list[int]) -> None:
        """Add ids that nobody sampled."""
        self.ids += token_ids
        self.trained += [False] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)


@dataclass
class Episode:
    """Play one sample of a prompt."""

    prompt: Prompt
    sample_index: int
    stream: int  # number of the sample among those that share its random numbers' key
    seed: int  # of the environment: the same for all samples of the prompt
    format: Format | ChatFormats
    environments: Environments
    limits: Limits
    sample: Sample
    shortened: Callable[[str, int], str]  # a text of at most so many tokens
    keeps_rewards: bool = True  # asks the environment for rewards
    # Takes the session at the end and closes it later, so that reward functions may ask its object until then.
    keep_open: Callable[[Session], object] | None = None
    calls: Direct = field(default_factory=Direct)  # how it asks engine and environment

    async def play(self) -> Rollout:
        """Return the whole episode. EnvironmentFailed: its world failed."""
        self.transcript = Transcript()
        self.metrics = {}
        self.spent = 0.0
        open_session = partial(self.environments.open, row_of(self.prompt), seed=self.seed)
        session = await self._in_time("reset", open_session, seed=self.seed)
        try:
            opening = self._open(session)
            reason = None
            while reason is None:
                reason = await self._turn(session)
            if self.keeps_rewards:
                reward = await self._in_time("get_reward", session.get_reward)
                self.transcript.turns[-1]["reward"] += reward or 0.0
        except BaseException:
            await self._close(session)
            raise
        rollout = self._rollout(opening, reason)
        if self.keep_open is None:
            await self._close(session)
        else:
            rollout.environment = session.environment
            self.keep_open(session)
        return rollout

    async def _close(self, session: Session) -> None:
        await self.calls.ask("close", len(self.transcript.turns), session.close)

    def _open(self, session: Session) -> list[dict[str, Any]]:
        """Return the first messages: the row's, and what ``reset`` gave; ``self.opened`` is the prompt of them."""
        if session.is_agent:
            return self._open_agent(**session.opening)
        self.chat_format = self.format.of_row(template_options(self.prompt.extra))
        added_messages = session.opening
        if isinstance(added_messages, str):
            added_messages, escapes = self.chat_format.harmless(added_messages)
            self.transcript.escapes += escapes
        messages = opening_messages(
            messages_of(self.prompt), added_messages or None, session.contract
        )
        observed_count = len(added_messages) if isinstance(added_messages, list) else 0
        return self._opened(messages, observed_count, added_messages)

    def _open_agent(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the same of an agent program: what it asks first stands in place of the row's messages."""
        row_options = dict(template_options(self.prompt.extra))
        row_options.pop("tools", None)
        self.chat_format = self.format.of(tools, row_options)
        for message in messages:
            self.transcript.escapes += self.chat_format.harmless(message["content"])[1]
        return self._opened(messages, len(messages))

    def _opened(
        self, messages: list[dict[str, Any]], observed: int, added_messages: Any = None
    ) -> list[dict[str, Any]]:
        try:
            if isinstance(self.chat_format, PlainText):
                added_ids = self.chat_format.ids_of(as_messages(added_messages, "user"))
                token_ids = self.prompt.token_ids + added_ids
            else:
                token_ids = self.chat_format.opening(messages, observed=observed)
        except ObservationError as error:
            raise EnvironmentFailed("exception", "reset", f"the first messages: {error}") from error
        if len(token_ids) > self.limits.max_opening:
            raise RolloutError(
                f"prompt {self.prompt.index} has {len(token_ids)} tokens with what its environment adds (tools, reset): "
                f"raise --prompt_max_len, now {self.limits.max_opening}"
            )
        self.opened = replace(self.prompt, token_ids=token_ids, messages=messages)
        return messages

    async def _turn(self, session: Session) -> str | None:
        """Return one turn of the model and one of the environment; why the episode has ended, or None."""
        transcript = self.transcript
        prompt_ids = self.opened.token_ids + transcript.ids
        request = Turn(
            self.prompt,
            self.stream,
            prompt_ids,
            max_new_tokens=self.limits.turn_budget(len(transcript.ids)),
            number=len(transcript.turns),
            sampled=transcript.sampled,
            final=len(transcript.turns) + 1 == self.limits.max_turns,
        )
        sampled = await self.calls.sample(request, self.sample)
        transcript.add_sampled(sampled)
        stopped = sampled.finish_reason == "stop"
        turn = self.chat_format.parse(sampled.response_ids, stopped=stopped, prompt=prompt_ids)
        transcript.text = turn.text
        transcript.messages.append(self.chat_format.message(turn))
        if not stopped and len(transcript.ids) >= self.limits.budget:
            return "length"
        closing_ids = self.chat_format.closing(
            sampled.response_ids, stopped=stopped, prompt=prompt_ids
        )
        if session.is_agent:
            answer = self._answer_of_agent(session, turn, request, sampled)
        else:
            answer = self._answer(session, turn)
        answer_messages, end_reason = await answer
        return end_reason or self._go_on(turn, closing_ids, answer_messages)

    async def _answer(
        self, session: Session, turn: AssistantTurn
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return the environment's messages, and why the episode has ended, or None."""
        turn_record = self.transcript.turns[-1]
        if session.has_step:
            make_call = partial(session.step, turn.text, then_reward=self.keeps_rewards)
            step_answer = await self._in_time("step", make_call)
            turn_record["reward"] += step_answer.reward
            self._note(step_answer.metrics)
            messages = as_messages(step_answer.observation, "user")
            return messages, "done" if step_answer.done or not messages else None
        if not turn.calls:
            return [], "answer" if turn.complete or turn.text else "no call"
        messages = []
        end_reason = None
        for tool_call in turn.calls:
            turn_record["calls"] += 1
            if tool_call.problem is not None:
                turn_record["errors"] += 1
                messages.append(tool_message(tool_call, tool_call.problem))
                continue
            make_call = partial(session.call, tool_call.name, tool_call.arguments)
            reply = await self._in_time(
                "tool", make_call, tool=tool_call.name, arguments=tool_call.arguments
            )
            turn_record["errors"] += reply.error
            turn_record["reward"] += reply.reward
            self._note(reply.metrics)
            messages.append(tool_message(tool_call, reply.text))
            if reply.done:
                end_reason = "done"
        return messages, end_reason or self._too_many_calls()

    async def _answer_of_agent(
        self, session: Session, turn: AssistantTurn, request: Turn, sampled: Rollout
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return the same of an agent program: what its next request adds. It never sees a turn with an unreadable call."""
        turn_record = self.transcript.turns[-1]
        turn_record["calls"] = len(turn.calls)
        turn_record["errors"] = sum(tool_call.problem is not None for tool_call in turn.calls)
        if turn_record["errors"]:
            answers = [
                tool_message(tool_call, tool_call.problem or _NOT_EXECUTED)
                for tool_call in turn.calls
            ]
            return answers, self._too_many_calls()
        completion = {
            "message": self.transcript.messages[-1],
            "finish_reason": sampled.finish_reason,
            "prompt_ids": request.token_ids,
            "ids": sampled.response_ids,
            "log_probs": sampled.log_probs,
        }
        step_answer = await self._in_time("step", lambda: session.step(completion))
        turn_record["reward"] += step_answer.reward
        self._note(step_answer.metrics)
        messages = as_messages(step_answer.observation, "user")
        return messages, "done" if step_answer.done else self._too_many_calls()

    def _too_many_calls(self) -> str | None:
        limit = self.limits.max_tool_calls
        call_count = sum(turn_record["calls"] for turn_record in self.transcript.turns)
        if limit is not None and call_count >= limit:
            return "max_tool_calls"
        return None

    def _go_on(
        self, turn: AssistantTurn, closing_ids: list[int], answer_messages: list[dict[str, Any]]
    ) -> str | None:
        """Add what stands between this turn and the next; why there is no next one, or None."""
        transcript = self.transcript
        if self.limits.max_turns is not None and len(transcript.turns) >= self.limits.max_turns:
            return "max_turns"
        answer_messages = [self._shortened(message) for message in answer_messages]
        for message in answer_messages:
            transcript.escapes += self.chat_format.harmless(str(message["content"]))[1]
        try:
            added_ids = closing_ids + self.chat_format.continuation(turn, answer_messages)
        except ObservationError as error:
            raise EnvironmentFailed("exception", "step", f"an observation: {error}") from error
        if len(transcript.ids) + len(added_ids) >= self.limits.budget:
            return "length"  # no token could follow it
        transcript.add(added_ids)
        transcript.messages += answer_messages
        return None

    def _shortened(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an observation of at most ``max_observation_len`` tokens, with a mark where it was cut."""
        limit = self.limits.max_observation_len
        text = message["content"]
        if limit is None or not isinstance(text, str):
            return message
        return message | {"content": self.shortened(text, limit)}

    async def _in_time(self, call_kind: CallKind, make_call: Call, **details: Any) -> Any:
        """Return what the environment gives; its seconds are counted, and limited over the whole episode."""
        try:
            result = await self.calls.ask(
                call_kind, len(self.transcript.turns), make_call, **details
            )
        finally:
            self.spent += self.calls.seconds
            if self.transcript.turns:
                self.transcript.turns[-1]["seconds"] += self.calls.seconds
        if self.limits.seconds is not None and self.spent > self.limits.seconds:
            problem = f"the episode's environment took {self.spent:.1f} s, --episode_timeout is {self.limits.seconds:g}"
            raise EnvironmentFailed("timeout", call_kind, problem)
        return result

    def _note(self, metrics: Mapping[str, float]) -> None:
        for metric_name, value in metrics.items():
            self.metrics[metric_name] = self.metrics.get(metric_name, 0.0) + value

    def _rollout(self, opening: list[dict[str, Any]], reason: str) -> Rollout:
        transcript = self.transcript
        turn_records = self.transcript.turns
        extras = {
            "turns": float(len(turn_records)),
            "tool_calls": float(sum(turn_record["calls"] for turn_record in turn_records)),
            "tool_errors": float(sum(turn_record["errors"] for turn_record in turn_records)),
            "environment_seconds": self.spent,
            "observation_tokens": float(len(transcript.ids) - transcript.sampled),
            "escapes": float(transcript.escapes),
        }
        return Rollout(
            self.opened,
            self.sample_index,
            transcript.ids,
            transcript.text,
            "length" if reason == "length" else "stop",
            transcript.log_probs,
            trained=transcript.trained,
            messages=[*opening, *transcript.messages],
            turns=turn_records,
            extras=extras | self.metrics,
            texts={
                "stop_reason": reason,
                "conversation": as_text([*opening, *transcript.messages]),
            },
        )


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the columns that an environment gets."""
    opening = prompt.text if prompt.messages is None else prompt.messages
    return {"prompt": opening, "label": prompt.label} | prompt.extra


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """Return the row's messages; a prompt that is no chat is a message of the user."""
    if prompt.messages is not None:
        return [dict(message) for message in prompt.messages]
    if prompt.text:
        return [{"role": "user", "content": prompt.text}]
    return []


def as_messages(observation: str | list[dict[str, Any]] | None, role: str) -> list[dict[str, Any]]:
    """Return an observation as messages; none for None or an empty one."""
    if not observation:
        return []
    if isinstance(observation, str):
        return [{"role": role, "content": observation}]
    return [dict(message) for message in observation]


def as_text(messages: list[dict[str, Any]]) -> str:
    """Return a conversation for files of samples."""
    return json.dumps(messages, ensure_ascii=False, default=str)


def tool_message(tool_call: Any, text: str) -> dict[str, Any]:
    """Return a tool's answer."""
    return {"role": "tool", "name": tool_call.name, "content": text}
