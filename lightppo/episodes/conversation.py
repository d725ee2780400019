"""What an agent program asks the model, and how its requests follow from one another.

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
_SHOWN = 200  # characters of a message in an error


class History:
    """The conversation as both the program and the episode have it."""

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
        messages = [plain_message(message) for message in request["messages"]]
        if not messages:
            raise EnvFailure("the agent program's first request has no messages")
        if any("calls" in one or one["role"] == "tool" for one in messages):
            raise EnvFailure("the agent program's first request has calls of tools already")
        self._known = messages
        self._tools = list(request.get("tools") or [])
        return Opening([dict(one) for one in messages], self._tools)

    def said(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Return a turn of the model as the program gets it: each call has an id of its own, arguments are JSON."""
        message = dict(turn["message"])
        self._turns += 1
        calls = [
            {
                "id": f"call_{self._turns}_{i}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for i, call in enumerate(message.pop("tool_calls", ()))
        ]
        if calls:
            message["tool_calls"] = calls
        self._known.append(plain_message(message))
        self._calls = {call["id"]: call["function"]["name"] for call in calls}
        reason = "tool_calls" if calls else turn["finish_reason"]
        return {**turn, "message": message, "finish_reason": reason}

    def further(self, request: Request) -> list[Message]:
        """Return what a later request adds: answers to all calls of the last turn, in their order, and messages.

        Raises:
            EnvFailure: it does not go on from what was said.
        """
        messages = [plain_message(message) for message in request["messages"]]
        for i, known in enumerate(self._known):
            if i >= len(messages) or messages[i] != known:
                current = _shown(messages[i]) if i < len(messages) else "nothing"
                raise EnvFailure(
                    "the agent program changes what was said before, so its tokens cannot be trained: "
                    f"message {i} was {_shown(known)}, it is now {current}"
                )
        if list(request.get("tools") or []) != self._tools:
            raise EnvFailure("the agent program changes its tools between two requests")
        new = [dict(one) for one in messages[len(self._known) :]]
        self._known = messages
        if not new:
            raise EnvFailure("the agent program asks again, with nothing new behind the last turn")
        answered = [one.pop("answers", None) for one in new if one["role"] == "tool"]
        if answered != list(self._calls):
            raise EnvFailure(
                f"the agent program answers the calls {answered} of {list(self._calls)}: it must "
                "answer all of them, in their order"
            )
        names = iter(self._calls.values())
        return [one | {"name": next(names)} if one["role"] == "tool" else one for one in new]


class Conversation:
    """Requests on their way to the episode, and turns on their way back; one at a time.

    It is made in the event loop that waits for requests; the server asks in a thread of its own.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Queue[Request | BaseException | None] = asyncio.Queue()
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
                self._tell(request)
            elif self._request != request:  # the same again: a client whose patience was short
                problem = "the agent program asks twice at the same time; it must ask in turn"
                self._tell(EnvFailure(problem))
                raise EnvFailure(problem)
            answer = self._answer
        return await asyncio.shield(asyncio.wrap_future(answer))

    async def next(self) -> Request | None:
        """Return the next request; None: the program has ended. Raises what it raised."""
        came = await self._came.get()
        if isinstance(came, BaseException):
            raise came
        return came

    def answer(self, turn: dict[str, Any]) -> None:
        """Answer the request that waits."""
        with self._lock:
            self._request = None
            self._answer.set_result(turn)

    def end(self, why: str = HAS_ENDED) -> None:
        """Refuse the request that waits, and all later ones."""
        with self._lock:
            self._refusal = self._refusal or why
            if self._request is not None:
                self._request = None
                self._answer.set_exception(EnvFailure(self._refusal))

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """A failure is told to the program, too."""
        try:
            yield
        except EnvFailure as error:
            self.end(str(error))
            raise

    def program_ended(self, running: asyncio.Future[Any]) -> None:
        """A callback of the running program; in the loop."""
        if not running.cancelled():
            self._came.put_nowait(running.exception())

    def _tell(self, came: Request | BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._came.put_nowait, came)


def problem_of(request: Request) -> str:
    """Return what of a request cannot be read as a conversation; empty if all can."""
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        return "messages must be a list of messages, and not empty"
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"message {i} must be an object with a text as its role"
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        is_readable = content is None or isinstance(content, (str, list))
        if not is_readable or not all(isinstance(part, Mapping) for part in parts):
            return f"message {i}: its content must be a text or a list of objects"
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            return f"message {i}: tool_calls must be a list of objects with a function's name and arguments"
    tools = request.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return "tools must be a list of objects"
    return ""


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def plain_message(message: Mapping[str, Any]) -> Message:
    """Return role and text, calls as names and values, and the id that a tool's answer has; EnvFailure if it is no text."""
    plain: Message = {"role": message["role"], "content": _text_of(message)}
    if message["role"] == "assistant":
        plain["content"] = plain["content"].strip()  # templates and clients do not agree on it
        calls = [_call(one) for one in message.get("tool_calls") or ()]
        if calls:
            plain["calls"] = calls
    if message["role"] == "tool":
        plain["answers"] = message.get("tool_call_id")
    return plain


def _call(call: Mapping[str, Any]) -> tuple[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    try:
        return function["name"], json.loads(arguments)
    except (TypeError, ValueError):  # no text, or not JSON
        return function["name"], arguments


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if all(isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise EnvFailure(f"the agent program sends a message that is no text: {_shown(message)}")


def _shown(message: Mapping[str, Any]) -> str:
    return f"{message!r:.{_SHOWN}}"
