"""Environments on an OpenEnv server: a stand-in for its client, which posts the messages that the
real one sends by WebSocket, and the real client and server where openenv is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
import types
import urllib.request
import uuid

import pytest
from support.http_server import JsonServer
from support.ranks import free_port

from lightppo.episodes.environments import EnvironmentFailed, Environments
from lightppo.errors import ConfigError

METADATA = {"type": "object", "description": "Additional metadata for the action"}
GUESS = {
    "title": "Guess",
    "properties": {"metadata": METADATA, "number": {"title": "Number", "type": "integer"}},
    "required": ["number"],
}
SAY = {
    "title": "Say",
    "properties": {
        "metadata": METADATA,
        "message": {"type": "string"},
        "loud": {"type": "boolean"},
    },
    "required": ["message"],
}
PAIR = {
    "title": "Pair",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
CALL_TOOL = {"title": "CallToolAction", "properties": {"tool_name": {"type": "string"}}}
TOOLS = [
    {
        "name": "echo",
        "description": "Echo a message.\n\nArgs:\n    message: what to say",
        "input_schema": {
            "properties": {
                "message": {"type": "string", "description": "what to say"},
                "times": {"default": 1, "type": "integer"},
                "how": {"$ref": "#/$defs/How"},
            },
            "$defs": {"How": {"enum": ["loud", "low"], "type": "string"}},
            "required": ["message"],
            "type": "object",
        },
    },
    {"name": "look", "description": "Look around.", "input_schema": {"type": "object"}},
]


class Server(JsonServer):
    """What an OpenEnv server answers, by session. ``action`` is the schema of its actions."""

    def start(self, action: dict) -> Server:
        self.action, self.sessions, self.most = action, {}, 4
        self.reply = self.answer
        return self

    def answer(self, path, body, n):
        if path == "/schema":
            return 200, json.dumps({"action": self.action, "observation": {}, "state": {}}).encode()
        session = self.sessions.setdefault(path, {"n": None})
        if len(self.sessions) > self.most:
            answer = error("Server at capacity: 4/4 sessions active.", "CAPACITY_REACHED")
        else:
            answer = getattr(self, f"on_{body['type']}")(session, body.get("data", {}))
        if body["type"] == "close":
            del self.sessions[path]
        return 200, json.dumps(answer).encode()

    def on_close(self, session, data):
        return {"type": "closed"}

    def on_reset(self, session, data):
        session["n"] = data["seed"] % data.get("limit", 10)
        return told(0.0, False, text=f"Guess below {data.get('limit', 10)}.")

    def on_step(self, session, data):
        if data.get("type") == "list_tools":
            return told(None, False, tools=self.tools)
        if data.get("type") == "call_tool":
            return self.call(data["tool_name"], data["arguments"])
        if "message" in data:
            return told(0.0, False, echoed=data["message"], length=len(data["message"]))
        if not isinstance(data.get("number"), int):
            return error("Invalid message", "VALIDATION_ERROR")
        if data["number"] == 99:
            return error("the world broke", "EXECUTION_ERROR")
        right = data["number"] == session["n"]
        return told(float(right) if right else None, right, text="right" if right else "wrong")

    tools = TOOLS

    def call(self, name, arguments):
        if name == "look":
            return told(
                None, False, tool_name=name, result={"content": [{"type": "text", "text": "dark"}]}
            )
        failed = {"bad": "execution_error", "gone": "transport_error"}.get(arguments["message"])
        if failed:
            wrong = {"error_type": failed, "message": "not this word"}
            return told(0.25, False, tool_name=name, result=None, error=wrong)
        said = " ".join([arguments["message"]] * arguments.get("times", 1))
        content = [{"type": "text", "text": said}]
        result = {"content": content, "data": said, "is_error": False}
        return told(0.5, said == "end", tool_name=name, result=result, error=None)


def told(reward, done, **observation):
    data = {"observation": {"metadata": {}} | observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(message, code):
    return {"type": "error", "data": {"message": message, "code": code}}


class GenericEnvClient:
    """openenv's (0.10), by POST."""

    def __init__(self, base_url, connect_timeout_s=10.0, message_timeout_s=60.0):
        self.path = f"{base_url.rstrip('/')}/{uuid.uuid4()}"
        self.timeout = message_timeout_s

    async def reset(self, **kwargs):
        return self._result("reset", kwargs)

    async def step(self, action, **kwargs):
        return self._result("step", action)

    async def close(self):
        self._send({"type": "close"})

    @contextlib.contextmanager
    def sync(self):
        yield types.SimpleNamespace(step=lambda action: self._result("step", action))
        self._send({"type": "close"})

    def _result(self, kind, data):
        data = self._send({"type": kind, "data": data}).get("data", {})
        return types.SimpleNamespace(
            observation=data.get("observation", {}),
            reward=data.get("reward"),
            done=data.get("done", False),
            metadata=data.get("metadata"),
        )

    def _send(self, message):
        asked = urllib.request.Request(self.path, json.dumps(message).encode())
        with urllib.request.urlopen(asked, timeout=self.timeout) as answer:
            response = json.load(answer)
        if response["type"] == "error":
            data = response["data"]
            raise RuntimeError(f"Server error: {data['message']} (code: {data['code']})")
        return response


@pytest.fixture
def server(monkeypatch):
    package = types.ModuleType("openenv")
    package.core = types.ModuleType("openenv.core")
    package.core.GenericEnvClient = GenericEnvClient
    monkeypatch.setitem(sys.modules, "openenv", package)
    monkeypatch.setitem(sys.modules, "openenv.core", package.core)
    server = Server()
    yield server
    server.close()


async def play(environments, row, *turns, seed=7):
    session = await environments.open(row, seed=seed)
    try:
        answers = [
            await (session.step(turn) if isinstance(turn, str) else session.call(*turn))
            for turn in turns
        ]
    finally:
        await session.close()
    return session.opening, answers


def test_an_environment_played_by_text(server):
    environments = Environments(f"openenv:{server.start(GUESS).url}/", timeout=60)
    assert (environments.names, environments.tools("openenv")) == (["openenv"], [])
    turns = ("1", "I say 2", '{"number": "x"}', '```json\n{"number": 2}\n```')
    row = {"prompt": "p", "config": {"limit": 5}}
    opening, steps = asyncio.run(play(environments, row, *turns))
    usage = "Answer with a JSON object of {number: integer}."
    assert opening == "Guess below 5."
    assert [step.observation for step in steps] == ["wrong", usage, usage, "right"]
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 1.0]
    assert [step.done for step in steps] == [False, False, False, True]
    assert [step.metrics for step in steps] == [{}, {"tool_error": 1.0}, {"tool_error": 1.0}, {}]
    assert server.sessions == {}
    with pytest.raises(EnvironmentFailed, match="the world broke"):
        asyncio.run(play(environments, {}, "99"))
    environments.end()


def test_text_stays_text_where_the_action_wants_text(server):
    environments = Environments(f"talk=openenv:{server.start(SAY).url}", timeout=60)
    assert environments.names == ["talk"]
    steps = asyncio.run(play(environments, {}, "12", '{"message": "a", "loud": true}'))[1]
    assert [json.loads(step.observation) for step in steps] == [
        {"echoed": "12", "length": 2},
        {"echoed": "a", "length": 1},
    ]
    pair = Environments(f"openenv:{server.start(PAIR).url}", timeout=60)
    (step,) = asyncio.run(play(pair, {}, "12"))[1]
    assert step.observation == "Answer with a JSON object of {a: integer, b: integer}."


def test_tools_of_the_server_are_tools(server):
    environments = Environments(f"openenv:{server.start(CALL_TOOL).url}", timeout=60)
    assert server.sessions == {}  # that of the question for its tools has ended
    echo, look = (tool["function"] for tool in environments.tools("openenv"))
    assert (echo["name"], echo["description"]) == ("echo", "Echo a message.")
    assert echo["parameters"]["required"] == ["message"]
    assert echo["parameters"]["properties"] == {
        "message": {"type": "string", "description": "what to say"},
        "times": {"default": 1, "type": "integer", "description": "times"},
        "how": {"enum": ["loud", "low"], "type": "string", "description": "how"},
    }
    assert (look["name"], look["parameters"]["properties"]) == ("look", {})
    turns = [
        ("echo", {"message": "hi", "times": "2"}),
        ("echo", {"message": "bad"}),
        ("echo", {}),
        ("look", {}),
        ("echo", {"message": "end"}),
    ]
    replies = asyncio.run(play(environments, {}, *turns))[1]
    assert [reply.text for reply in replies] == [
        "hi hi", "not this word", "echo: missing argument message. It takes message, times, how.", "dark", "end",
    ]  # fmt: skip
    assert [reply.error for reply in replies] == [False, True, True, False, False]
    assert [reply.reward for reply in replies] == [0.5, 0.25, 0.0, 0.0, 0.5]
    assert [reply.done for reply in replies] == [False] * 4 + [True]
    with pytest.raises(EnvironmentFailed, match="transport_error: not this word") as caught:
        asyncio.run(play(environments, {}, ("echo", {"message": "gone"})))
    assert caught.value.kind == "failure"


def test_a_server_that_is_full_or_cannot_be_used(server):
    url = server.start(GUESS).url
    environments = Environments(f"openenv:{url}", timeout=60)

    async def run():
        sessions = [await environments.open({}, seed=1) for _ in range(4)]
        with pytest.raises(EnvironmentFailed, match="max_concurrent_envs of at least") as caught:
            await environments.open({}, seed=1)
        for session in sessions:
            await session.close()
        return caught.value.kind

    assert asyncio.run(run()) == "failure"
    server.start(CALL_TOOL).tools = [TOOLS[1] | {"name": "reset"}]
    with pytest.raises(ConfigError, match=r"openenv:http.*a tool named 'reset', which cannot be"):
        Environments(f"openenv:{url}")
    with pytest.raises(ConfigError, match=r"openenv:127.0.0.1:8000: give the server's address"):
        Environments("openenv:127.0.0.1:8000")
    with pytest.raises(ConfigError, match="start the environment's server there first"):
        Environments(f"openenv:http://127.0.0.1:{free_port()}")


REAL = """
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Told(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, limit: int = 10, **kwargs):
        self.n = seed % limit
        return Told(text=f"Guess below {limit}.", reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        if action.number == 99:
            raise OSError("the world broke")
        right = action.number == self.n
        return Told(text="right" if right else "wrong", done=right, reward=float(right))


class Echoing(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        mcp = FastMCP("echo")

        @mcp.tool
        def echo(message: str, times: int = 1) -> str:
            '''Echo a message.'''
            if message == "bad":
                raise ValueError("not this word")
            return " ".join([message] * times)

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"message": "ready"}, reward=0.0)

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise TypeError(type(action).__name__)


kinds = {"guess": (Guessing, Guess, Told), "echo": (Echoing, CallToolAction, CallToolObservation)}
app = create_app(*kinds[sys.argv[1]], env_name="test", max_concurrent_envs=4)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
"""


@contextlib.contextmanager
def real_server(path, kind):
    """The address of a server of the real package, in a process of its own."""
    path.write_text(REAL)
    port = free_port()
    search = f"import sys, runpy; sys.path[:] = {sys.path!r}; sys.argv[:] = sys.argv[1:]; "
    command = [sys.executable, "-c", search + "runpy.run_path(sys.argv[0])", str(path), kind, str(port)]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_real_openenv_played_by_text(tmp_path, workers):
    pytest.importorskip("openenv.core")
    with real_server(tmp_path / "server.py", "guess") as url:
        environments = Environments(f"openenv:{url}", timeout=60, workers=workers)
        try:
            row = {"config": {"limit": 5}}
            opening, steps = asyncio.run(play(environments, row, "1", "none", '{"number": 2}'))
            with pytest.raises(EnvironmentFailed, match="the world broke"):
                asyncio.run(play(environments, row, "99"))
        finally:
            environments.end()
    assert opening == "Guess below 5."
    usage = "Answer with a JSON object of {number: integer}."
    assert [step.observation for step in steps] == ["wrong", usage, "right"]
    assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
    assert steps[-1].done


@pytest.mark.parametrize("workers", [0, 1])
def test_tools_of_the_real_openenv(tmp_path, workers):
    pytest.importorskip("openenv.core")
    with real_server(tmp_path / "server.py", "echo") as url:
        environments = Environments(f"openenv:{url}", timeout=60, workers=workers)
        try:
            (echo,) = (tool["function"] for tool in environments.tools("openenv"))
            turns = [("echo", {"message": "hi", "times": 2}), ("echo", {"message": "bad"})]
            opening, (good, bad) = asyncio.run(play(environments, {}, *turns))
        finally:
            environments.end()
    assert (echo["name"], echo["parameters"]["required"]) == ("echo", ["message"])
    assert (opening, good.text, good.error) == ("ready", "hi hi", False)
    assert "not this word" in bad.text
    assert bad.error
