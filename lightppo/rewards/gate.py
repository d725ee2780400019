"""Who may ask a server of ours, how much, for how long, and over how many connections: looked at before a body is read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


@dataclass(eq=False)
class Connections:
    """Those whose present request has not shown a key, of which the oldest gives way to a new one, and those of a key."""

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
            oldest = next(iter(self._strangers))
            self._open[oldest].transport.abort()
            self.leave(oldest)

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
        """After a request."""
        if connection.client not in self._keys:
            self.wait(connection)

    def leave(self, client: Any) -> None:
        """The connection has ended, or begins anew."""
        self._open.pop(client, None)
        self._keys.pop(client, None)
        if client in self._strangers:
            self._strangers.pop(client).cancel()

    def forget(self, key: str) -> None:
        """A key is not valid any more: its connections are strangers again. May be called in any thread."""
        for client, shown in list(self._keys.items()):
            connection = self._open.get(client)
            if shown == key and connection is not None:
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
    """Around an application: checks the key before anything is read, and length and time while the body is read."""

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
        read, ended, end = 0, False, time.monotonic() + seconds

        async def counted() -> _Message:
            nonlocal read, ended, refusal
            try:
                async with asyncio.timeout(None if ended else end - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                refusal = refusal or self.error(
                    408, f"the request did not end within {self.seconds:g} s"
                )
                raise ClientDisconnect from None
            read, ended = read + len(message.get("body", b"")), not message.get("more_body", False)
            if read > self.max_bytes:  # the client sent no content-length
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
        """Why a request is not read, if so."""
        headers = dict(scope["headers"])
        key = self.key_of(headers)
        if key is None:
            logger.warning("a request without a right key was refused")
            refusal = self.error(401, self.unknown)
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        if not self.connections.let_in(scope["client"], key):
            most = self.connections.most_per_key
            return self.error(429, f"more than {most} connections with one key")
        if int(headers.get(b"content-length", b"0")) > self.max_bytes:
            return self.error(413, self.too_long)
        return None
