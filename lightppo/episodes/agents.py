"""Agent programs as environments: a class whose ``run`` asks an OpenAI-compatible server for the model.

The program's requests are the episode's turns: ``reset`` gives its first one, ``step`` answers it and
gives what the next one adds. So the episode keeps what the model reads and says, in token ids. A
program that changes what was said before fails.

The server is openenv's ``harness/capture`` (0.10), with episodes for its engines. It speaks the dialects
of OpenAI, Anthropic and Google, streamed or not, on the loopback address, and lets in a program by the
key of its episode. Each process has one. ``conversation.py`` stands between both.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightppo.episodes import env_failures as contract
from lightppo.episodes.conversation import HAS_ENDED, Conversation, History, problem_of
from lightppo.episodes.env_failures import EnvFailure, Opening, Step
from lightppo.user_code import error_text, without_copies

_GIVEN = ("base_url", "api_key")
_MAX_OUTPUT_BYTES = 16 << 20  # bytes that a program may write
_MAX_OUTPUT_END = 500  # characters of a program's output in an error
_PIPE_SECONDS = 10.0  # seconds for the pipe of a killed program to end


def is_program(program: Any) -> bool:
    """Tell whether a class has ``run(base_url, api_key, …)``, and is no environment otherwise."""
    run_method = getattr(program, "run", None)
    if not isinstance(program, type) or not callable(run_method) or hasattr(program, "reset"):
        return False
    return set(_GIVEN) <= inspect.signature(run_method).parameters.keys()


def environment_of(program: Any) -> type:
    """Return the class of environments that run such a program; ``reset`` takes the columns that ``run`` takes."""

    async def reset(self: AgentEnvironment, **columns: Any) -> Opening:
        return await self._begin(columns)

    async def get_reward(self: AgentEnvironment) -> float:
        return await self._score()

    run_signature = inspect.signature(program.run)
    column_parameters = [
        parameter
        for parameter_name, parameter in run_signature.parameters.items()
        if parameter_name not in _GIVEN
    ]
    signed: Any = reset
    signed.__signature__ = run_signature.replace(parameters=column_parameters)
    methods: dict[str, Any] = {"program": program, "reset": reset}
    if hasattr(program, "get_reward"):
        methods["get_reward"] = get_reward
    return type(program.__name__, (AgentEnvironment,), methods)


class AgentEnvironment:
    """Run a program once. What it raises is a failure of the episode."""

    _asks_model = True
    program: type

    def __init__(self) -> None:
        self._program = self.program()
        self._history = History()
        self._conversation: Any = None  # a Conversation, once it has begun
        self._running: asyncio.Future[Any] | None = None
        self._key = ""

    async def step(self, model_turn: dict[str, Any]) -> Step:
        """Give the program the model's turn, and wait for its next request or its end."""
        self._conversation.answer(self._history.add_turn(model_turn))
        request = await self._conversation.next()
        if request is None:
            return Step(None, done=True)
        with self._conversation.refusing():
            return Step(self._history.further(request))

    async def close(self) -> None:
        """Stop the program, wherever it is."""
        await self._stop()
        if hasattr(self._program, "close"):
            await _call(self._program.close)

    async def _begin(self, columns: Mapping[str, Any]) -> Opening:
        self._conversation = Conversation()
        base_url, self._key = agent_server().open(self._conversation)
        arguments = {"base_url": base_url, "api_key": self._key} | dict(columns)
        self._running = asyncio.ensure_future(_call(self._program.run, **arguments))
        self._running.add_done_callback(self._conversation.program_ended)
        try:
            request = await self._conversation.next()
        except asyncio.CancelledError:  # then nobody may be there to close it
            self.close_access()
            raise
        if request is None:
            raise EnvFailure("the agent program ended before it asked the model")
        with self._conversation.refusing():
            return self._history.first(request)

    async def _score(self) -> float:
        await self._stop()  # where a limit has ended the episode, it waits for the model
        return await _call(self._program.get_reward)

    def close_access(self) -> None:
        """End the validity of the program's key and its requests. May be called in any thread, and again."""
        session_key = self._key
        self._key = ""
        if not session_key:
            return
        agent_server().close(session_key)
        self._conversation.end()

    async def _stop(self) -> None:
        self.close_access()
        running_program = self._running
        self._running = None
        if running_program is not None:
            running_program.cancel()
            await asyncio.wait({running_program})


async def run_program(
    command: Sequence[str], *, base_url: str, api_key: str, **variables: str
) -> str:
    """Start a program, wait until it ends, and return what it wrote, at most 16 MiB; for ``run``.

    It gets ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``variables`` as environment variables. It is
    killed with all that it has started when the episode ends before it does, or when the trainer does.

    Raises:
        EnvFailure: its exit code is not 0, and the text has the end of what it wrote; or it wrote more.
    """
    server_variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    # Within a worker it stays in the worker's process group, with which it is killed.
    guard_command = [] if contract.in_worker else [sys.executable, "-I", "-S", "-c", _GUARD]
    process_start = asyncio.create_subprocess_exec(
        *guard_command,
        *command,
        stdin=asyncio.subprocess.PIPE if guard_command else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | server_variables | variables,
        start_new_session=bool(guard_command),
    )
    starting_process = asyncio.ensure_future(process_start)
    try:
        # If this were cancelled, asyncio would kill the program, but not what it has started by then.
        process = await asyncio.shield(starting_process)
        output_pipe: Any = process.stdout  # a pipe, as asked for above
        output_bytes = await _read(output_pipe, command[0])
        await process.wait()
    finally:
        process = await starting_process
        if process.returncode is None:
            kill_program = _killing_group(process.pid) if guard_command else process.kill
            with contextlib.suppress(ProcessLookupError):
                kill_program()
            with contextlib.suppress(TimeoutError):  # what left the group may hold the pipe open
                async with asyncio.timeout(_PIPE_SECONDS):
                    # asyncio waits for the pipe's end too
                    while process.stdout is not None and await process.stdout.read(1 << 16):
                        pass
                    await process.wait()
    output = output_bytes.decode("utf-8", "replace")
    if process.returncode:
        output_end = output.strip()[-_MAX_OUTPUT_END:]
        raise EnvFailure(f"{command[0]} ended with code {process.returncode}: {output_end}")
    return output


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


async def _read(output_stream: asyncio.StreamReader, program_name: str) -> bytes:
    output_bytes = bytearray()
    while new_bytes := await output_stream.read(1 << 16):
        output_bytes += new_bytes
        if len(output_bytes) > _MAX_OUTPUT_BYTES:
            raise EnvFailure(
                f"{program_name} wrote more than {_MAX_OUTPUT_BYTES >> 20} MiB: let it write into a file"
            )
    return bytes(output_bytes)


def _killing_group(process_id: int) -> Callable[[], None]:
    return lambda: os.killpg(process_id, signal.SIGKILL)


def _call(function: Callable[..., Any], **arguments: Any) -> Awaitable[Any]:
    """Return what a function of the program gives; one that is not async has a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return _as_failure(function(**arguments))
    event_loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = event_loop.create_future()

    def work() -> None:
        try:
            with without_copies("the agent program"):
                outcome = function(**arguments)
                set_outcome = result.set_result
        except Exception as error:
            outcome = error
            set_outcome = result.set_exception
        except BaseException as error:
            outcome = _ended_by(error)
            set_outcome = result.set_exception
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            event_loop.call_soon_threadsafe(lambda: result.done() or set_outcome(outcome))

    threading.Thread(target=work, name="agent program", daemon=True).start()
    return result


async def _as_failure(running_program: Awaitable[Any]) -> Any:
    try:
        with without_copies("the agent program"):
            return await running_program
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop
        raise _ended_by(error) from error


def _ended_by(error: BaseException) -> EnvFailure:
    return EnvFailure(f"the agent program ended by {error_text(error)}")


MODEL = "policy"  # a program may ask for any other name, too
# of a request: what makes the model say something else than it would
_CONSTRAINTS = (
    "allowed_token_ids",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "logit_bias",
    "structured_outputs",
)
_KEY = re.compile(r"\bs[0-9a-f]{24}\b")
_END_SECONDS = 10.0
_MAX_REQUEST_BYTES = 16 << 20  # of a request
_REQUEST_SECONDS = 60.0  # until a request has come as a whole; its answer has all the time
_CONNECTIONS = 16  # of one episode
_STRANGERS = 100  # connections that have shown no key yet
_STRANGER_SECONDS = 10.0


class AgentServer:
    """Run openenv's server in a thread."""

    def __init__(self) -> None:
        import uvicorn
        from openenv.core.harness.capture.server import UpstreamPool, create_app
        from openenv.core.harness.capture.sessions import Upstream, extract_api_key
        from openenv.core.harness.capture.upstream import UpstreamHTTPError

        from lightppo.rewards.reward_server import Connections, Gate, GatedConnection

        session_engines: dict[str, Engine] = {}

        class Engines(UpstreamPool):
            """Give each session its episode as the engine."""

            async def resolve(self, upstream: Upstream) -> tuple[Engine, str]:
                return session_engines[upstream.llm_url], "tokens"

        self._engines = session_engines
        self._upstream = Upstream
        self._error = UpstreamHTTPError
        application = create_app(
            model=MODEL,
            capture_level="tokens",
            max_output_tokens=None,  # the run's options say it
            admin_key=secrets.token_urlsafe(),  # of the routes that list and read all sessions
        )
        application.state.inference = ServedModels()
        application.state.upstreams = Engines(
            default_client=application.state.inference, default_level="tokens"
        )
        self.registry = application.state.registry
        self._connections = Connections(_STRANGERS, _STRANGER_SECONDS, _CONNECTIONS)
        application.add_middleware(Counting)
        application.add_middleware(
            Gate,
            connections=self._connections,
            key_of=partial(_key_of, self.registry, extract_api_key),
            unknown="no key of an episode that runs",
            max_bytes=_MAX_REQUEST_BYTES,
            too_long=f"the request is longer than {_MAX_REQUEST_BYTES >> 20} MiB",
            seconds=_REQUEST_SECONDS,
            error=_error,
        )
        logging.getLogger("intercept").addFilter(_is_worth_logging)  # openenv's
        server_socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server_socket.getsockname()[1]}/v1"
        http_protocol: Any = partial(GatedConnection, self._connections)
        server_config = uvicorn.Config(
            application, http=http_protocol, ws="none", log_level="warning"
        )
        self._server = uvicorn.Server(server_config)
        serve_arguments = {"sockets": [server_socket]}
        self._thread = threading.Thread(
            target=self._server.run, kwargs=serve_arguments, name="agent server", daemon=True
        )
        self._thread.start()

    def open(self, conversation: Conversation) -> tuple[str, str]:
        """Return the address for one episode, and the key that says which one."""
        engine_name = f"episode:{secrets.token_urlsafe()}"
        self._engines[engine_name] = Engine(conversation, self._error)
        upstream = self._upstream(llm_url=engine_name, model=MODEL)
        session = self.registry.create(purpose="train", upstream=upstream, capture_level="tokens")
        return self.url, session.session_id

    def close(self, session_key: str) -> None:
        """Let its key in no more. May be called in any thread, and again."""
        session = self.registry.get(session_key)
        if session is not None and self.registry.delete(session_key):
            del self._engines[session.upstream.llm_url]
            self._connections.forget(session_key)

    def end(self) -> None:
        """Stop the server."""
        self._server.should_exit = True
        self._thread.join(_END_SECONDS)


def _key_of(
    registry: Any,
    extract_key: Callable[[dict[str, str]], str | None],
    headers: Mapping[bytes, bytes],
) -> str | None:
    """Return the key of an episode that a request shows, in whichever of the headers that openenv reads."""
    session_key = extract_key(
        {
            header_name.decode("latin-1"): header_value.decode("latin-1")
            for header_name, header_value in headers.items()
        }
    )
    return session_key if registry.get(session_key) is not None else None


def _error(status: int, message: str) -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse(_refusal(message), status)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return a filter: openenv names a session by its key, and a program often asks once more when its episode has ended."""
    record.msg = _KEY.sub("an episode", record.getMessage())
    record.args = ()
    return HAS_ENDED not in record.msg


class Counting:
    """Answer where openenv's routes that count tokens fail: they look at messages before anything has checked them."""

    def __init__(self, application: Any) -> None:
        self._app = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except (AttributeError, TypeError, KeyError, ValueError):
            # No other route: what fails there is a fault of ours.
            if not scope.get("path", "").endswith(("count_tokens", ":countTokens")):
                raise
            problem = "tokens cannot be counted: messages must be a list of messages"
            await _error(400, problem)(scope, receive, send)


class ServedModels:
    """Name the model. It serves sessions without an engine, of which there are none."""

    api_key = None
    param_fixes = ()

    async def list_models(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "owned_by": "lightppo"}],
        }


class Engine:
    """Stand for an episode in openenv's server, as a client of an engine."""

    provider = "lightppo"
    served_model = MODEL

    def __init__(self, conversation: Conversation, error: type[Exception]) -> None:
        self._conversation = conversation
        self._error = error  # (status, body): what the server tells the program

    async def completion(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chat completion, with the token ids that the model read and said."""
        if constraint := constraint_of(request):
            raise self._error(400, _refusal(f"{constraint} cannot be trained: leave it out"))
        if problem := problem_of(request):
            raise self._error(400, _refusal(problem))
        conversation_request = {
            "messages": request["messages"],
            "tools": request.get("tools") or [],
        }
        try:
            return completion_of(await self._conversation.ask(conversation_request))
        except EnvFailure as error:
            raise self._error(400, _refusal(str(error))) from error


def constraint_of(request: Mapping[str, Any]) -> str | None:
    """Return what of a request would have the model say something else than it would by itself."""
    constraint = next((field_name for field_name in _CONSTRAINTS if request.get(field_name)), None)
    if constraint is not None:
        return constraint
    response_format = request.get("response_format") or {"type": "text"}
    if not isinstance(response_format, Mapping) or response_format.get("type", "text") != "text":
        return "response_format"
    if request.get("tool_choice") not in (None, "auto"):
        return "tool_choice"
    return None


def completion_of(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn in OpenAI's form, with vLLM's fields for token ids."""
    prompt_tokens = len(turn["prompt_ids"])
    sampled_tokens = len(turn["ids"])
    choice = {
        "index": 0,
        "message": turn["message"],
        "finish_reason": turn["finish_reason"],
        "token_ids": turn["ids"],
        "logprobs": {
            "content": [
                {"token": f"token_id:{token_id}", "logprob": log_prob, "top_logprobs": []}
                for token_id, log_prob in zip(turn["ids"], turn["log_probs"], strict=True)
            ]
        },
    }
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "prompt_token_ids": turn["prompt_ids"],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled_tokens,
            "total_tokens": prompt_tokens + sampled_tokens,
        },
    }


def _refusal(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


_servers: dict[int, AgentServer] = {}  # by process: a forked one has none
_opening = threading.Lock()


def agent_server() -> AgentServer:
    """Return the server of this process, opened when the first program needs it."""
    with _opening:
        if os.getpid() not in _servers:
            _servers[os.getpid()] = AgentServer()
        return _servers[os.getpid()]
