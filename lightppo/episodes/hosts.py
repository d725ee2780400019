"""Calls of the user's code: of one object, in a thread of its own or in the event loop of all async ones.

Worker processes (``workers.py``) run the same :class:`Host`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import logging
import queue
import random
import sys
import threading
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from typing import Any, Protocol

from lightppo.episodes.agents import AgentEnvironment
from lightppo.episodes.env_failures import (
    CallKind,
    EnvFailure,
    EnvironmentFailed,
    FailureKind,
    Opening,
    Reply,
    Step,
    ToolError,
)
from lightppo.episodes.specs import EnvironmentSpec
from lightppo.episodes.tools import BadCall, text_of
from lightppo.processes.fork_server import Answer, Once
from lightppo.redaction import plain, without_secrets
from lightppo.user_code import error_text, finite, without_copies

logger = logging.getLogger(__name__)

_PATIENCE = 1.0  # seconds until a loop that does not answer counts as blocked
_MAX_MESSAGE = 4000  # characters of a failure's text
Invoke = Callable[[Callable[[], Any]], Awaitable[Any]]


class UnusableResult(Exception):
    """Refuse a result that is not what the contract asks for."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Host:
    """Call one environment. Nothing that the user's code does leaves it but answers of plain data.

    ``invoke`` calls a function without arguments and gives its result, awaited if it must be.
    """

    def __init__(
        self, environment_spec: EnvironmentSpec, invoke: Invoke, *, own_process: bool
    ) -> None:
        self.spec = environment_spec
        self.environment: Any = None
        self._invoke = invoke
        self._own_process = own_process
        self._has_failed = False  # something failed, so the object is not used again

    async def handle(self, call_kind: CallKind, arguments: Mapping[str, Any]) -> Answer:
        """Return one call at one place."""
        try:
            return {"value": await getattr(self, f"_{call_kind}")(**arguments)}
        except EnvFailure as error:
            failure = ("failure", error_text(error))
        except UnusableResult as error:
            failure = (error.kind, str(error))
        except BaseException as error:  # SystemExit, too: it must not end the loop or the worker
            failure = ("exception", error_text(error))
        self._has_failed = True
        return {"kind": failure[0], "text": failure[1]}

    @property
    def is_reusable(self) -> bool:
        """Tell whether the object is reset again: in TRL's contract it is made once and reset often."""
        return self.spec.contract == "trl" and self.environment is not None and not self._has_failed

    async def _run(self, function: Callable[[], Any]) -> Any:
        """Return what a function of the user's gives; a process that it forks does not come back."""

        def call() -> Any:
            with without_copies(self.spec.where):
                result = function()
            if inspect.isawaitable(result):
                return awaited(result)
            return result

        async def awaited(result: Awaitable[Any]) -> Any:
            with without_copies(self.spec.where):
                return await result

        return await self._invoke(call)

    async def _constructor(self, seed: int) -> None:
        if self.is_reusable or self.spec.make is None:
            return
        self._seed(seed)
        self.environment = await self._run(self.spec.make)
        self._has_failed = False
        if self.spec.kind is None:
            self.spec.look_at(type(self.environment))

    async def _reset(self, columns: Mapping[str, Any], seed: int) -> Any:
        if self.spec.make is None:
            return None
        self._seed(seed)
        arguments = self.spec.reset_arguments(columns, seed)
        if not self._own_process:  # the other samples of the prompt have the same row
            arguments = {name: _copied(argument) for name, argument in arguments.items()}
        return self._opening(await self._run(partial(self.environment.reset, **arguments)))

    async def _tool(self, name: str, arguments: Any) -> dict[str, Any]:
        is_trl = self.spec.contract == "trl"
        try:
            tool = self.spec.tools.get(name)
            if tool is None:
                tool_names = ", ".join(self.spec.tools) or "none"
                raise BadCall(f"There is no tool {name!r}. Tools: {tool_names}.")
            is_method = name not in self.spec.functions
            function = getattr(self.environment, name) if is_method else tool.function
            # TRL hands arguments over as they are
            checked_arguments = dict(arguments) if is_trl else tool.check(arguments)
            result = await self._run(partial(function, **checked_arguments))
        except (BadCall, ToolError) as error:
            return self._refusal(error)
        except EnvFailure:
            raise
        except Exception as error:
            if is_trl:
                return self._refusal(error)
            raise
        if not isinstance(result, Reply):
            result = Reply(result)
        reply_text = text_of(result.text, as_trl=is_trl)
        return _checked_numbers(asdict_of(result) | {"text": reply_text}, "the tool's Reply")

    async def _step(self, model_turn: str | dict[str, Any]) -> dict[str, Any]:
        try:
            result = await self._run(partial(self.environment.step, model_turn))
        except ToolError as error:
            result = Step(str(error), metrics={"tool_error": 1.0})
        step = asdict_of(_as_step(result))
        step["observation"] = _checked_text(step["observation"], "an observation")
        return _checked_numbers(step, "the Step")

    async def _get_reward(self) -> float | None:
        reward = await self._run(self.environment.get_reward)
        if reward is None and self.spec.contract == "trl":  # not scored by the environment
            return None
        return _number(reward, "the reward")

    async def _close(self) -> None:
        await self._run(self.environment.close)

    def _refusal(self, error: Exception) -> dict[str, Any]:
        message = str(error)
        if self.spec.contract == "trl":
            message = str({"error": message})  # its words
        return asdict_of(Reply(message, error=True))

    def _opening(self, opening: Any) -> Any:
        if isinstance(opening, Opening):
            return asdict_of(opening)
        if self.spec.contract == "trl" and isinstance(opening, list):  # content parts
            other_parts = [
                content_part for content_part in opening if content_part.get("type") != "text"
            ]
            if other_parts:
                raise TypeError(
                    f"reset returned content that is not text: {other_parts[0].get('type')}"
                )
            return "".join(content_part["text"] for content_part in opening)
        return _checked_text(opening, "reset")

    def _seed(self, seed: int) -> None:
        """Global generators belong to all in a process of several environments."""
        if not self._own_process:
            return
        random.seed(seed)
        numpy_module = sys.modules.get("numpy")
        if numpy_module is not None:
            numpy_module.random.seed(seed % 2**32)


def _copied(argument: Any) -> Any:
    try:
        return copy.deepcopy(argument)
    except Exception:  # what cannot be copied is shared
        return argument


def asdict_of(result: Reply | Step | Opening) -> dict[str, Any]:
    """Return the fields, not copied."""
    return {field.name: getattr(result, field.name) for field in fields(result)}


def _as_step(result: Any) -> Step:
    """Return a step of any form: ours, an observation, or a tuple as gymnasium and others have it."""
    if isinstance(result, Step):
        return result
    if isinstance(result, tuple) and len(result) == 5:
        observation, reward, terminated, truncated, info = result
        return Step(observation, reward, bool(terminated or truncated), _numbers_of(info))
    if isinstance(result, tuple) and 1 <= len(result) <= 4:
        step = Step(*result[:3])
        step.metrics = _numbers_of(result[3]) if len(result) == 4 else {}
        return step
    if result is None or isinstance(result, (str, list)):
        return Step(result)
    raise TypeError(
        f"step must return a Step, a text or (observation, reward, done, metrics), got {type(result).__name__}"
    )


def _numbers_of(info: Any) -> dict[str, float]:
    """Return the numbers of ``info``, which holds whatever an environment tells."""
    if not isinstance(info, Mapping):
        return {}
    return {
        str(metric_name): number
        for metric_name, metric_value in info.items()
        if (number := finite(metric_value)) is not None
    }


def _number(raw_number: Any, subject: str) -> float:
    number = finite(raw_number)
    if number is None:
        raise UnusableResult(
            "not_finite", f"{subject} is no finite number: {plain(repr(raw_number)[:200])}"
        )
    return number


def _checked_numbers(answer: dict[str, Any], subject: str) -> dict[str, Any]:
    answer["reward"] = _number(answer["reward"], f"reward of {subject}")
    answer["done"] = bool(answer["done"])
    metrics = answer["metrics"] or {}
    answer["metrics"] = {
        str(metric_name): _number(metric_value, f"metric {metric_name} of {subject}")
        for metric_name, metric_value in metrics.items()
    }
    return answer


def _checked_text(content: Any, source: str) -> str | list[dict[str, Any]] | None:
    """Return a text, chat messages or nothing."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), (str, list))
        for message in content
    ):
        return [dict(message) for message in content]
    raise TypeError(
        f"{source} must be a text, a list of messages with role and content, or None, got {type(content).__name__}"
    )


def failure_of(
    environment_spec: EnvironmentSpec, call_kind: CallKind, answer: Answer, detail: str = ""
) -> Exception:
    """Return what a session raises for an answer that is a failure."""
    message = without_secrets(
        plain(f"{environment_spec.where}: {call_kind}{detail and f' {detail}'}: {answer['text']}")
    )
    return EnvironmentFailed(answer["kind"], call_kind, message[:_MAX_MESSAGE])


# --- threads and event loops


class CallThread:
    """Make one call after the other in a thread, so that a session's objects stay in their thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, so that a call that hangs does not keep the program alive.
        self._thread = threading.Thread(target=self._work, name="environment", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Call a function; it must not raise."""
        future: Future[Any] = Future()

        def job() -> None:
            result = function()
            with contextlib.suppress(Exception):  # nobody waits any more
                future.set_result(result)

        self.put(job)
        return future

    def put(self, job: Callable[[], None]) -> None:
        """Call a function, whose result nobody waits for here; it must not raise."""
        self._jobs.put(job)

    def end(self) -> None:
        """After the calls so far."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class UserLoop:
    """Run the user's coroutines in an event loop, in a thread of its own, so that one that blocks it stalls no time-out."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.lost = Once()  # why it is given up
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def check(self) -> None:
        """Give it up if it does not answer."""
        answered: Future[None] = Future()
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self.loop.call_soon_threadsafe(answered.set_result, None)
        finished, _ = await asyncio.wait({asyncio.wrap_future(answered)}, timeout=_PATIENCE)
        if not finished and not self.lost.has_happened:
            logger.warning(
                "an environment blocks the event loop of all async ones: it does something slow without await; "
                "--env_workers runs each one in a process of its own"
            )
            self.end("another environment blocked the event loop")

    def end(self, reason: str) -> None:
        """End as soon as it can: tasks are cancelled, the thread ends. Who waits for it learns why at once."""
        self.lost.happen(reason)
        self._ended = True
        with contextlib.suppress(RuntimeError):  # closed already
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ended:  # a SystemExit of a task of the user's own ends run_forever
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(BaseException):
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=1) if tasks else _nothing())
        self.loop.close()


async def _nothing() -> None: ...


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stopped:
        return stopped.value
    raise RuntimeError("the coroutine waits")


class InThread:
    """Call a function in the present thread; what must be awaited is, in the loop of the user's coroutines."""

    def __init__(self, start_loop: Callable[[], UserLoop]) -> None:
        self.loop: UserLoop | None = None
        self.waits_for: Future[Any] | None = None
        self._loop = start_loop

    async def __call__(self, function: Callable[[], Any]) -> Any:
        result = function()
        if not inspect.isawaitable(result):
            return result
        self.loop = self.loop or self._loop()
        self.waits_for = self.loop.submit(_as_outcome(result))
        succeeded, outcome = self.waits_for.result()
        self.waits_for = None
        if not succeeded:
            raise outcome
        return outcome


async def in_loop(function: Callable[[], Any]) -> Any:
    """Call a function in the present event loop."""
    result = function()
    if inspect.isawaitable(result):
        return await result
    return result


async def _as_outcome(awaitable: Awaitable[Any]) -> tuple[bool, Any]:
    """Return success and value, or False and the error: a SystemExit that leaves a task ends the loop."""
    try:
        return True, await awaitable
    except BaseException as error:
        return False, error


# --- seats: what a session talks to


Calls = Mapping[CallKind, Mapping[str, Any]]  # what each is given, in their order
Answers = dict[CallKind, Answer]


def opening_calls(columns: Mapping[str, Any], seed: int) -> Calls:
    """Return what begins a session."""
    return {"constructor": {"seed": seed}, "reset": {"columns": columns, "seed": seed}}


def goes_on(call_kind: CallKind, answer: Answer) -> bool:
    """Tell whether the next of several calls is made: not after a failure, nor a step that is not the last one."""
    return "value" in answer and (call_kind != "step" or answer["value"]["done"])


async def one_by_one(seat: Seat, calls: Calls, timeout: float) -> Answers:
    """See :meth:`Seat.ask_in_turn`."""
    answers: Answers = {}
    for call_kind, arguments in calls.items():
        answers[call_kind] = await seat.ask(call_kind, arguments, timeout)
        if not goes_on(call_kind, answers[call_kind]):
            break
    return answers


class _ThreadCalls:
    """Do :func:`one_by_one` in a thread, for which an event loop waits. A late call's answer is empty."""

    def __init__(self, host: Host, calls: Calls, timeout: float) -> None:
        self._host = host
        self._calls = calls
        self._timeout = timeout
        self._call_kind = next(iter(calls))
        self._answers: Answers = {}
        self._waiting = asyncio.get_running_loop()
        self._since = self._waiting.time()  # when the present call began
        self._is_over = False
        self.answered: asyncio.Future[Answers] = self._waiting.create_future()
        self._clock = self._waiting.call_at(self._since + timeout, self._check_deadline)

    def run(self) -> None:
        """Make the calls; in the thread."""
        for call_kind, arguments in self._calls.items():
            self._call_kind, self._since = call_kind, self._waiting.time()
            answer = drive(self._host.handle(call_kind, arguments))
            if self._is_over:
                return
            self._answers[call_kind] = answer
            if not goes_on(call_kind, answer):
                break
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._waiting.call_soon_threadsafe(self._set_answers, self._answers)

    def end(self) -> None:
        """Take note that nobody waits any more: a late call is the last one."""
        self._is_over = True
        self._clock.cancel()

    def _check_deadline(self) -> None:
        deadline = self._since + self._timeout
        if deadline > self._waiting.time():  # an earlier call was in time
            self._clock = self._waiting.call_at(deadline, self._check_deadline)
        else:
            self._set_answers(self._answers | {self._call_kind: {}})

    def _set_answers(self, answers: Answers) -> None:
        """Only the first ones count."""
        if not self.answered.done():
            self.answered.set_result(answers)


class Seat(Protocol):
    """Ask the environment of one session."""

    is_lost: bool  # nothing more can be asked of it
    environment: Any  # the user's object, if it is in this process

    async def ask(
        self, call_kind: CallKind, arguments: Mapping[str, Any], timeout: float
    ) -> Answer:
        """Return one call, with its limit; an answer that is late or never comes is a failure, too."""

    async def ask_in_turn(self, calls: Calls, timeout: float) -> Answers:
        """Make several calls, each with this limit, until one of them is the last, see :func:`goes_on`."""

    def leave(self) -> None:
        """End the session."""

    def drop(self) -> None:
        """Drop the session, as nobody knows how far it came: its object is not used again."""


class LocalSeat:
    """Ask in this process: in a thread, or in the loop of all async environments if nothing of it needs a thread."""

    def __init__(self, environment_spec: EnvironmentSpec, pool: LocalPool) -> None:
        self.spec = environment_spec
        self.is_lost = False
        self._pool = pool
        self._thread: CallThread | None = None
        self._loop: UserLoop | None = None
        if environment_spec.is_async:
            self._loop = pool.loop()
        self._in_thread = InThread(pool.loop)
        self._host = Host(
            environment_spec, in_loop if self._loop else self._in_thread, own_process=False
        )

    @property
    def environment(self) -> Any:
        return self._host.environment

    async def ask(
        self, call_kind: CallKind, arguments: Mapping[str, Any], timeout: float
    ) -> Answer:
        user_loop = self._used_loop
        if user_loop is not None and user_loop.lost.has_happened:
            self._abandon()
            return {"kind": "lost", "text": user_loop.lost.value}
        if user_loop is None:
            return (await self._ask_thread({call_kind: arguments}, timeout))[call_kind]
        with user_loop.lost.watched() as loop_lost:
            try:
                future = self._submit(call_kind, arguments)
            except RuntimeError as error:
                self.is_lost = True
                return {"kind": "lost", "text": f"no thread can be started: {error}"}
            awaited_futures = {
                asyncio.wrap_future(source_future) for source_future in (future, loop_lost)
            }
            try:
                await asyncio.wait(awaited_futures, timeout=timeout, return_when=FIRST_COMPLETED)
            except asyncio.CancelledError:
                self._abandon(future)
                raise
        answer = future.result() if future.done() and not future.cancelled() else {}
        if "value" in answer:
            return answer
        if user_loop.lost.has_happened:  # then it is no fault of the call that it was cancelled
            self._abandon(future)
            return {"kind": "lost", "text": user_loop.lost.value}
        return answer or await self._give_up(timeout, future)

    async def ask_in_turn(self, calls: Calls, timeout: float) -> Answers:
        if self._used_loop is None:
            return await self._ask_thread(calls, timeout)
        return await one_by_one(self, calls, timeout)

    async def _ask_thread(self, calls: Calls, timeout: float) -> Answers:
        """Make several calls where no loop can be lost: one wake-up for all of them."""
        try:
            self._thread = self._thread or self._pool.thread()
        except RuntimeError as error:
            self.is_lost = True
            message = f"no thread can be started: {error}"
            return {next(iter(calls)): {"kind": "lost", "text": message}}
        thread_calls = _ThreadCalls(self._host, calls, timeout)
        self._thread.put(thread_calls.run)
        try:
            answers = await thread_calls.answered
        except asyncio.CancelledError:
            self._abandon()
            raise
        finally:
            thread_calls.end()
        for call_kind, answer in answers.items():
            answers[call_kind] = answer or await self._give_up(timeout)
        return answers

    async def _give_up(self, timeout: float, future: Future[Any] | None = None) -> Answer:
        """Leave the call behind."""
        self._abandon(future)
        if self._used_loop is not None:
            await self._used_loop.check()
        return {"kind": "timeout", "text": f"no answer within {timeout:g} s"}

    @property
    def _used_loop(self) -> UserLoop | None:
        return self._loop or self._in_thread.loop

    def leave(self) -> None:
        if not self.is_lost and self._host.is_reusable:
            self._pool.keep(self)
        elif self._thread is not None and not self.is_lost:
            self._pool.take_back(self._thread)  # its last call has come back
        else:
            self.end()

    def drop(self) -> None:
        """Drop the session; see :class:`Seat`."""
        self.end()

    def end(self) -> None:
        """End its thread."""
        if self._thread is not None:
            self._thread.end()

    def _submit(self, call_kind: CallKind, arguments: Mapping[str, Any]) -> Future[Any]:
        if self._loop is not None:
            return self._loop.submit(self._host.handle(call_kind, arguments))
        self._thread = self._thread or self._pool.thread()
        return self._thread.submit(lambda: drive(self._host.handle(call_kind, arguments)))

    def _abandon(self, future: Future[Any] | None = None) -> None:
        """Cancel what hangs, where that is possible. Its object is closed when the call has come back."""
        self.is_lost = True
        if isinstance(self.environment, AgentEnvironment):  # a blocked loop may never close it
            self.environment.close_access()
        if self._loop is not None:
            if future is not None:
                future.cancel()
            if not self._loop.lost.has_happened:
                self._loop.submit(self._close_late())
            return
        waits_for = self._in_thread.waits_for
        if waits_for is not None:
            waits_for.cancel()
        if self._thread is not None:
            self._thread.submit(lambda: drive(self._close_late()))
            self._thread.end()

    async def _close_late(self) -> None:
        if self._host.environment is not None and self.spec.method("close") is not None:
            await self._host.handle("close", {})


class LocalPool:
    """Keep the threads and loops of a run without worker processes, and TRL's objects that wait for their next reset."""

    def __init__(self) -> None:
        self._loop: UserLoop | None = None
        self._free_seats: dict[str, list[LocalSeat]] = {}
        # Threads of sessions that have ended. To start one costs as much as two calls.
        self._idle: list[CallThread] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def thread(self) -> CallThread:
        """Return a thread for one session."""
        with self._lock:
            return self._idle.pop() if self._idle else CallThread()

    def take_back(self, thread: CallThread) -> None:
        """Take a thread back, for the next session."""
        with self._lock:
            if not self._is_closed:
                return self._idle.append(thread)
        thread.end()

    async def take(self, environment_spec: EnvironmentSpec) -> LocalSeat:
        with self._lock:
            seats = self._free_seats.get(environment_spec.name, [])
            while seats:
                seat = seats.pop()
                if seat._used_loop is None or not seat._used_loop.lost.has_happened:
                    return seat
                seat.end()
        return LocalSeat(environment_spec, self)

    def keep(self, seat: LocalSeat) -> None:
        with self._lock:
            self._free_seats.setdefault(seat.spec.name, []).append(seat)

    def loop(self) -> UserLoop:
        """Return the present loop; a new one after one that was blocked."""
        with self._lock:
            if self._loop is not None and self._loop.lost.has_happened:
                self._loop = None
            if self._loop is None:
                self._loop = UserLoop()
            return self._loop

    def close(self) -> None:
        with self._lock:
            free_seats = self._free_seats
            self._free_seats = {}
            idle_threads = self._idle
            self._idle = []
            self._is_closed = True
            user_loop = self._loop
            self._loop = None
        for thread in idle_threads:
            thread.end()
        for seats in free_seats.values():
            for seat in seats:
                seat.end()
        if user_loop is not None:
            user_loop.end("the environments were closed")
