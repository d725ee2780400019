"""Environments in worker processes that are killed when they hang: ``--env_workers``."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightppo.episodes import env_failures
from lightppo.episodes.env_failures import Contract, Place
from lightppo.episodes.hosts import (
    Answers,
    Calls,
    Host,
    InThread,
    UserLoop,
    drive,
    in_loop,
    one_by_one,
)
from lightppo.episodes.specs import EnvironmentSpec, load_specs
from lightppo.errors import ConfigError
from lightppo.processes.fork_server import Answer, Respond, Worker, WorkerPool
from lightppo.user_code import error_text


def worker_pool(
    entries: Sequence[str], tools: Sequence[str], contract: Contract, size: int
) -> WorkerPool:
    """Return the worker processes of a run, one for each session at a time."""
    if sys.platform != "linux":
        raise ConfigError("--env_workers works on Linux only; set it to 0")
    settings = {"entries": list(entries), "tools": list(tools), "contract": contract}
    # What environments print is no output of the run.
    streams = {"stdout": 2}
    return WorkerPool(
        f"{__name__}:load", settings, size, subject="the environments", streams=streams
    )


class ProcessSeat:
    """A session's worker."""

    environment = None  # the object is in another process

    def __init__(self, spec: EnvironmentSpec, worker: Worker, pool: WorkerPool) -> None:
        self.is_lost = False
        self._spec = spec
        self._worker = worker
        self._pool = pool

    async def ask(self, place: Place, given: Mapping[str, Any], timeout: float) -> Answer:
        """As :class:`lightppo.episodes.hosts.Seat`."""
        try:
            question = pickle.dumps((self._spec.name, place, dict(given)))
        except Exception as error:  # whatever __reduce__ of a user's object raises
            text = f"the row cannot be sent to a worker process: {error_text(error)}"
            return {"kind": "exception", "text": text}
        try:
            return await self._worker.exchange(question, timeout)
        finally:
            self.is_lost = self._worker.is_ending

    async def ask_in_turn(self, calls: Calls, timeout: float) -> Answers:
        return await one_by_one(self, calls, timeout)

    def leave(self) -> None:
        """As :class:`lightppo.episodes.hosts.Seat`."""
        self._pool.give_back(self._worker)

    def drop(self) -> None:
        """As :class:`lightppo.episodes.hosts.Seat`."""
        self._worker.kill()
        self.leave()


def load(settings: Mapping[str, Any]) -> Callable[[], Respond]:
    """Load the environments in the server; return what makes a worker's hosts."""
    specs = load_specs(settings["entries"], settings["tools"], settings["contract"])
    return lambda: _Hosts(specs).respond


class _Hosts:
    """The environments of a worker: sync code in the main thread, async code in a loop."""

    def __init__(self, specs: Mapping[str, EnvironmentSpec]) -> None:
        env_failures.in_worker = True
        self.specs = specs
        self.hosts: dict[str, Host] = {}
        self.user_loop: UserLoop | None = None

    def respond(self, name: str, place: Place, arguments: Mapping[str, Any]) -> Answer:
        spec = self.specs[name]
        if place == "constructor" and not (name in self.hosts and self.hosts[name].is_reusable):
            invoke = in_loop if spec.is_async else InThread(self.loop)
            self.hosts[name] = Host(spec, invoke, own_process=True)
        coroutine = self.hosts[name].handle(place, arguments)
        answer = self.loop().submit(coroutine).result() if spec.is_async else drive(coroutine)
        if place == "close":
            self.hosts.pop(name)
        return answer

    def loop(self) -> UserLoop:
        """Return the loop, started at its first use."""
        self.user_loop = self.user_loop or UserLoop()
        return self.user_loop
