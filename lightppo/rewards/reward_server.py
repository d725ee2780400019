"""A reward source behind HTTP, for :class:`~lightppo.rewards.remote.RemoteReward`.

``POST /get_reward`` (or ``/``) scores samples; ``GET /health`` says that the server is up.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, JsonValue, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RewardError
from lightppo.http_client import check_bind, check_token, cleaned, secret_texts
from lightppo.rewards.reward_source import RewardSource, check_output, close_source
from lightppo.user_code import in_daemon_thread

logger = logging.getLogger(__name__)

_CLIENT_GONE = 499  # only for the log, as the client has left


class ScoreRequest(BaseModel):
    """Samples to score; every list has one entry per sample."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: list[str]  # prompt + response; begins with its prompt
    prompts: list[str]
    labels: list[JsonValue] | None = None  # ground truth; None: no sample has one

    @model_validator(mode="after")
    def _fit_together(self) -> ScoreRequest:
        list_lengths = [
            len(self.query),
            len(self.prompts),
            len(self.query if self.labels is None else self.labels),
        ]
        if len(set(list_lengths)) > 1:
            raise ValueError(
                f"query, prompts and labels must be of the same length, got {list_lengths}"
            )
        for i, (query, prompt) in enumerate(zip(self.query, self.prompts)):
            if not query.startswith(prompt):
                raise ValueError(f"query {i} does not begin with its prompt")
        return self

    def rollouts(self) -> list[Rollout]:
        """Return the samples for a source: without ids, and every response counts as finished."""
        labels = self.labels or [None] * len(self.query)
        return [
            Rollout(Prompt(prompt, [], label=label, index=i), 0, [], query[len(prompt) :], "stop")
            for i, (query, prompt, label) in enumerate(zip(self.query, self.prompts, labels))
        ]


@dataclass(eq=False, repr=False)
class RewardApp:
    """Answer requests with the scores of one source; ``app`` is the FastAPI application."""

    source: RewardSource  # gets samples with texts and labels, but without ids
    _: KW_ONLY
    token: str | None = None  # required as Authorization: Bearer …; None: everyone may ask
    max_samples: int = 4096  # of one request
    max_bytes: int = 64 << 20  # of one request
    # Requests that the source scores at a time; above 1 the source must be thread-safe. Others wait, and are not scored
    # if their client leaves meanwhile.
    max_concurrent: int = 1
    # connections that have not shown the token; the oldest gives way to a new one
    max_strangers: int = 100
    stranger_timeout: float = 10.0  # seconds for a connection to show the token
    body_timeout: float = 60.0  # seconds for the rest of a request

    def __post_init__(self) -> None:
        for limit_name in ("max_samples", "max_bytes", "max_concurrent", "max_strangers"):
            if getattr(self, limit_name) < 1:
                raise ValueError(
                    f"--{limit_name} must be at least 1, got {getattr(self, limit_name)}"
                )
        if self.token is not None:
            check_token(self.token, "token")
        self._secrets = secret_texts(self.token)
        self._turns = asyncio.Semaphore(self.max_concurrent)
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._lifespan)
        self.connections = Connections(self.max_strangers, self.stranger_timeout)
        self.app.add_middleware(
            Gate,
            connections=self.connections,
            key_of=self._key_of,
            unknown="the bearer token is missing or wrong",
            max_bytes=self.max_bytes,
            too_long=f"the request is longer than --max_bytes {self.max_bytes}",
            seconds=self.body_timeout,
            error=_error,
            open_paths=("/health",),
        )
        self.app.add_api_route("/health", self._health, methods=["GET"])
        for route in ("/", "/get_reward"):
            self.app.add_api_route(route, self._score, methods=["POST"], response_model=None)
        self.app.add_exception_handler(RequestValidationError, _explain_request)
        self.app.add_exception_handler(HTTPException, _explain_http)

    def _key_of(self, headers: Mapping[bytes, bytes]) -> str | None:
        if self.token is None:
            return ""
        authorization = headers.get(b"authorization", b"")
        if hmac.compare_digest(authorization, f"Bearer {self.token}".encode()):
            return ""
        return None

    async def _health(self) -> dict[str, str]:
        return {"status": "ok", "source": self.source.name}

    async def _score(self, score_request: ScoreRequest, request: Request) -> Response:
        sample_count = len(score_request.query)
        start_time = time.monotonic()
        if sample_count > self.max_samples:
            return _error(
                413, f"{sample_count} samples in one request; --max_samples is {self.max_samples}"
            )
        try:
            async with self._turns:
                if await request.is_disconnected():
                    logger.info("a client left before its %d samples were scored", sample_count)
                    return Response(status_code=_CLIENT_GONE)
                answer = await asyncio.wrap_future(in_daemon_thread(self._answer, score_request))
        except asyncio.CancelledError:  # the server ends and has waited long enough
            logger.error("%d samples not scored: the server was ended", sample_count)
            return _error(503, "the server was ended before the samples were scored")
        except RewardError as error:
            message = cleaned(str(error), self._secrets)
            logger.error("%d samples not scored: %s", sample_count, message)
            return _error(500, message)
        except Exception as error:
            traceback_text = "".join(traceback.format_exception(error))
            for secret in self._secrets:
                traceback_text = traceback_text.replace(secret, "***")
            logger.error("%d samples not scored:\n%s", sample_count, traceback_text)
            return _error(
                500,
                f"the reward source failed with {type(error).__name__}; the server's log says more",
            )
        logger.info("%d samples scored in %.2f s", sample_count, time.monotonic() - start_time)
        return JSONResponse(answer)

    def _answer(self, body: ScoreRequest) -> dict[str, Any]:
        rollouts = body.rollouts()
        source_name = self.source.name
        try:
            output = check_output(self.source.score(rollouts), rollouts, source_name)
        except Exception:
            raise
        except BaseException as error:
            # A user's function that calls sys.exit(), for example, must not end the server.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        if output.token_scores is not None:
            raise RewardError(
                f"{source_name}: token scores cannot be served, as requests have no token ids"
            )
        metrics = dict(output.metrics)
        optional_entries = {
            "scores": metrics.pop("score", None),
            "extra_logs": metrics | output.texts,
        }
        return {"rewards": output.scores} | {
            entry_name: entry for entry_name, entry in optional_entries.items() if entry
        }

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> Any:
        yield
        close_source(self.source)


def serve(
    reward_app: RewardApp,
    *,
    host: str = "127.0.0.1",
    port: int = 5000,
    shutdown_seconds: float = 10.0,
    started: Callable[[str], None] = print,
) -> None:
    """Serve until SIGTERM or SIGINT; requests in progress have ``shutdown_seconds`` to end.

    Args:
        host: where to listen; other than loopback only with a token.
        port: 0: any free port.
        started: gets the URL once the port is open.
    """
    check_bind(host, reward_app.token is not None)
    config = uvicorn.Config(
        reward_app.app,
        http=partial(GatedConnection, reward_app.connections),
        ws="none",
        access_log=False,  # it would show the query part of URLs
        server_header=False,
        log_config=None,
        timeout_graceful_shutdown=max(1, round(shutdown_seconds)),
    )
    address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(address_family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(config.backlog)
        url_host = f"[{host}]" if ":" in host else host
        started(f"http://{url_host}:{listener.getsockname()[1]}/get_reward")
        uvicorn.Server(config).run([listener])


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)


async def _explain_request(request: Request, error: Exception) -> JSONResponse:
    """Say what is wrong with a request without quoting it: it may be long, or not for the log."""
    assert isinstance(error, RequestValidationError)
    problems = [
        f"{'.'.join(map(str, problem['loc'][1:])) or 'body'}: {problem['msg']}"
        for problem in error.errors()[:3]
    ]
    if "application/json" not in request.headers.get("content-type", ""):
        problems = ["the request must be JSON, with Content-Type: application/json"]
    logger.warning("a request was refused: %s", "; ".join(problems))
    return _error(422, "; ".join(problems))


async def _explain_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    response = _error(error.status_code, str(error.detail))
    response.headers.update(error.headers or {})
    return response


# -- who may ask a server of ours, how much, for how long, over how many connections: looked at before a body is read ---

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


@dataclass(eq=False)
class Connections:
    """Count connections whose present request has not shown a key (a new one ends the oldest), and those of a key."""

    most_strangers: int
    seconds: float  # for a connection to show a key
    # Of one key, whose connections are not counted as strangers between requests. None: any number, and they are.
    most_per_key: int | None = None
    _open: dict[Any, H11Protocol] = field(default_factory=dict)  # by the client's address
    _strangers: dict[Any, asyncio.TimerHandle] = field(default_factory=dict)
    _keys: dict[Any, str] = field(default_factory=dict)

    def wait(self, connection: H11Protocol) -> None:
        """End the connection after some seconds, unless it is let in."""
        client = connection.client
        self.leave(client)
        self._open[client] = connection
        timer = connection.loop.call_later(self.seconds, connection.transport.abort)
        self._strangers[client] = timer
        if len(self._strangers) > self.most_strangers:
            oldest_client = next(iter(self._strangers))
            self._open[oldest_client].transport.abort()
            self.leave(oldest_client)

    def let_in(self, client: Any, key: str) -> bool:
        """Take a connection that has shown a key; False if the key has too many."""
        if client in self._strangers:
            self._strangers.pop(client).cancel()
        if self.most_per_key is None or self._keys.get(client) == key:
            return True
        if list(self._keys.values()).count(key) >= self.most_per_key:
            return False
        self._keys[client] = key
        return True

    def rest(self, connection: H11Protocol) -> None:
        """Note the end of a request."""
        if connection.client not in self._keys:
            self.wait(connection)

    def leave(self, client: Any) -> None:
        """Forget a connection that has ended, or begins anew."""
        self._open.pop(client, None)
        self._keys.pop(client, None)
        if client in self._strangers:
            self._strangers.pop(client).cancel()

    def forget(self, key: str) -> None:
        """Forget a key that is not valid any more: its connections are strangers again. May be called in any thread."""
        for client, connection_key in list(self._keys.items()):
            connection = self._open.get(client)
            if connection_key == key and connection is not None:
                with suppress(RuntimeError):  # the server has ended
                    connection.loop.call_soon_threadsafe(self._forget, client, key)

    def _forget(self, client: Any, key: str) -> None:
        if self._keys.get(client) == key:
            self.wait(self._open[client])


class GatedConnection(H11Protocol):
    """uvicorn's, which has neither a time limit nor a limit on number for requests that never end."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._connections.wait(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._connections.rest(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self.client)
        super().connection_lost(exc)


@dataclass(eq=False)
class Gate:
    """Stand around an application: check the key before anything is read, and length and time while the body is read."""

    app: Any
    connections: Connections
    key_of: Callable[[Mapping[bytes, bytes]], str | None]  # of headers; None: not let in
    unknown: str  # what to say then
    max_bytes: int
    too_long: str  # what to say of a longer request
    seconds: float  # for the whole request to come
    error: Callable[[int, str], JSONResponse]
    open_paths: Sequence[str] = ()  # that need no key

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.open_paths:
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        seconds = self.seconds if refusal is None else self.connections.seconds / 2
        received_bytes = 0
        has_ended = False
        deadline = time.monotonic() + seconds

        async def counted() -> _Message:
            nonlocal received_bytes, has_ended, refusal
            try:
                async with asyncio.timeout(None if has_ended else deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                refusal = refusal or self.error(
                    408, f"the request did not end within {self.seconds:g} s"
                )
                raise ClientDisconnect from None
            received_bytes = received_bytes + len(message.get("body", b""))
            has_ended = not message.get("more_body", False)
            if received_bytes > self.max_bytes:  # the client sent no content-length
                refusal = refusal or self.error(413, self.too_long)
                raise ClientDisconnect
            return message

        async def answer(message: _Message) -> None:
            if refusal is None:  # otherwise the application was cut off
                await send(message)

        if refusal is None:
            with suppress(ClientDisconnect):
                await self.app(scope, counted, answer)
        else:
            # a client that is cut off while it sends may never read the answer
            with suppress(ClientDisconnect):
                while (await counted()).get("more_body", False):
                    pass
        if refusal is not None:
            refusal.headers["Connection"] = "close"
            await refusal(scope, receive, send)

    def _refusal(self, scope: _Message) -> JSONResponse | None:
        """Return why a request is not read, if so."""
        headers = dict(scope["headers"])
        key = self.key_of(headers)
        if key is None:
            logger.warning("a request without a right key was refused")
            refusal = self.error(401, self.unknown)
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        if not self.connections.let_in(scope["client"], key):
            max_connections = self.connections.most_per_key
            return self.error(429, f"more than {max_connections} connections with one key")
        if int(headers.get(b"content-length", b"0")) > self.max_bytes:
            return self.error(413, self.too_long)
        return None
