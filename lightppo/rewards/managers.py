"""Who runs the calls of a reward function: this thread, a pool of threads, an event loop, or killable processes.

| manager | per-sample functions | functions of a batch |
|---|---|---|
| ``naive`` | one call per sample, in threads; coroutines in an event loop | – |
| ``batch`` | – | one call |
| ``prime`` | one call per sample in a killable process | one call in a killable process |
| ``auto`` | ``naive`` | ``batch`` |
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightppo.errors import RewardError
from lightppo.rewards.killable import KillablePool, default_processes
from lightppo.rewards.killable_worker import awaited
from lightppo.rewards.source import Call, Outcome, Runner

if TYPE_CHECKING:
    from lightppo.rewards.function import BoundFunction

ManagerName = Literal["auto", "naive", "batch", "prime"]

_THREADS = 16
_MAX_STUCK = 64  # threads given up on, before nothing more is started
_MAX_BLOCKED = 4  # event loops given up on
_LONG = 3600.0  # seconds; waits without a limit are made of these, so that signals get through


def build_runner(
    bound: BoundFunction,
    *,
    reward_manager: ManagerName = "auto",
    reward_workers: int | None = None,
    reward_timeout: float | None = None,
    spec: str | None = None,
) -> Runner:
    """Makes what runs the calls of a function.

    Args:
        bound: the function.
        reward_manager: see the table above.
        reward_workers: calls at a time. ``None``: 16 threads or coroutines, or as many processes as there are cores.
        reward_timeout: wall-clock limit of one call in seconds. A thread that exceeds it cannot be stopped, only left
            behind; a process is killed. ``prime`` must have one.
        spec: for ``prime``, where worker processes load the function from: ``path.py:name`` or ``module:name``.

    Raises:
        ValueError: the function does not suit the manager, or a number is out of range.
    """
    if reward_manager not in get_args(ManagerName):
        raise ValueError(f"--reward_manager must be one of {', '.join(get_args(ManagerName))}, got {reward_manager!r}")
    if reward_workers is not None and reward_workers < 1:
        raise ValueError(f"--reward_workers must be ≥ 1, got {reward_workers}")
    if reward_manager == "auto":
        reward_manager = "naive" if bound.per_sample else "batch"
    wrong = {"naive": not bound.per_sample, "batch": bound.per_sample}
    if wrong.get(reward_manager):
        kind = "one sample" if bound.per_sample else "a whole batch"
        raise ValueError(
            f"--reward_manager {reward_manager}: reward function {bound.name} takes {kind} ({bound.style.shape})"
        )
    if reward_manager == "prime":
        if reward_timeout is None:
            raise ValueError("--reward_manager prime needs --reward_timeout, the seconds after which a call is killed")
        workers = reward_workers or default_processes()
        return KillablePool(spec or function_spec(bound.fn, bound.name), workers=workers, timeout=reward_timeout).run
    runner = LoopRunner if bound.is_async else ThreadRunner
    return runner(bound.fn, reward_workers or _THREADS, reward_timeout).run


def function_spec(fn: Callable[..., Any], name: str) -> str:
    """How another process finds a function: ``path.py:name`` for one in a file of its own, else ``module:name``.

    Raises:
        ValueError: it cannot, as for a lambda, a nested function or one of the script itself.
    """
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    path = getattr(fn, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or getattr(module, path, None) is not fn:
        raise ValueError(
            f"--reward_manager prime: worker processes cannot find reward function {name}; it must be a function at "
            "the top level of a module or of a file of its own (--reward_fn path.py:name)"
        )
    from_file = module.__name__.startswith("lightppo_file_")
    return f"{module.__file__ if from_file else module.__name__}:{path}"


def call_here(fn: Callable[..., Any], call: Call) -> Outcome:
    """One call in this thread; an exception is an outcome too."""
    try:
        return Outcome(awaited(fn(*call.args, **call.kwargs)))
    except (Exception, SystemExit) as error:
        return Outcome(error=f"{type(error).__name__}: {error}", cause=error)


def _late(timeout: float) -> Outcome:
    return Outcome(error=f"no answer within {timeout:g} s", timed_out=True)


class ThreadRunner:
    """Runs calls in threads; a single call, or all with one worker, without a limit in the thread of the caller.

    Args:
        fn: what is called.
        workers: calls at a time.
        timeout: seconds for one call, from its start; what takes longer is left behind, and its answer not looked at.
    """

    def __init__(self, fn: Callable[..., Any], workers: int = 16, timeout: float | None = None) -> None:
        self.fn = fn
        self.workers = workers
        self.timeout = timeout
        self._stuck: list[threading.Thread] = []

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """One outcome per call, in their order.

        Raises:
            RewardError: too many calls of this and earlier batches still hang.
        """
        if self.timeout is None and (len(calls) <= 1 or self.workers == 1):
            return [call_here(self.fn, call) for call in calls]
        batch = _ThreadBatch(self.fn, calls)
        for _ in range(min(self.workers, len(calls))):
            batch.start_thread()
        while not batch.finished():
            for thread in batch.give_up_late(self.timeout):
                self._stuck = [t for t in self._stuck if t.is_alive()] + [thread]
                if len(self._stuck) > _MAX_STUCK:
                    raise RewardError(
                        f"{len(self._stuck)} calls of the reward function hang, longer than --reward_timeout "
                        f"{self.timeout:g}; --reward_manager prime can kill them"
                    )
                batch.start_thread()
        return batch.outcomes()


class _ThreadBatch:
    """The calls of one batch, and the threads that take them from a queue."""

    def __init__(self, fn: Callable[..., Any], calls: Sequence[Call]) -> None:
        self._fn = fn
        self._calls = calls
        self._results: list[Outcome | None] = [None] * len(calls)
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._running: dict[int, tuple[float, threading.Thread]] = {}
        self._changed = threading.Condition()
        for i in range(len(calls)):
            self._waiting.put(i)

    def start_thread(self) -> None:
        # daemon: one that hangs must not keep the program from ending
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            try:
                i = self._waiting.get_nowait()
            except queue.Empty:
                return
            with self._changed:
                self._running[i] = (time.monotonic(), me)
                self._changed.notify()
            outcome = call_here(self._fn, self._calls[i])
            with self._changed:
                if self._results[i] is not None:  # given up on; another thread has taken this one's place
                    return
                self._results[i] = outcome
                del self._running[i]
                self._changed.notify()

    def finished(self) -> bool:
        with self._changed:
            return all(result is not None for result in self._results)

    def give_up_late(self, timeout: float | None) -> list[threading.Thread]:
        """Waits until something changes or a call is late; returns the threads of calls that are."""
        with self._changed:
            if all(result is not None for result in self._results):
                return []
            started = min((start for start, _ in self._running.values()), default=time.monotonic())
            self._changed.wait(_LONG if timeout is None else max(started + timeout - time.monotonic(), 0.0))
            late = []
            for i, (start, thread) in list(self._running.items()):
                if timeout is not None and time.monotonic() >= start + timeout:
                    self._results[i] = _late(timeout)
                    del self._running[i]
                    late.append(thread)
            return late

    def outcomes(self) -> list[Outcome]:
        return [result for result in self._results if result is not None]


class LoopRunner:
    """Runs coroutine functions in one event loop, which lives as long as this object, in a thread of its own.

    Args:
        fn: the coroutine function.
        concurrency: calls at a time.
        timeout: seconds for one call; it is then cancelled, and not waited for.
        grace: seconds beyond the limits of its calls, after which the loop counts as blocked.
    """

    def __init__(
        self, fn: Callable[..., Any], concurrency: int = 16, timeout: float | None = None, *, grace: float = 10.0
    ) -> None:
        self.fn = fn
        self.concurrency = concurrency
        self.timeout = timeout
        self.grace = grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._blocked = 0

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """One outcome per call, in their order. Where the function blocks the loop, all that wait for it are late.

        Raises:
            RewardError: it has blocked too many loops.
        """
        if self._loop is None:
            if self._blocked > _MAX_BLOCKED:
                raise RewardError(
                    f"the reward function has blocked its event loop {self._blocked} times: it does something slow "
                    "without await; --reward_manager prime can kill it"
                )
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(self._gather(calls), self._loop)
        if self.timeout is None:
            return future.result()
        rounds = -(-len(calls) // self.concurrency)
        try:
            return future.result(rounds * self.timeout + self.grace)
        except TimeoutError:
            self._loop = None  # left behind with its thread
            self._blocked += 1
            return [_late(self.timeout) for _ in calls]

    async def _gather(self, calls: Sequence[Call]) -> list[Outcome]:
        slots = asyncio.Semaphore(self.concurrency)

        async def one(call: Call) -> Outcome:
            async with slots:
                return await self._one(call)

        return await asyncio.gather(*(one(call) for call in calls))

    async def _one(self, call: Call) -> Outcome:
        task = asyncio.ensure_future(self._guarded(call))
        # not wait_for: that waits until a cancelled coroutine has ended, which it may refuse to
        done, _ = await asyncio.wait({task}, timeout=self.timeout)
        if done:
            return task.result()
        task.cancel()
        assert self.timeout is not None
        return _late(self.timeout)

    async def _guarded(self, call: Call) -> Outcome:
        try:
            return Outcome(await self.fn(*call.args, **call.kwargs))
        except (Exception, SystemExit) as error:  # a SystemExit that leaves a task ends the loop
            return Outcome(error=f"{type(error).__name__}: {error}", cause=error)
