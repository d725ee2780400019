"""Runs the calls of a reward function: in threads, an event loop or processes, and again where they failed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from lightppo.errors import RewardError
from lightppo.processes.user_calls import (
    Outcome,
    UserCall,
    awaited,
    importable_name,
    in_daemon_thread,
    is_coroutine_function,
    late,
    raised,
)
from lightppo.ranks import heartbeat
from lightppo.user_code import without_copies

_CALLS_AT_A_TIME = 16
_MAX_STUCK = 64  # abandoned threads at most
_MAX_BLOCKED = 4  # abandoned event loops at most


RewardManager = Literal["auto", "naive", "batch", "dapo", "prime"]
OnFailure = Literal["error", "unscored"]


class Runner(Protocol):
    """Make the calls of a reward function; may have a ``close``."""

    def run(self, calls: Sequence[UserCall]) -> list[Outcome]:
        """Return one outcome per call, in their order. What a call raises is in its outcome."""
        ...


def runner_of(
    manager: RewardManager,
    fn: Callable[..., Any],
    name: str,
    spec: str | None,
    workers: int | None,
    timeout: float | None,
) -> Runner:
    """Return processes for ``prime``, otherwise threads, or one event loop for a coroutine function.

    Args:
        name: of the function, for messages.
        spec: where another process can load it from (path.py:name), if that is known.
        workers: calls at a time; None: the runner's own number.
        timeout: wall-clock seconds of a call.
    """
    if manager != "prime":
        kind = LoopRunner if is_coroutine_function(fn) else ThreadRunner
        return kind(fn, workers or _CALLS_AT_A_TIME, timeout)
    from lightppo.processes.killable_pool import KillablePool

    if timeout is None:
        raise ValueError("--reward_manager prime kills a call at its limit: set --reward_timeout")
    return KillablePool(spec or function_spec(fn, name), workers=workers, timeout=timeout)


def function_spec(fn: Callable[..., Any], name: str) -> str:
    """Say how another process finds a function: ``path.py:name`` if it has its own file, else ``module:name``."""
    spec = importable_name(fn)
    if spec is None:
        raise ValueError(
            f"--reward_manager prime: worker processes cannot find reward function {name}; it must be a function at "
            "the top level of a module or of a file of its own (--reward_fn path.py:name)"
        )
    return spec


def check_failure_options(
    on_reward_failure: str, reward_retries: int = 0, reward_timeout: float | None = None
) -> None:
    """Refuse values out of range, with a ``ValueError`` that names the flag."""
    if on_reward_failure not in get_args(OnFailure):
        raise ValueError(
            f"--on_reward_failure must be {' or '.join(get_args(OnFailure))}, got {on_reward_failure!r}"
        )
    if reward_retries < 0:
        raise ValueError(f"--reward_retries must be ≥ 0, got {reward_retries}")
    if reward_timeout is not None and not reward_timeout > 0:
        raise ValueError(f"--reward_timeout must be > 0 seconds, got {reward_timeout}")


def settle(
    run: Callable[[Sequence[UserCall]], list[Outcome]],
    calls: Sequence[UserCall],
    read: Callable[[int, Any], tuple[Any, str | None]],
    retries: int,
) -> list[Outcome]:
    """Run calls, and run those that failed again, up to ``retries`` times.

    ``read(position, value)`` gives the result, and why it is incomplete or ``None``.
    """
    settled = [Outcome() for _ in calls]
    pending = list(range(len(calls)))
    for _ in range(retries + 1):
        for i, outcome in zip(pending, run([calls[i] for i in pending]) if pending else []):
            state = settled[i]
            state.error = outcome.error
            state.cause = outcome.cause
            if outcome.error is None:
                result, state.error = read(i, outcome.value)
                state.value = state.value if result is None else result
            state.failures += state.error is not None
            state.timeouts += outcome.timeouts
        pending = [i for i in pending if settled[i].error is not None]
    return settled


# by the present call
_timers_set: ContextVar[list[str] | None] = ContextVar("timers_set", default=None)


def _watch(name: str) -> None:
    """Have a function of ``signal`` tell that a call in a thread wanted a timer, also if the call hides the error."""
    real = getattr(signal, name)

    @functools.wraps(real)
    def watched(first: Any, *rest: Any) -> Any:
        timers = _timers_set.get()
        ours = timers is not None and (name != "signal" or first == signal.SIGALRM)
        if ours and threading.current_thread() is not threading.main_thread():
            timers.append(name)
            raise ValueError("signal only works in main thread of the main interpreter")
        return real(first, *rest)

    setattr(signal, name, watched)


# Here, as a file of the user that is loaded later may have ``from signal import alarm``. Outside of calls in threads
# nothing is changed.
for _name in ("signal", "alarm", "setitimer"):
    _watch(_name)


@contextlib.contextmanager
def _without_timers() -> Iterator[None]:
    """Raise :class:`RewardError` if what runs here wants a timer in a thread, as its answer may be 0 for that reason."""
    timers: list[str] = []
    token = _timers_set.set(timers)
    try:
        yield
    finally:
        _timers_set.reset(token)
    if timers:
        raise RewardError(
            "the reward function, or a library that it calls (math_verify does so), sets a time limit with "
            f"signal.{timers[0]}, which works in the main thread only. Set --reward_manager prime and --reward_timeout,"
            " or --reward_workers 1 without --reward_timeout and --async_rewards"
        )


@dataclass(eq=False)
class ThreadRunner:
    """Run calls in up to ``workers`` threads; a call that takes more than ``timeout`` seconds is left behind."""

    fn: Callable[..., Any]
    workers: int
    timeout: float | None = None

    def __post_init__(self) -> None:
        self._stuck: list[Future[Outcome]] = []

    def run(self, calls: Sequence[UserCall]) -> list[Outcome]:
        """Return one outcome per call, in order; raise :class:`RewardError` if too many calls hang."""
        if self.timeout is None and (len(calls) <= 1 or self.workers == 1):
            return [self._call(call) for call in calls]
        outcomes: dict[int, Outcome] = {}
        waiting = deque(range(len(calls)))
        running: dict[Future[Outcome], tuple[int, float]] = {}  # → position, start
        while len(outcomes) < len(calls):
            while waiting and len(running) < self.workers:
                i = waiting.popleft()
                running[in_daemon_thread(self._call, calls[i])] = (i, time.monotonic())
            patience = None
            if self.timeout is not None:
                patience = max(
                    next(iter(running.values()))[1] + self.timeout - time.monotonic(), 0.0
                )
            wait(running, patience, FIRST_COMPLETED)
            for future, (i, start) in list(running.items()):
                if future.done():
                    outcomes[i] = future.result()
                elif self.timeout is not None and time.monotonic() >= start + self.timeout:
                    outcomes[i] = late(self.timeout)
                    self._give_up(future)
                if i in outcomes:
                    del running[future]
        return [outcomes[i] for i in range(len(calls))]

    def _call(self, call: UserCall) -> Outcome:
        with without_copies("the reward function"), _without_timers():
            try:
                return Outcome(awaited(self.fn(*call.args, **call.kwargs)))
            except (Exception, SystemExit) as error:
                return raised(error)
            finally:
                heartbeat.beat()

    def _give_up(self, future: Future[Outcome]) -> None:
        self._stuck = [f for f in self._stuck if not f.done()] + [future]
        if len(self._stuck) > _MAX_STUCK:
            raise RewardError(
                f"{len(self._stuck)} calls of the reward function hang, longer than --reward_timeout "
                f"{self.timeout:g}; --reward_manager prime can kill them"
            )


@dataclass(eq=False)
class LoopRunner:
    """Run coroutine functions in one event loop, which lives in its own thread as long as this object."""

    fn: Callable[..., Any]
    concurrency: int
    timeout: float | None = None  # seconds after which a call is cancelled
    # Seconds after the last call should have ended, when the loop counts as blocked.
    grace: float = 10.0

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._blocked = 0

    def run(self, calls: Sequence[UserCall]) -> list[Outcome]:
        """Return one outcome per call, in order. If the function blocks the loop, all calls that wait for it are late."""
        if self._blocked > _MAX_BLOCKED:
            raise RewardError(
                f"the reward function has blocked its event loop {self._blocked} times: it does something slow "
                "without await; --reward_manager prime can kill it"
            )
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            in_daemon_thread(self._loop.run_forever)
        future = asyncio.run_coroutine_threadsafe(self._gather(calls), self._loop)
        if self.timeout is None:
            return future.result()
        rounds = -(-len(calls) // self.concurrency)
        try:
            return future.result(rounds * self.timeout + self.grace)
        except TimeoutError:
            self._loop = None  # left behind with its thread
            self._blocked += 1
            return [late(self.timeout) for _ in calls]

    async def _gather(self, calls: Sequence[UserCall]) -> list[Outcome]:
        slots = asyncio.Semaphore(self.concurrency)

        async def one(call: UserCall) -> Outcome:
            async with slots:
                task = asyncio.ensure_future(self._call(call))
                # Not wait_for, which waits until a cancelled coroutine has ended; a coroutine may refuse to.
                done, _ = await asyncio.wait({task}, timeout=self.timeout)
                if done or self.timeout is None:
                    return task.result()
                task.cancel()
                return late(self.timeout)

        return await asyncio.gather(*(one(call) for call in calls))

    async def _call(self, call: UserCall) -> Outcome:
        with without_copies("the reward function"), _without_timers():
            try:
                return Outcome(await self.fn(*call.args, **call.kwargs))
            except (Exception, SystemExit) as error:
                # A SystemExit that left a task would end the loop.
                return raised(error)
            finally:
                heartbeat.beat()
