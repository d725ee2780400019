"""The server that agent programs ask: openenv's ``harness/capture`` (0.10), with episodes for its engines.

It speaks the dialects of OpenAI, Anthropic and Google, streamed or not, on the loopback address, and
lets in a program by the key of its episode. Each process has one.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightppo.episodes.conversation import HAS_ENDED, Conversation, problem_of
from lightppo.episodes.env_failures import EnvFailure

MODEL = "policy"  # a program may ask for any other name, too
# of a request: what makes the model say something else than it would
_CONSTRAINTS = (
    "allowed_token_ids",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "logit_bias",
    "structured_outputs",
)
_KEY = re.compile(r"\bs[0-9a-f]{24}\b")
_END_SECONDS = 10.0
_MOST_BYTES = 16 << 20  # of a request
_REQUEST_SECONDS = 60.0  # until a request has come as a whole; its answer has all the time
_CONNECTIONS = 16  # of one episode
_STRANGERS = 100  # connections that have shown no key yet
_STRANGER_SECONDS = 10.0


class Door:
    """openenv's server in a thread."""

    def __init__(self) -> None:
        import uvicorn
        from openenv.core.harness.capture.server import UpstreamPool, create_app
        from openenv.core.harness.capture.sessions import Upstream, extract_api_key
        from openenv.core.harness.capture.upstream import UpstreamHTTPError

        from lightppo.rewards.reward_server import Connections, Gate, GatedConnection

        engines: dict[str, Engine] = {}

        class Engines(UpstreamPool):
            """The engine of a session is its episode."""

            async def resolve(self, upstream: Upstream) -> tuple[Engine, str]:
                return engines[upstream.llm_url], "tokens"

        self._engines = engines
        self._upstream = Upstream
        self._error = UpstreamHTTPError
        app = create_app(
            model=MODEL,
            capture_level="tokens",
            max_output_tokens=None,  # the run's options say it
            admin_key=secrets.token_urlsafe(),  # of the routes that list and read all sessions
        )
        app.state.inference = ServedModels()
        app.state.upstreams = Engines(default_client=app.state.inference, default_level="tokens")
        self.registry = app.state.registry
        self._connections = Connections(_STRANGERS, _STRANGER_SECONDS, _CONNECTIONS)
        app.add_middleware(Counting)
        app.add_middleware(
            Gate,
            connections=self._connections,
            key_of=partial(_key_of, self.registry, extract_api_key),
            unknown="no key of an episode that runs",
            max_bytes=_MOST_BYTES,
            too_long=f"the request is longer than {_MOST_BYTES >> 20} MiB",
            seconds=_REQUEST_SECONDS,
            error=_error,
        )
        logging.getLogger("intercept").addFilter(_worth_reading)  # openenv's
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        http = partial(GatedConnection, self._connections)
        config = uvicorn.Config(app, http=http, ws="none", log_level="warning")
        self._server = uvicorn.Server(config)
        serving = {"sockets": [listening]}
        self._thread = threading.Thread(
            target=self._server.run, kwargs=serving, name="agent door", daemon=True
        )
        self._thread.start()

    def open(self, conversation: Conversation) -> tuple[str, str]:
        """Return the address for one episode, and the key that says which one."""
        name = f"episode:{secrets.token_urlsafe()}"
        self._engines[name] = Engine(conversation, self._error)
        upstream = self._upstream(llm_url=name, model=MODEL)
        session = self.registry.create(purpose="train", upstream=upstream, capture_level="tokens")
        return self.url, session.session_id

    def close(self, key: str) -> None:
        """Let its key in no more. May be called in any thread, and again."""
        session = self.registry.get(key)
        if session is not None and self.registry.delete(key):
            del self._engines[session.upstream.llm_url]
            self._connections.forget(key)

    def end(self) -> None:
        """Stop the server."""
        self._server.should_exit = True
        self._thread.join(_END_SECONDS)


def _key_of(
    registry: Any, key_in: Callable[[dict[str, str]], str | None], headers: Mapping[bytes, bytes]
) -> str | None:
    """Return the key of an episode that a request shows, in whichever of the headers that openenv reads."""
    key = key_in(
        {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
    )
    return key if registry.get(key) is not None else None


def _error(status: int, message: str) -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse(_refusal(message), status)


def _worth_reading(record: logging.LogRecord) -> bool:
    """Return a filter: openenv names a session by its key, and a program often asks once more when its episode has ended."""
    record.msg = _KEY.sub("an episode", record.getMessage())
    record.args = ()
    return HAS_ENDED not in record.msg


class Counting:
    """Around openenv's routes that count tokens: they look at messages before anything has checked their form."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except (AttributeError, TypeError, KeyError, ValueError):
            # No other route: what fails there is a fault of ours.
            if not scope.get("path", "").endswith(("count_tokens", ":countTokens")):
                raise
            problem = "tokens cannot be counted: messages must be a list of messages"
            await _error(400, problem)(scope, receive, send)


class ServedModels:
    """For sessions without an engine, of which there are none; it names the model."""

    api_key = None
    param_fixes = ()

    async def list_models(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "owned_by": "lightppo"}],
        }


class Engine:
    """An episode, as openenv's server sees it: a client of an engine."""

    provider = "lightppo"
    served_model = MODEL

    def __init__(self, conversation: Conversation, error: type[Exception]) -> None:
        self._conversation = conversation
        self._error = error  # (status, body): what the server tells the program

    async def completion(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chat completion, with the token ids that the model read and said."""
        if constraint := constraint_of(request):
            raise self._error(400, _refusal(f"{constraint} cannot be trained: leave it out"))
        if problem := problem_of(request):
            raise self._error(400, _refusal(problem))
        query = {"messages": request["messages"], "tools": request.get("tools") or []}
        try:
            return completion_of(await self._conversation.ask(query))
        except EnvFailure as error:
            raise self._error(400, _refusal(str(error))) from error


def constraint_of(request: Mapping[str, Any]) -> str | None:
    """Return what of a request would have the model say something else than it would by itself."""
    constraint = next((name for name in _CONSTRAINTS if request.get(name)), None)
    if constraint is not None:
        return constraint
    form = request.get("response_format") or {"type": "text"}
    if not isinstance(form, Mapping) or form.get("type", "text") != "text":
        return "response_format"
    if request.get("tool_choice") not in (None, "auto"):
        return "tool_choice"
    return None


def completion_of(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn in OpenAI's form, with vLLM's fields for token ids."""
    prompt = len(turn["prompt_ids"])
    sampled = len(turn["ids"])
    choice = {
        "index": 0,
        "message": turn["message"],
        "finish_reason": turn["finish_reason"],
        "token_ids": turn["ids"],
        "logprobs": {
            "content": [
                {"token": f"token_id:{id}", "logprob": log_prob, "top_logprobs": []}
                for id, log_prob in zip(turn["ids"], turn["log_probs"], strict=True)
            ]
        },
    }
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "prompt_token_ids": turn["prompt_ids"],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        },
    }


def _refusal(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


_doors: dict[int, Door] = {}  # by process: a forked one has none
_opening = threading.Lock()


def the_door() -> Door:
    """Return the server of this process, opened when the first program needs it."""
    with _opening:
        if os.getpid() not in _doors:
            _doors[os.getpid()] = Door()
        return _doors[os.getpid()]
