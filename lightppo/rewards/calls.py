"""Calls of a reward function, one after the other; plugins bring threads, event loops and processes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightppo.ranks import heartbeat
from lightppo.rewards.source import Call, Outcome, RunnerRequest
from lightppo.user_code import error_text


@dataclass(eq=False)
class OneByOne:
    """Makes the calls in their order, in the thread that asks."""

    fn: Callable[..., Any]

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """One outcome per call, in their order."""
        return [self._call(call) for call in calls]

    def _call(self, call: Call) -> Outcome:
        try:
            return Outcome(awaited(self.fn(*call.args, **call.kwargs)))
        except (Exception, SystemExit) as error:
            return raised(error)
        finally:
            heartbeat.beat()


def one_by_one(request: RunnerRequest) -> OneByOne:
    """The runner of a function, without a limit for its time."""
    return OneByOne(request.fn)


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
