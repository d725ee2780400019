"""Calls of a user's function: what one call gets, and how it ended."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightppo.user_code import error_text

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UserCall:
    """Hold the arguments of one call of a function."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """Say how a call ended: one try, or all tries (:func:`lightppo.rewards.function.settle`)."""

    value: Any = None  # after settle: of the last answer that could be read, even if only in part
    error: str | None = None  # why the last try gave no full answer
    # The exception. If the call was in another process, it is one that holds its trace.
    cause: BaseException | None = None
    timeouts: int = 0  # tries that ran past the time limit
    failures: int = 0  # tries without a full answer, time-outs included


def late(timeout: float) -> Outcome:
    """Return the outcome of a call that ran past its limit."""
    return Outcome(error=f"no answer within {timeout:g} s", timeouts=1)


def raised(error: BaseException) -> Outcome:
    """Return the outcome of a call that raised."""
    return Outcome(error=error_text(error), cause=error)


def in_daemon_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in a thread of its own, which does not keep the program alive if the function hangs."""
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


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Tell whether a call gives what must be awaited, be it a function or an object with ``__call__``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )  # noqa: B004, RUF100


def importable_name(target: Any) -> str | None:
    """Return how another process finds a function or a class; None: it is not at the top level of a module."""
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    name = getattr(target, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not target:
        return None
    is_from_file = module.__name__.startswith("lightppo_file_")
    return f"{module.__file__ if is_from_file else module.__name__}:{name}"


def awaited(value: Any) -> Any:
    """Return the value, awaited to its end if it is awaitable."""

    async def run() -> Any:
        return await value

    if inspect.isawaitable(value):
        return asyncio.run(run())
    return value
