"""Worker processes that call a function and can be killed: ``--reward_manager prime``, ``--reward_source math``."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lightppo.errors import RewardError
from lightppo.processes.fork_server import Answer, Respond, WorkerPool, default_processes
from lightppo.ranks import heartbeat
from lightppo.user_code import (
    Outcome,
    UserCall,
    awaited,
    in_daemon_thread,
    late,
    load_python_function,
    without_copies,
)

_QUESTION_TRIES = 3  # with workers that died before they had read it


@dataclass(eq=False)
class KillablePool:
    """Call one function in worker processes, with limits on wall-clock time and memory that no function can evade.

    A limit on processor time is for functions that we trust not to turn off ``signal.ITIMER_PROF``.
    """

    target: str  # package.module:function or path.py:function; may be a coroutine function
    _: KW_ONLY
    workers: int | None = None  # calls at a time; None: one per core of this rank
    timeout: float  # wall-clock seconds per call, from when a loaded worker gets it
    # Seconds of processor time per call; None: no limit. Unlike the wall clock, a busy machine does not reach it.
    cpu_seconds: float | None = None
    # a worker with more MiB of resident memory is killed; checked every 0.1 s
    memory_mb: int | None = None
    # modules that are imported before the first call, outside the time limit
    preload: Sequence[str] = ()
    quiet: bool = False  # discard what workers print

    def __post_init__(self) -> None:
        if self.workers is None:
            self.workers = default_processes()
        if self.workers < 1 or not self.timeout > 0:
            values = f"got {self.workers} and {self.timeout}"
            raise ValueError(f"--reward_workers must be ≥ 1 and --reward_timeout > 0, {values}")
        if self.cpu_seconds is not None and not self.cpu_seconds > 0:
            raise ValueError(f"--reward_timeout must be > 0, got {self.cpu_seconds}")
        settings = {
            **{"target": self.target, "preload": list(self.preload)},
            "cpu_seconds": self.cpu_seconds,
        }
        silence = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        self._pool = WorkerPool(
            f"{__name__}:load",
            settings,
            self.workers,
            subject=self.target,
            streams=silence if self.quiet else None,
            memory_mb=self.memory_mb,
        )

    def run(self, calls: Sequence[UserCall]) -> list[Outcome]:
        """Call the target with each of ``calls``; one outcome each, in order."""
        if not calls:
            return []
        try:
            questions = [pickle.dumps((call.args, call.kwargs)) for call in calls]
        except Exception as error:  # whatever __reduce__ of a user's object raises
            problem = f"{type(error).__name__}: {error}"
            raise RewardError(
                f"arguments of a reward call cannot be sent to a worker process: {problem}"
            ) from error

        async def ask_all() -> list[Outcome]:
            return await asyncio.gather(*map(self._call, questions))

        # In a thread, because an event loop may run in this one.
        return in_daemon_thread(lambda: asyncio.run(ask_all())).result()

    def close(self) -> None:
        """Kill the workers; running calls fail. May be called again."""
        self._pool.close()

    @property
    def process_ids(self) -> list[int]:
        """Return those of the workers that run."""
        return self._pool.process_ids

    async def _call(self, question: bytes) -> Outcome:
        for _ in range(_QUESTION_TRIES):
            worker = await self._pool.take()
            try:
                answer = await worker.exchange(question, self.timeout)
            finally:
                self._pool.give_back(worker)
            if not answer.get("unread"):
                break
        heartbeat.beat()
        if "value" in answer:
            return Outcome(answer["value"])
        if self._pool.is_closed:
            raise RewardError("the pool of worker processes is closed")
        if answer["kind"] == "timeout":
            return late(self.timeout)
        if self.cpu_seconds is not None and worker.exit_code == -signal.SIGPROF:
            limit_text = f"no answer within {self.cpu_seconds:g} s of processor time"
            return Outcome(error=limit_text, timeouts=1)
        cause = None
        if "trace" in answer:
            cause = RewardError(f"in a worker process:\n{answer['trace']}")
        return Outcome(error=answer["text"], cause=cause)


# --- in the server and its workers


def load(settings: Mapping[str, Any]) -> Callable[[], Respond]:
    """Load the target in the server; return what starts to answer in a worker."""
    for module_name in settings["preload"]:
        importlib.import_module(module_name)
    target = settings["target"]
    module_name, _, function_name = target.rpartition(":")
    if module_name.endswith(".py"):
        function = load_python_function(target, function_name)
    else:
        function = getattr(importlib.import_module(module_name), function_name)
    cpu_seconds = settings["cpu_seconds"]

    def respond(arguments: tuple[Any, ...], keyword_arguments: Mapping[str, Any]) -> Answer:
        if cpu_seconds is not None:
            # The kernel ends the process even in the midst of C code.
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            with without_copies("the reward function"):
                return {"value": awaited(function(*arguments, **keyword_arguments))}
        finally:
            if cpu_seconds is not None:
                signal.setitimer(signal.ITIMER_PROF, 0)

    return lambda: respond
