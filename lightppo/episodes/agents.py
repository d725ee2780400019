"""Agent programs as environments: a class whose ``run`` asks an OpenAI-compatible server for the model.

The program's requests are the episode's turns: ``reset`` gives its first one, ``step`` answers it and
gives what the next one adds. So the episode keeps what the model reads and says, in token ids. A
program that changes what was said before fails. ``door.py`` is the server, ``conversation.py`` what
stands between both.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from lightppo.episodes import env_failures as contract
from lightppo.episodes.conversation import Conversation, History
from lightppo.episodes.env_failures import EnvFailure, Opening, Step
from lightppo.user_code import error_text, without_copies

_GIVEN = ("base_url", "api_key")
_MOST_OUTPUT = 16 << 20  # bytes that a program may write
_LAST_WORDS = 500  # characters of a program's output in an error
_LAST_WAIT = 10.0  # seconds for the pipe of a killed program to end


def is_program(target: Any) -> bool:
    """Tell whether a class has ``run(base_url, api_key, …)``, and is no environment otherwise."""
    run = getattr(target, "run", None)
    if not isinstance(target, type) or not callable(run) or hasattr(target, "reset"):
        return False
    return set(_GIVEN) <= inspect.signature(run).parameters.keys()


def environment_of(program: Any) -> type:
    """Return the class of environments that run such a program; ``reset`` takes the columns that ``run`` takes."""

    async def reset(self: AgentEnvironment, **row: Any) -> Opening:
        return await self._begin(row)

    async def get_reward(self: AgentEnvironment) -> float:
        return await self._score()

    run = inspect.signature(program.run)
    columns = [one for name, one in run.parameters.items() if name not in _GIVEN]
    signed: Any = reset
    signed.__signature__ = run.replace(parameters=columns)
    methods: dict[str, Any] = {"program": program, "reset": reset}
    if hasattr(program, "get_reward"):
        methods["get_reward"] = get_reward
    return type(program.__name__, (AgentEnvironment,), methods)


class AgentEnvironment:
    """One run of a program. What it raises is a failure of the episode."""

    _asks_model = True
    program: type

    def __init__(self) -> None:
        self._program = self.program()
        self._history = History()
        self._conversation: Any = None  # a Conversation, once it has begun
        self._running: asyncio.Future[Any] | None = None
        self._key = ""

    async def step(self, said: dict[str, Any]) -> Step:
        """Give the program the model's turn, and wait for its next request or its end."""
        self._conversation.answer(self._history.said(said))
        request = await self._conversation.next()
        if request is None:
            return Step(None, done=True)
        with self._conversation.refusing():
            return Step(self._history.further(request))

    async def close(self) -> None:
        """Stop the program, wherever it is."""
        await self._stop()
        if hasattr(self._program, "close"):
            await _called(self._program.close)

    async def _begin(self, row: Mapping[str, Any]) -> Opening:
        from lightppo.episodes.agent_server import the_door

        self._conversation = Conversation()
        base_url, self._key = the_door().open(self._conversation)
        given = {"base_url": base_url, "api_key": self._key} | dict(row)
        self._running = asyncio.ensure_future(_called(self._program.run, **given))
        self._running.add_done_callback(self._conversation.program_ended)
        try:
            request = await self._conversation.next()
        except asyncio.CancelledError:  # then nobody may be there to close it
            self.let_nobody_in()
            raise
        if request is None:
            raise EnvFailure("the agent program ended before it asked the model")
        with self._conversation.refusing():
            return self._history.first(request)

    async def _score(self) -> float:
        await self._stop()  # where a limit has ended the episode, it waits for the model
        return await _called(self._program.get_reward)

    def let_nobody_in(self) -> None:
        """The program's key and its requests count no more. May be called in any thread, and again."""
        key = self._key
        self._key = ""
        if not key:
            return
        from lightppo.episodes.agent_server import the_door

        the_door().close(key)
        self._conversation.end()

    async def _stop(self) -> None:
        self.let_nobody_in()
        running = self._running
        self._running = None
        if running is not None:
            running.cancel()
            await asyncio.wait({running})


async def run_program(
    command: Sequence[str], *, base_url: str, api_key: str, **variables: str
) -> str:
    """For ``run``: start a program, wait until it ends, and return what it wrote, at most 16 MiB.

    It gets ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``variables`` as environment variables. It is
    killed with all that it has started when the episode ends before it does, or when the trainer does.

    Raises:
        EnvFailure: its exit code is not 0, and the text has the end of what it wrote; or it wrote more.
    """
    given = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    # Within a worker it stays in the worker's process group, with which it is killed.
    guard = [] if contract.in_worker else [sys.executable, "-I", "-S", "-c", _GUARD]
    start = asyncio.create_subprocess_exec(
        *guard,
        *command,
        stdin=asyncio.subprocess.PIPE if guard else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | given | variables,
        start_new_session=bool(guard),
    )
    starting = asyncio.ensure_future(start)
    try:
        # If this were cancelled, asyncio would kill the program, but not what it has started by then.
        process = await asyncio.shield(starting)
        output: Any = process.stdout  # a pipe, as asked for above
        written = await _read(output, command[0])
        await process.wait()
    finally:
        process = await starting
        if process.returncode is None:
            kill = _killing_group(process.pid) if guard else process.kill
            with contextlib.suppress(ProcessLookupError):
                kill()
            with contextlib.suppress(TimeoutError):  # what left the group may hold the pipe open
                async with asyncio.timeout(_LAST_WAIT):
                    # asyncio waits for the pipe's end too
                    while process.stdout is not None and await process.stdout.read(1 << 16):
                        pass
                    await process.wait()
    text = written.decode("utf-8", "replace")
    if process.returncode:
        end = text.strip()[-_LAST_WORDS:]
        raise EnvFailure(f"{command[0]} ended with code {process.returncode}: {end}")
    return text


# Runs a command until this process, which holds the other end of the standard input, or the command has ended; in the
# first case it kills all of the command's process group.
_GUARD = """
import _thread, os, signal, sys

def watch():
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)

command = os.fork()
if not command:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        os.write(2, f"it cannot be started: {error}".encode())
        os._exit(127)
_thread.start_new_thread(watch, ())
code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


async def _read(stream: asyncio.StreamReader, name: str) -> bytes:
    written = bytearray()
    while part := await stream.read(1 << 16):
        written += part
        if len(written) > _MOST_OUTPUT:
            raise EnvFailure(
                f"{name} wrote more than {_MOST_OUTPUT >> 20} MiB: let it write into a file"
            )
    return bytes(written)


def _killing_group(pid: int) -> Callable[[], None]:
    return lambda: os.killpg(pid, signal.SIGKILL)


def _called(function: Callable[..., Any], **given: Any) -> Awaitable[Any]:
    """Return what a function of the program gives; one that is not async has a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return _as_failure(function(**given))
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        try:
            with without_copies("the agent program"):
                value = function(**given)
                tell = result.set_result
        except Exception as error:
            value = error
            tell = result.set_exception
        except BaseException as error:
            value = _ended_by(error)
            tell = result.set_exception
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(lambda: result.done() or tell(value))

    threading.Thread(target=work, name="agent program", daemon=True).start()
    return result


async def _as_failure(running: Awaitable[Any]) -> Any:
    try:
        with without_copies("the agent program"):
            return await running
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop
        raise _ended_by(error) from error


def _ended_by(error: BaseException) -> EnvFailure:
    return EnvFailure(f"the agent program ended by {error_text(error)}")
