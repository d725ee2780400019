"""Environments of a run, and the sessions in which episodes use them. docs/environments.md shows what a user writes.

Every wait has a limit. Whatever the user's code does, a session raises :class:`EnvironmentFailed` and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightppo.episodes import env_failures
from lightppo.episodes.env_failures import (
    CallKind,
    Contract,
    EnvFailure,
    EnvironmentFailed,
    Reply,
    Step,
    ToolError,
)
from lightppo.episodes.hosts import (
    Answers,
    Calls,
    Host,
    InThread,
    LocalPool,
    Seat,
    UserLoop,
    drive,
    failure_of,
    in_loop,
    one_by_one,
    opening_calls,
)
from lightppo.episodes.specs import PYTHON_TOOL, EnvironmentSpec, load_specs
from lightppo.episodes.tools import BadCall
from lightppo.errors import ConfigError
from lightppo.processes.fork_server import Answer, Respond, Worker, WorkerPool
from lightppo.user_code import error_text, importable_name, in_daemon_thread

__all__ = [
    "EnvFailure",
    "EnvironmentFailed",
    "Environments",
    "Reply",
    "Session",
    "Step",
    "ToolError",
    "opening_messages",
]

logger = logging.getLogger(__name__)

ROUTING_COLUMN = "environment"


class Environments:
    """Make sessions of the classes of ``--env`` and the functions of ``--tools``.

    Args:
        entries: ``file.py:Class``, ``NAME=file.py:Class``, ``package:Class``, a class, or TRL's dict of classes.
        tools: ``file.py:f,g``, ``python``, or a function. Every environment has them beside its own.
        contract: ``trl``: objects are made once and reset often, and any exception of a tool is text for the model.
        timeout: seconds of each call of the user's code.
        workers: 0: async code runs in one event loop, which has a thread of its own, sync code in a thread for each
            session. Above: each session has one of so many processes, which is killed when it hangs.
        sandbox: makes the pool of sandboxes that the tool ``python`` uses; default: one with default limits.
    """

    def __init__(
        self,
        entries: Sequence[Any] | Any = (),
        *,
        tools: Sequence[Any] | Any = (),
        contract: Contract = "lightppo",
        timeout: float = 60.0,
        workers: int = 0,
        sandbox: Callable[[], Any] | None = None,
    ) -> None:
        if not timeout > 0 or workers < 0:
            raise ConfigError(
                f"--env_timeout must be > 0 and --env_workers ≥ 0, got {timeout} and {workers}"
            )
        entries = _as_list(entries)
        tools = _as_list(tools)
        self.contract = contract
        self.timeout = timeout
        self.workers = workers
        self._specs = load_specs(entries, tools, contract)
        self._local = LocalPool()
        self._workers: WorkerPool | None = None
        if workers:
            self._workers = worker_pool(
                [_text_of(entry, "--env") for entry in entries],
                [_text_of(tool, "--tools") for tool in tools],
                contract,
                workers,
            )
        self._probe()
        self._python = self._python_tool(sandbox)
        self._forgotten: deque[Seat] = deque()  # of sessions whose loop ended before them
        self._schemas: dict[str, list[dict[str, Any]]] = {}

    @property
    def names(self) -> list[str]:
        """Return the names of all environments."""
        return list(self._specs)

    def tools(self, environment_name: str) -> list[dict[str, Any]]:
        """Return JSON schemas of the tools that an environment has, for the chat template."""
        if environment_name not in self._schemas:
            tools = self._specs[environment_name].tools.values()
            self._schemas[environment_name] = [tool.schema() for tool in tools]
        return self._schemas[environment_name]

    def has_reset(self, environment_name: str) -> bool:
        """Tell whether the class may begin an episode with messages of its own."""
        return self._specs[environment_name].method("reset") is not None

    def is_agent(self, environment_name: str) -> bool:
        """Tell whether the environment is an agent program, which asks the model itself."""
        return self._specs[environment_name].is_agent

    def route(self, row: Mapping[str, Any]) -> str:
        """Return the environment of a row: its column ``environment``, or the only one."""
        return routed(row, self.names, self.contract)

    async def open(self, row: Mapping[str, Any], *, seed: int) -> Session:
        """Make and reset an environment for one episode, or TRL's: take one and reset it."""
        environment_spec = self._specs[self.route(row)]
        seat = await self._take(environment_spec)
        session = Session(self, environment_spec, seat)
        await session._start(self._columns(row), seed)
        return session

    async def close(self) -> None:
        """End all threads, loops and processes."""
        self.end()

    def end(self) -> None:
        """:meth:`close` without an event loop."""
        self._local.close()
        if self._workers is not None:
            self._workers.close()
        if self._python is not None:
            self._python.close()

    async def _take(self, environment_spec: EnvironmentSpec) -> Seat:
        while self._forgotten:
            self._forgotten.popleft().drop()
        functions = environment_spec.functions.keys() - {PYTHON_TOOL}
        needs_process = environment_spec.make is not None or functions
        if needs_process and self._workers is not None:
            worker = await self._workers.take(environment_spec.name)
            return ProcessSeat(environment_spec, worker, self._workers)
        return await self._local.take(environment_spec)

    def _columns(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """TRL keeps the column that routes to itself where there is a choice."""
        hidden = {ROUTING_COLUMN} if self.contract == "trl" and len(self._specs) > 1 else ()
        return {name: value for name, value in columns.items() if name not in hidden}

    def _probe(self) -> None:
        """Call functions that make environments once, so that their methods are known."""
        for spec in self._specs.values():
            if spec.make is None or spec.kind is not None:
                continue
            environment = in_daemon_thread(spec.make)
            try:
                error = environment.exception(self.timeout)
            except TimeoutError:
                error = TimeoutError(f"no answer within {self.timeout:g} s")
            if error is not None:
                raise ConfigError(f"--env: {spec.where} fails: {error_text(error)}")
            spec.look_at(type(environment.result()))

    def _python_tool(self, sandbox: Callable[[], Any] | None) -> Any:
        if not any(PYTHON_TOOL in spec.functions for spec in self._specs.values()):
            return None
        from lightppo.episodes.tools import PythonRunner

        return PythonRunner(sandbox)


def routed(columns: Mapping[str, Any], environment_names: Sequence[str], contract: Contract) -> str:
    """Return the environment of a row among these; ConfigError where the row names none of several."""
    requested_name = columns.get(ROUTING_COLUMN)
    if len(environment_names) == 1 and (requested_name is None or contract == "trl"):
        return environment_names[0]
    if not isinstance(requested_name, str) or requested_name not in environment_names:
        problem = f"has {requested_name!r}" if requested_name is not None else "is missing"
        raise ConfigError(
            f"--env: the row's column {ROUTING_COLUMN!r} {problem}; it must be one of {', '.join(environment_names)}"
        )
    return requested_name


class Session:
    """Call one episode's environment. Calls come one after the other."""

    def __init__(
        self, environments: Environments, environment_spec: EnvironmentSpec, seat: Seat
    ) -> None:
        self.name = environment_spec.name
        self.contract = environment_spec.contract
        # What reset returned; for an agent program, {"messages": …, "tools": …}.
        self.opening: str | list[dict[str, Any]] | dict[str, Any] | None = None
        self.is_agent = environment_spec.is_agent
        self.has_step = environment_spec.method("step") is not None
        self.has_reward = environment_spec.method("get_reward") is not None
        self._environments = environments
        self._spec = environment_spec
        self._seat: Seat | None = seat
        self._failure: Exception | None = None
        self._is_made = False
        self._rewarded: Answer | None = None  # what get_reward answered after the last step
        self._one_at_a_time = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    @property
    def environment(self) -> Any:
        """Return the user's object, for reward functions; ``None`` in a process of its own and after the end."""
        if self._seat is not None:
            return self._seat.environment
        return None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Reply:
        """Call a tool. What is wrong with the call is a reply with ``error``."""
        python_runner = self._environments._python
        if name == PYTHON_TOOL and python_runner is not None:
            try:
                return await python_runner.call(self._spec.functions[name].check(arguments))
            except BadCall as error:
                return Reply(str(error), error=True)
            except EnvFailure as error:
                answer = {"kind": "failure", "text": str(error)}
                self._failure = failure_of(self._spec, "tool", answer, name)
                raise self._failure from error
        return Reply(**await self._ask("tool", detail=str(name), name=name, arguments=arguments))

    async def step(self, model_turn: str | dict[str, Any], *, then_reward: bool = False) -> Step:
        """Give the model's turn to an environment with ``step``: its text, or all of it to an agent program.

        ``then_reward``: :meth:`get_reward` follows if this is the last step; both are asked together.
        """
        async with self._one_at_a_time:
            calls: dict[CallKind, dict[str, Any]] = {"step": {"model_turn": model_turn}}
            if then_reward and self.has_reward:
                calls["get_reward"] = {}
            answers = await self._used_seat.ask_in_turn(calls, self._environments.timeout)
            self._rewarded = answers.get("get_reward")
            return Step(**self._value("step", answers["step"]))

    async def get_reward(self) -> float | None:
        """Return the reward; ``None``: the class has none, or in TRL's contract this episode has none."""
        if self._rewarded is not None:
            return self._value("get_reward", self._rewarded)
        if self.has_reward:
            return await self._ask("get_reward")
        return None

    async def close(self) -> None:
        """End the session; afterwards its failures are no news. May be called again."""
        if self._seat is None:
            return
        had_failed = self._failure is not None
        try:
            has_close = self._spec.method("close") is not None
            if has_close and self._is_made and not self._seat.is_lost:
                self._failure = None
                await self._ask("close")
        except EnvironmentFailed as error:
            if not had_failed:
                raise
            logger.debug("%s", error)
        finally:
            seat = self._seat
            self._seat = None
            if seat is not None:
                seat.leave()

    def __del__(self) -> None:
        """Leave the place of a session that nobody closed; in the loop, as garbage is collected anywhere."""
        seat = getattr(self, "_seat", None)
        if seat is None:
            return
        try:
            self._loop.call_soon_threadsafe(seat.drop)
        except RuntimeError:  # the loop is closed
            self._environments._forgotten.append(seat)

    async def _start(self, columns: Mapping[str, Any], seed: int) -> None:
        try:
            calls = opening_calls(columns, seed)
            timeout = self._environments.timeout
            answers = await self._used_seat.ask_in_turn(calls, timeout)
            self._is_made = "reset" in answers
            call_kind = list(answers)[-1]
            self.opening = self._value(call_kind, answers[call_kind])
        except BaseException as error:
            self._failure = self._failure or error
            await self.close()
            raise

    async def _ask(self, call_kind: CallKind, *, detail: str = "", **arguments: Any) -> Any:
        async with self._one_at_a_time:
            answer = await self._used_seat.ask(call_kind, arguments, self._environments.timeout)
            return self._value(call_kind, answer, detail)

    @property
    def _used_seat(self) -> Seat:
        if self._failure is not None:
            raise self._failure
        if self._seat is None:
            raise RuntimeError("the session has ended")
        return self._seat

    def _value(self, call_kind: CallKind, answer: Answer, detail: str = "") -> Any:
        if "value" in answer:
            return answer["value"]
        self._failure = failure_of(self._spec, call_kind, answer, detail)
        raise self._failure


def opening_messages(
    messages: Sequence[Mapping[str, Any]],
    opening: str | list[dict[str, Any]] | None,
    contract: Contract,
) -> list[dict[str, Any]]:
    """Return the row's messages and what ``reset`` gave.

    A text continues the last message if that is the user's, after an empty line; in TRL's contract it continues the
    last message, whoever said it, at once. Otherwise it is a message of the user. Messages follow as they are.
    """
    opened_messages = [dict(message) for message in messages]
    if opening is None:
        return opened_messages
    if isinstance(opening, list):
        return opened_messages + [dict(message) for message in opening]
    last_message = opened_messages[-1] if opened_messages else {}
    if not isinstance(last_message.get("content"), str):
        return [*opened_messages, {"role": "user", "content": opening}]
    if contract == "trl":
        opened_messages[-1]["content"] = last_message["content"] + opening
    elif last_message.get("role") == "user":
        texts = (last_message["content"], opening)
        opened_messages[-1]["content"] = "\n\n".join(filter(None, texts))
    else:
        opened_messages.append({"role": "user", "content": opening})
    return opened_messages


def _as_list(entries: Any) -> list[Any]:
    is_list = isinstance(entries, Sequence) and not isinstance(entries, str)
    return list(entries) if is_list else [entries]


def _text_of(entry: Any, option: str) -> str:
    """Return how another process finds a class or a function."""
    text = entry if isinstance(entry, str) else importable_name(entry)
    if text is None:
        name = getattr(entry, "__qualname__", "") or repr(entry)
        raise ConfigError(
            f"{option}: worker processes cannot find {name}; it must be at the top level of a module, or set "
            "--env_workers 0"
        )
    return text


# --- worker processes


def worker_pool(
    entries: Sequence[str], tools: Sequence[str], contract: Contract, size: int
) -> WorkerPool:
    """Return the worker processes of a run, one for each session at a time."""
    settings = {"entries": list(entries), "tools": list(tools), "contract": contract}
    # What environments print is no output of the run.
    streams = {"stdout": 2}
    return WorkerPool(
        f"{__name__}:load_for_workers", settings, size, subject="the environments", streams=streams
    )


class ProcessSeat:
    """Ask a worker for one session."""

    environment = None  # the object is in another process

    def __init__(self, environment_spec: EnvironmentSpec, worker: Worker, pool: WorkerPool) -> None:
        self.is_lost = False
        self._spec = environment_spec
        self._worker = worker
        self._pool = pool

    async def ask(
        self, call_kind: CallKind, arguments: Mapping[str, Any], timeout: float
    ) -> Answer:
        """Return one call's answer; see :class:`lightppo.episodes.hosts.Seat`."""
        try:
            question = pickle.dumps((self._spec.name, call_kind, dict(arguments)))
        except Exception as error:  # whatever __reduce__ of a user's object raises
            message = f"the row cannot be sent to a worker process: {error_text(error)}"
            return {"kind": "exception", "text": message}
        try:
            return await self._worker.exchange(question, timeout)
        finally:
            self.is_lost = self._worker.is_ending

    async def ask_in_turn(self, calls: Calls, timeout: float) -> Answers:
        return await one_by_one(self, calls, timeout)

    def leave(self) -> None:
        self._pool.give_back(self._worker)

    def drop(self) -> None:
        self._worker.kill()
        self.leave()


def load_for_workers(settings: Mapping[str, Any]) -> Callable[[], Respond]:
    """Load the environments in the server; return what makes a worker's hosts."""
    specs = load_specs(settings["entries"], settings["tools"], settings["contract"])
    return lambda: _Hosts(specs).respond


class _Hosts:
    """Run the environments of a worker: sync code in the main thread, async code in a loop."""

    def __init__(self, specs: Mapping[str, EnvironmentSpec]) -> None:
        env_failures.in_worker = True
        self.specs = specs
        self.hosts: dict[str, Host] = {}
        self.user_loop: UserLoop | None = None

    def respond(
        self, environment_name: str, call_kind: CallKind, arguments: Mapping[str, Any]
    ) -> Answer:
        environment_spec = self.specs[environment_name]
        host = self.hosts.get(environment_name)
        if call_kind == "constructor" and not (host and host.is_reusable):
            invoke = in_loop if environment_spec.is_async else InThread(self.loop)
            host = Host(environment_spec, invoke, own_process=True)
            self.hosts[environment_name] = host
        coroutine = host.handle(call_kind, arguments)
        if environment_spec.is_async:
            answer = self.loop().submit(coroutine).result()
        else:
            answer = drive(coroutine)
        if call_kind == "close":
            self.hosts.pop(environment_name)
        return answer

    def loop(self) -> UserLoop:
        """Return the loop, started at its first use."""
        self.user_loop = self.user_loop or UserLoop()
        return self.user_loop
