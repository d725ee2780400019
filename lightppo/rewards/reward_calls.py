"""Calls of a reward function: how they ended, tries again, and answers joined to one."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, get_args

from lightppo.rewards.reward_source import RewardOutput
from lightppo.user_code import error_text

T = TypeVar("T")

OnFailure = Literal["error", "unscored"]


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call of a reward function."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """How a call ended: one try, or what :func:`settle` made of all tries."""

    value: Any = None  # after settle: of the last answer that could be read, even if only in part
    error: str | None = None  # why the last try gave no full answer
    # The exception. If the call was in another process, it is one that holds its trace.
    cause: BaseException | None = None
    timeouts: int = 0  # tries that ran past the time limit
    failures: int = 0  # tries without a full answer, time-outs included


@dataclass(frozen=True)
class RunnerRequest:
    """What an entry of ``lightppo.plugin.REWARD_MANAGERS`` makes a :class:`Runner` of."""

    fn: Callable[..., Any]
    name: str  # of the function, for messages
    # Where another process can load it from (path.py:name), if that is known.
    spec: str | None = None
    workers: int | None = None  # calls at a time; None: the runner's own number
    timeout: float | None = None  # wall-clock seconds of a call


class Runner(Protocol):
    """Makes the calls of a reward function; may have a ``close``."""

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """One outcome per call, in their order. What a call raises is in its outcome."""
        ...


def check_failure_options(
    on_reward_failure: str, reward_retries: int = 0, reward_timeout: float | None = None
) -> None:
    """Refuses values out of range, with a ``ValueError`` that names the flag."""
    if on_reward_failure not in get_args(OnFailure):
        raise ValueError(
            f"--on_reward_failure must be {' or '.join(get_args(OnFailure))}, got {on_reward_failure!r}"
        )
    if reward_retries < 0:
        raise ValueError(f"--reward_retries must be ≥ 0, got {reward_retries}")
    if reward_timeout is not None and not reward_timeout > 0:
        raise ValueError(f"--reward_timeout must be > 0 seconds, got {reward_timeout}")


def settle(
    run: Callable[[Sequence[Call]], list[Outcome]],
    calls: Sequence[Call],
    read: Callable[[int, Any], tuple[Any, str | None]],
    retries: int,
) -> list[Outcome]:
    """Runs calls, and runs those that failed again, up to ``retries`` times.

    ``read(position, value)`` gives the result, and why it is incomplete or ``None``.
    """
    settled = [Outcome() for _ in calls]
    pending = list(range(len(calls)))
    for _ in range(retries + 1):
        for i, outcome in zip(pending, run([calls[i] for i in pending]) if pending else []):
            state = settled[i]
            state.error, state.cause = outcome.error, outcome.cause
            if outcome.error is None:
                result, state.error = read(i, outcome.value)
                state.value = state.value if result is None else result
            state.failures += state.error is not None
            state.timeouts += outcome.timeouts
        pending = [i for i in pending if settled[i].error is not None]
    return settled


def join_outputs(outputs: Sequence[RewardOutput]) -> RewardOutput:
    """Joins answers about consecutive runs of samples, in order; ``None`` where an answer lacks a metric."""
    joined = RewardOutput([], {name: [] for output in outputs for name in output.metrics})
    joined.texts = {name: [] for output in outputs for name in output.texts}
    token_scores: list[list[float] | None] = []
    for output in outputs:
        missing: list[None] = [None] * len(output.scores)
        joined.scores += output.scores
        token_scores += missing if output.token_scores is None else output.token_scores
        for name, values in joined.metrics.items():
            values += output.metrics.get(name, missing)
        for name, texts in joined.texts.items():
            texts += output.texts.get(name, missing)
    if any(output.token_scores is not None for output in outputs):
        joined.token_scores = token_scores
    return joined


def in_daemon_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    """Calls a function in a thread of its own, which does not keep the program alive if the function hangs."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            # SystemExit of a user's function too: it would end this thread unseen
            future.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


def is_coroutine_function(fn: Callable[..., Any]) -> bool:
    """Whether a call gives what must be awaited, be it a function or an object with ``__call__``."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(fn, "__call__", None)  # noqa: B004
    )  # noqa: B004, RUF100


def awaited(value: Any) -> Any:
    """The value, awaited to its end if it is awaitable."""

    async def run() -> Any:
        return await value

    return asyncio.run(run()) if inspect.isawaitable(value) else value


def raised(error: BaseException) -> Outcome:
    """The outcome of a call that raised."""
    return Outcome(error=error_text(error), cause=error)
