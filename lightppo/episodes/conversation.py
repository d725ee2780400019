"""Requests of an agent program to the model, and how they follow from one another.

A program sends the whole conversation each time. :class:`History` finds what is new in a request, and
refuses one that does not go on from what was said. :class:`Conversation` brings requests from the
thread of the server to the episode, and answers back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from lightppo.episodes.env_failures import EnvFailure, Opening

Message = dict[str, Any]
Request = Mapping[str, Any]  # "messages" and "tools", as of OpenAI's chat completions
HAS_ENDED = "the episode has ended"
_MAX_EXAMPLE = 200  # characters of a message in an error


class History:
    """Hold the conversation as both the program and the episode have it."""

    def __init__(self) -> None:
        self._known: list[Message] = []
        self._tools: list[Any] = []
        self._calls: dict[str, str] = {}  # of the last turn: names by id
        self._turns = 0

    def first(self, request: Request) -> Opening:
        """Return the first request.

        Raises:
            EnvFailure: it has no messages, calls of tools among them, or something that is no text.
        """
        messages = list(map(plain_message, request["messages"]))
        if not messages:
            raise EnvFailure("the agent program's first request has no messages")
        if any("calls" in message or message["role"] == "tool" for message in messages):
            raise EnvFailure("the agent program's first request has calls of tools already")
        self._known = messages
        self._tools = list(request.get("tools") or [])
        return Opening(list(map(dict, messages)), self._tools)

    def add_turn(self, model_turn: Mapping[str, Any]) -> dict[str, Any]:
        """Return a turn of the model as the program gets it: each call has an id of its own, arguments are JSON."""
        message = dict(model_turn["message"])
        self._turns += 1
        tool_calls = [
            {
                "id": f"call_{self._turns}_{i}",
                "type": "function",
                "function": {
                    "name": tool_call["function"]["name"],
                    "arguments": json.dumps(tool_call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for i, tool_call in enumerate(message.pop("tool_calls", ()))
        ]
        if tool_calls:
            message["tool_calls"] = tool_calls
        self._known.append(plain_message(message))
        self._calls = {tool_call["id"]: tool_call["function"]["name"] for tool_call in tool_calls}
        finish_reason = "tool_calls" if tool_calls else model_turn["finish_reason"]
        return {**model_turn, "message": message, "finish_reason": finish_reason}

    def further(self, request: Request) -> list[Message]:
        """Return what a later request adds: answers to all calls of the last turn, in their order, and messages.

        Raises:
            EnvFailure: it does not go on from what was said.
        """
        messages = list(map(plain_message, request["messages"]))
        for i, earlier_message in enumerate(self._known):
            if i >= len(messages) or messages[i] != earlier_message:
                current_message = _example(messages[i]) if i < len(messages) else "nothing"
                raise EnvFailure(
                    "the agent program changes what was said before, so its tokens cannot be trained: "
                    f"message {i} was {_example(earlier_message)}, it is now {current_message}"
                )
        if list(request.get("tools") or []) != self._tools:
            raise EnvFailure("the agent program changes its tools between two requests")
        new_messages = list(map(dict, messages[len(self._known) :]))
        self._known = messages
        if not new_messages:
            raise EnvFailure("the agent program asks again, with nothing new behind the last turn")
        tool_messages = [message for message in new_messages if message["role"] == "tool"]
        answered_calls = [message.pop("answers", None) for message in tool_messages]
        if answered_calls != list(self._calls):
            raise EnvFailure(
                f"the agent program answers the calls {answered_calls} of {list(self._calls)}: it must "
                "answer all of them, in their order"
            )
        for message, name in zip(tool_messages, self._calls.values(), strict=True):
            message["name"] = name
        return new_messages


class Conversation:
    """Bring requests to the episode and turns back, one at a time.

    It is made in the event loop that waits for requests; the server asks in a thread of its own.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrivals: asyncio.Queue[Request | BaseException | None] = asyncio.Queue()
        self._lock = threading.Lock()
        self._request: Request | None = None  # that waits for its answer
        self._answer: Future[dict[str, Any]] = Future()
        self._refusal = ""

    async def ask(self, request: Request) -> dict[str, Any]:
        """Return what the model says; in the server's thread. EnvFailure: it is not asked any more."""
        with self._lock:
            if self._refusal:
                raise EnvFailure(self._refusal)
            if self._request is None:
                self._request = request
                self._answer = Future()
                self._send(request)
            elif self._request != request:  # the same again: a client whose patience was short
                problem = "the agent program asks twice at the same time; it must ask in turn"
                self._send(EnvFailure(problem))
                raise EnvFailure(problem)
            answer = self._answer
        return await asyncio.shield(asyncio.wrap_future(answer))

    async def next(self) -> Request | None:
        """Return the next request; None: the program has ended. Raises what it raised."""
        arrival = await self._arrivals.get()
        if isinstance(arrival, BaseException):
            raise arrival
        return arrival

    def answer(self, model_turn: dict[str, Any]) -> None:
        """Answer the request that waits."""
        with self._lock:
            self._request = None
            self._answer.set_result(model_turn)

    def end(self, reason: str = HAS_ENDED) -> None:
        """Refuse the request that waits, and all later ones."""
        with self._lock:
            self._refusal = self._refusal or reason
            if self._request is not None:
                self._request = None
                self._answer.set_exception(EnvFailure(self._refusal))

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Tell the program of a failure inside, too."""
        try:
            yield
        except EnvFailure as error:
            self.end(str(error))
            raise

    def program_ended(self, running_program: asyncio.Future[Any]) -> None:
        """Take note of the program's end; a callback, in the loop."""
        if not running_program.cancelled():
            self._arrivals.put_nowait(running_program.exception())

    def _send(self, arrival: Request | BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._arrivals.put_nowait, arrival)


def problem_of(request: Request) -> str:
    """Return what of a request cannot be read as a conversation; empty if all can."""
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        return "messages must be a list of messages, and not empty"
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"message {i} must be an object with a text as its role"
        content = message.get("content")
        content_parts = content if isinstance(content, list) else []
        is_readable = content is None or isinstance(content, (str, list))
        if not is_readable or not all(
            isinstance(content_part, Mapping) for content_part in content_parts
        ):
            return f"message {i}: its content must be a text or a list of objects"
        tool_calls = message.get("tool_calls") or []
        if not isinstance(tool_calls, list) or not all(map(_is_call, tool_calls)):
            return f"message {i}: tool_calls must be a list of objects with a function's name and arguments"
    tools = request.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return "tools must be a list of objects"
    return ""


def _is_call(tool_call: Any) -> bool:
    function = tool_call.get("function") if isinstance(tool_call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def plain_message(message: Mapping[str, Any]) -> Message:
    """Return role and text, calls as names and values, and the id that a tool's answer has; EnvFailure if it is no text."""
    plain_form: Message = {"role": message["role"], "content": _text_of(message)}
    if message["role"] == "assistant":
        # Templates and clients do not agree on white space around it.
        plain_form["content"] = plain_form["content"].strip()
        tool_calls = [_call(tool_call) for tool_call in message.get("tool_calls") or ()]
        if tool_calls:
            plain_form["calls"] = tool_calls
    if message["role"] == "tool":
        plain_form["answers"] = message.get("tool_call_id")
    return plain_form


def _call(tool_call: Mapping[str, Any]) -> tuple[str, Any]:
    function = tool_call["function"]
    arguments = function.get("arguments")
    try:
        return function["name"], json.loads(arguments)
    except (TypeError, ValueError):  # no text, or not JSON
        return function["name"], arguments


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if all(isinstance(content_part.get("text"), str) for content_part in content):
        return "".join(content_part["text"] for content_part in content)
    raise EnvFailure(f"the agent program sends a message that is no text: {_example(message)}")


def _example(message: Mapping[str, Any]) -> str:
    return f"{message!r:.{_MAX_EXAMPLE}}"
