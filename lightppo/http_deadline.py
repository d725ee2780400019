"""One deadline for a whole HTTP exchange made with requests.

requests' own time-outs start anew with every byte that arrives: a server that sends its headers one byte at a time, or
``100 Continue`` for ever, would never be left.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from http.client import HTTPConnection, HTTPResponse
from typing import TYPE_CHECKING, Any

from requests.adapters import HTTPAdapter

if TYPE_CHECKING:
    from urllib3 import HTTPConnectionPool, PoolManager

_deadline: ContextVar[float] = ContextVar("deadline")  # of the exchange that this thread is at


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End in time what is sent and read within, by sessions with a :class:`DeadlineAdapter`: else a TimeoutError."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def _limit(sock: socket.socket) -> None:
    """Let the next call of the socket take what is left of the time."""
    seconds_left = _deadline.get() - time.monotonic()
    if seconds_left <= 0:
        raise TimeoutError("the answer was not complete in time")
    sock.settimeout(seconds_left)


class _Reader(io.RawIOBase):
    """What a connection receives."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._sock = sock
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        _limit(self._sock)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    """Status line, headers and body, of interim answers and of a proxy too: all are read from ``fp``."""

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_Reader(sock, self.fp.detach()))


class _Connection(HTTPConnection):
    """A base beside urllib3's connections."""

    response_class = _Response

    def _new_conn(self) -> socket.socket:
        # A name's look-up has the resolver's limit, and each of its addresses the time-out for connecting.
        sock = super()._new_conn()
        try:
            _limit(sock)  # for the TLS handshake
        except TimeoutError:
            sock.close()
            raise
        return sock

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()
        _limit(self.sock)
        super().send(data)


@cache
def _limited(pool: type[HTTPConnectionPool]) -> type[HTTPConnectionPool]:
    connection = type("DeadlineConnection", (_Connection, pool.ConnectionCls), {})
    return type("DeadlinePool", (pool,), {"ConnectionCls": connection})


def _limit_pools(manager: PoolManager) -> PoolManager:
    pools = manager.pool_classes_by_scheme
    manager.pool_classes_by_scheme = {scheme: _limited(pool) for scheme, pool in pools.items()}
    return manager


class DeadlineAdapter(HTTPAdapter):
    """requests' adapter, with connections that look at :func:`deadline`; also through proxies."""

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        _limit_pools(self.poolmanager)

    def proxy_manager_for(self, proxy: str, **options: Any) -> PoolManager:
        has_manager = proxy in self.proxy_manager
        manager = super().proxy_manager_for(proxy, **options)
        return manager if has_manager else _limit_pools(manager)
