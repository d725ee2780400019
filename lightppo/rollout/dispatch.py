"""Many requests over several servers: shared out by cost, taken over by the others when a server is lost.

Knows neither HTTP nor models.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Server = TypeVar("Server", bound=Hashable)
Result = TypeVar("Result")

_LOOK = 1.0  # seconds after which a wait looks again whether there is anything left to wait for


class ServerLostError(Exception):
    """A server gives no usable answers any more; the requests go to the others."""


class NoServerLeftError(Exception):
    """All servers are lost.

    Attributes:
        reasons: why, by server.
    """

    def __init__(self, reasons: dict) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


def shares(costs: Sequence[float], n_parts: int, first: int = 0) -> list[list[int]]:
    """Shares out items so that the parts cost nearly the same: the dearest first, each to the cheapest part so far.

    Args:
        costs: of each item.
        n_parts: number of parts.
        first: the part that is preferred among equals; callers that share alike prefer different ones.

    Returns:
        indices of the items of each part, dearest first.
    """
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    totals = [0.0] * n_parts
    preferred = [(first + k) % n_parts for k in range(n_parts)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        part = min(preferred, key=totals.__getitem__)
        parts[part].append(i)
        totals[part] += costs[i]
    return parts


class Dispatch(Generic[Server, Result]):
    """One batch of requests.

    Every server has its own share and is asked ``concurrency`` requests at a time. One with room for more takes over
    what others have not begun, and what a lost server leaves.

    Args:
        ask: asks a server for the answer to a request (by its index). Must return in bounded time. Raises
            ``ServerLostError`` where another server should be asked; every other exception ends the batch.
        servers: at least one.
        costs: of each request, in any unit.
        concurrency: requests in flight per server.
        first: see :func:`shares`.

    Attributes:
        lost: why servers were lost.
    """

    def __init__(
        self,
        ask: Callable[[Server, int], Result],
        servers: Sequence[Server],
        costs: Sequence[float],
        *,
        concurrency: int,
        first: int = 0,
    ) -> None:
        self.lost: dict[Server, str] = {}
        self._ask = ask
        self._costs = costs
        self._concurrency = concurrency
        self._shares = dict(zip(servers, map(deque, shares(costs, len(servers), first)), strict=True))
        self._orphans: deque[int] = deque()
        self._unanswered = len(costs)
        self._ended = False
        self._changed = threading.Condition()
        self._results: queue.Queue[tuple[Server, int, Result] | BaseException] = queue.Queue()

    def run(self) -> Iterator[tuple[Server, int, Result]]:
        """Yields (server, index, answer) as answers come, one per request.

        Raises:
            NoServerLeftError: all servers are lost.
            Exception: what ``ask`` raised.
        """
        # First requests are given out before any thread runs: the first server would take over from all others else.
        threads = [
            threading.Thread(
                target=self._serve, args=(server, share.popleft() if share else None), name="rollout", daemon=True
            )
            for server, share in self._shares.items()
            for _ in range(min(self._concurrency, self._unanswered))
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in range(len(self._costs)):
                item = self._next(threads)
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._end()

    def _next(self, threads: list[threading.Thread]) -> tuple[Server, int, Result] | BaseException:
        while True:
            alive = any(thread.is_alive() for thread in threads)
            try:
                return self._results.get(timeout=_LOOK if alive else 0)
            except queue.Empty:
                if not alive:
                    raise RuntimeError("requests were left without an answer") from None

    def _serve(self, server: Server, first: int | None) -> None:
        index = self._take(server) if first is None else first
        while index is not None:
            try:
                answer = self._ask(server, index)
            except ServerLostError as error:
                self._lose(server, index, str(error))
                return
            except BaseException as error:
                self._results.put(error)
                self._end()
                return
            self._results.put((server, index, answer))
            with self._changed:
                self._unanswered -= 1
                if self._unanswered == 0:
                    self._changed.notify_all()
            index = self._take(server)

    def _take(self, server: Server) -> int | None:
        """The next request for a server; waits while one may yet come back from another server."""
        with self._changed:
            while not (self._ended or server in self.lost or self._unanswered == 0):
                if self._shares[server]:
                    return self._shares[server].popleft()
                if self._orphans:
                    return self._orphans.popleft()
                fullest = max(self._shares.values(), key=lambda share: sum(self._costs[i] for i in share))
                if fullest:
                    return fullest.pop()
                self._changed.wait(_LOOK)
        return None

    def _lose(self, server: Server, index: int, reason: str) -> None:
        with self._changed:
            self.lost.setdefault(server, reason)
            self._orphans.append(index)
            self._orphans.extend(self._shares[server])
            self._shares[server].clear()
            if len(self.lost) == len(self._shares):
                self._results.put(NoServerLeftError(dict(self.lost)))
                self._ended = True
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
