"""Tasksets of verifiers in a process of their own: with a stand-in that has the names which the worker
uses (0.4), and with the real one where ``VERIFIERS_VENV`` names a virtual environment that has it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.chats import CHATML, chat_tokenizer
from support.fakes import FakeStrategy
from support.puppet import Puppet

from lightppo.data.records import Prompt
from lightppo.episodes import verifiers_env
from lightppo.episodes.chat_format import ChatFormats
from lightppo.episodes.environments import EnvironmentFailed, Environments
from lightppo.episodes.episode import Limits
from lightppo.episodes.episode_engine import EpisodeEngine
from lightppo.errors import ConfigError
from lightppo.rollout.engine import SamplingParams

WORKER = verifiers_env.__file__.replace("verifiers_env", "verifiers_worker")

# What the worker uses of verifiers 0.4. An episode asks its client as the interception server does;
# "again" of a task's data has further turns of the user.
STAND_IN = {
    "v1/__init__.py": "",
    "v1/clients/__init__.py": """
from dataclasses import dataclass

class Client: ...

@dataclass
class ModelContext:
    model: str
    client: object
""",
    "v1/clients/train.py": """
def serialize_completion(response, model):
    return {"choices": [{"message": {"role": "assistant", "content": response.message.content}}]}

def tool_to_wire(tool):
    return {"type": "function", "function": {"name": tool}}
""",
    "v1/configs/__init__.py": "",
    "v1/configs/agent.py": """
def agent_config_fields(config):
    return {name: one for name, one in config.items() if name not in ("taskset", "id")}
""",
    "v1/configs/client.py": """
class TrainClientConfig:
    def __init__(self, renderer_model_name=None): ...
""",
    "v1/dialects/__init__.py": "",
    "v1/dialects/chat.py": """
def message_to_wire(message):
    wire = {"role": message.role, "content": message.content}
    for call in getattr(message, "tool_calls", None) or ():
        function = {"name": call.name, "arguments": call.arguments}
        wire.setdefault("tool_calls", []).append({"id": call.id, "function": function})
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    return wire
""",
    "v1/interception/__init__.py": "",
    "v1/interception/server.py": "resolve_client = None",
    "v1/types.py": """
from types import SimpleNamespace

class AssistantMessage(SimpleNamespace):
    role = "assistant"

class Response(SimpleNamespace): ...

class ToolCall(SimpleNamespace): ...

class TurnTokens(SimpleNamespace): ...

class Usage(SimpleNamespace): ...
""",
    "v1/utils/__init__.py": "",
    "v1/utils/loaders.py": """
import contextlib, os, uuid
from types import SimpleNamespace as Some
from verifiers.v1.interception import server

TASKSETS = {
    "sums": [
        dict(prompt="1+1?", system_prompt="Be short.", answer="2"),
        dict(prompt=None, system_prompt=None, answer="no", again=["Ready?", "Sure?"]),
        dict(prompt="tools", system_prompt=None, answer="4"),
        dict(prompt="changed", system_prompt=None, answer="", again=["x"]),
        dict(prompt="die", system_prompt=None, answer="", again=["x"]),
    ],
    "pair": [],
}

def resolve_env_config(data):
    agents = ["solver", "judge"] if data["taskset"]["id"] == "pair" else ["agent"]
    return {**dict.fromkeys(agents), **data}

def load_environment(config):
    if config["taskset"]["id"] not in TASKSETS:
        raise ModuleNotFoundError(f"taskset {config['taskset']['id']!r} not found")
    assert config["agent"] == {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    print("verifiers prints this")
    return Env(TASKSETS[config["taskset"]["id"]])

def user(text):
    return Some(role="user", content=text)

class Env:
    def __init__(self, tasks):
        defaults = {"again": []}
        self.tasks = [Some(data=Some(**defaults | data)) for data in tasks]
        self.taskset = Some(load=lambda: iter(self.tasks))

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    def slots(self, task, n=1):
        return [Some(task=task)]

    async def run_slot(self, slot, context, *, on_trace):
        data, trace = slot.task.data, Some(id=uuid.uuid4().hex, errors=[], rewards={}, metrics={})
        on_trace(trace)
        client = server.resolve_client(context.client)
        messages = [Some(role="system", content=data.system_prompt)] if data.system_prompt else []
        messages += [user(data.prompt)] if data.prompt else []
        try:
            for text in [*([None] if data.prompt else []), *data.again]:
                messages += [user(text)] if text else []
                turn = Some(prompt=messages, tools=["a"] if data.prompt == "tools" else [])
                body = {"model": context.model}
                answer = await client.get_response(None, body, None, session_id=trace.id, turn=turn)
                messages = [*messages, answer.message]
                trace.metrics["read"] = float(sum(answer.tokens.prompt_ids))
                while calls := answer.message.tool_calls:
                    results = [Some(role="tool", content="4", tool_call_id=one.id) for one in calls]
                    turn = Some(prompt=[*messages, *results], tools=["a"])
                    answer = await client.get_response(
                        None, body, None, session_id=trace.id, turn=turn)
                    messages = [*turn.prompt, answer.message]
                if data.prompt == "changed":
                    messages = [user("summary")]
                if data.prompt == "die":
                    os._exit(3)
            right = answer.raw["choices"][0]["message"]["content"] == data.answer
            trace.rewards = {"right": Some(value=float(right)), "judge": None}
            trace.metrics |= {"turns": float(len(messages)), "skipped": None}
        except Exception as error:
            trace.errors.append(Some(type=type(error).__name__, message=str(error)))
        trace.reward = sum(one.value for one in trace.rewards.values() if one is not None)
        return Some(ok=not trace.errors, errors=[], traces=[trace])
""",
}


def user(text):
    return {"role": "user", "content": text}


ROWS = [
    {"prompt": [{"role": "system", "content": "Be short."}, user("1+1?")], "task": 0},
    {"prompt": [], "task": 1},
    {"prompt": [user("tools")], "task": 2},
    {"prompt": [user("changed")], "task": 3},
    {"prompt": [user("die")], "task": 4},
]


@pytest.fixture(scope="module")
def venv(tmp_path_factory) -> Path:
    """A folder like a virtual environment's, whose Python has the stand-in."""
    folder = tmp_path_factory.mktemp("venv")
    for name, text in STAND_IN.items():
        path = folder / "site" / "verifiers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "site" / "verifiers" / "__init__.py").write_text("")
    (folder / "bin").mkdir()
    search = f"PYTHONPATH={folder / 'site'}"
    for name, line in (("python", f'{search} exec {sys.executable} "$@"'), ("uv", "")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.fixture(params=[0, 1], ids=["here", "process"])
def environments(venv, request):
    environments = Environments(f"verifiers:sums@{venv}", timeout=60, workers=request.param)
    yield environments
    environments.end()


def said(text, *calls):
    """A turn of the model; calls are of the tool ``a``."""
    message = {"role": "assistant", "content": text}
    if calls:
        functions = [{"name": "a", "arguments": arguments} for arguments in calls]
        message["tool_calls"] = [{"id": "call00000", "function": one} for one in functions]
    ids = {"prompt_ids": [1, 2], "ids": [3], "log_probs": [-0.5]}
    return {"message": message, "finish_reason": "stop"} | ids


async def play(environments, row, *turns):
    turns = [said(turn) if isinstance(turn, str) else turn for turn in turns]
    session = await environments.open(row, seed=1)
    try:
        return session.opening, [await session.step(turn) for turn in turns]
    finally:
        await session.close()


def test_one_answer_and_its_reward(environments):
    assert (environments.names, environments.tools("sums")) == (["sums"], [])
    for text, reward in (("2", 1.0), ("3", 0.0)):
        opening, (step,) = asyncio.run(play(environments, ROWS[0], text))
        assert opening == {"messages": ROWS[0]["prompt"], "tools": []}
        assert (step.observation, step.reward, step.done) == (None, reward, True)
        assert step.metrics == {"right": reward, "turns": 3.0, "read": 3.0}
    with pytest.raises(EnvironmentFailed, match="the episode is over"):
        asyncio.run(play(environments, ROWS[0], "2", "3"))


def test_turns_of_a_user(environments):
    opening, (first, last) = asyncio.run(play(environments, ROWS[1] | {"prompt": ""}, "yes", "no"))
    assert opening["messages"] == [{"role": "user", "content": "Ready?"}]
    assert first.observation == [{"role": "user", "content": "Sure?"}]
    assert (first.reward, first.done) == (0.0, False)
    assert (last.reward, last.done) == (1.0, True)


def test_tools_of_a_task(environments):
    opening, (first, last) = asyncio.run(play(environments, ROWS[2], said("hm", {"x": 2}, {}), "4"))
    tools = [{"type": "function", "function": {"name": "a"}}]
    assert opening == {"messages": ROWS[2]["prompt"], "tools": tools}
    assert first.observation == [{"role": "tool", "content": "4", "name": "a"}] * 2
    assert (last.reward, last.done, last.metrics["turns"]) == (1.0, True, 5.0)


def test_many_side_by_side_and_some_given_up(venv):
    environments = Environments(f"sums=verifiers:sums@{venv}", timeout=60)

    async def one(number):
        session = await environments.open(ROWS[1], seed=number)
        text = "no" if number % 2 else "yes"
        rewards = [(await session.step(said(text))).reward for _ in range(number % 3)]
        await session.close()
        return rewards

    async def run():
        return await asyncio.gather(*(one(number) for number in range(30)))

    found = asyncio.run(run())
    environments.end()
    ends = {0: [], 1: [0.0]}
    assert found == [ends.get(number % 3, [0.0, float(number % 2)]) for number in range(30)]


def test_what_cannot_be_played(environments):
    wrong = [
        (ROWS[3], ("a",), "changes what was said before.*message 0 was .*changed.*now .*summary"),
        ({"prompt": "other", "task": 0}, (), "a row needs the messages that its task begins with"),
        ({"prompt": "", "task": 5}, (), "IndexError: task 5: the taskset has 5"),
        (ROWS[4], ("a",), "verifiers' process has ended with code 3"),
    ]
    for row, texts, message in wrong:
        with pytest.raises(EnvironmentFailed, match=message) as caught:
            asyncio.run(play(environments, row, *texts))
        assert caught.value.kind == "failure"
    assert asyncio.run(play(environments, ROWS[0], "2"))[1][0].reward == 1.0  # by a new process


def test_rows_of_a_taskset(venv):
    command = [venv / "bin" / "python", WORKER, "sums", "--rows"]
    written = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert [json.loads(line) for line in written.stdout.splitlines()] == ROWS


def test_a_wrong_entry_is_refused_at_the_start(venv, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="ModuleNotFoundError: taskset 'none' not found"):
        Environments(f"verifiers:none@{venv}")
    with pytest.raises(ConfigError, match="pair has the agents solver, judge; only one"):
        Environments(f"verifiers:pair@{venv}")
    for entry in ("sums", f"sums@{tmp_path}"):
        with pytest.raises(ConfigError, match="VENV/bin/pip install verifiers uv"):
            Environments(f"verifiers:{entry}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="verifiers needs uv"):
        Environments(f"verifiers:sums@{tmp_path}")


TASKS = '''
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class Adding(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return f"{a + b}<|im_end|>"


class SumConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTask(vf.Task[SumData, vf.State, SumConfig]):
    TOOLSETS

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def sampled(self, trace: vf.Trace) -> float:
        """The sum of all ids that the trace has as sampled."""
        return float(sum(id for node in trace.nodes for id, yes in zip(node.token_ids, node.mask) if yes))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for i in range(3):
            data = SumData(prompt=f"{i}+2?", system_prompt="Be short.", answer=str(i + 2))
            yield SumTask(data, self.config.task)


class AskingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Asking(vf.Env[AskingConfig]):
    """A second turn asks again."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Sure?")


__all__ = EXPORTED

if __name__ == "__main__":
    Adding.run()
'''
WITH_TOOLS = """@classmethod
    def toolsets(cls, config):
        return [Adding(vf.ToolsetConfig())]
"""


@pytest.fixture
def real(tmp_path, monkeypatch):
    """``real(name, twice=False, tools=False)``: environments of the real package, and their rows."""
    venv = os.environ.get("VERIFIERS_VENV")
    if not venv:
        pytest.skip("VERIFIERS_VENV names no virtual environment with verifiers 0.4 and uv")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = []

    def make(name, twice=False, tools=False):
        text = TASKS.replace(
            "EXPORTED", repr(["SumTaskset", "Asking"] if twice else ["SumTaskset"])
        )
        (tmp_path / f"{name}.py").write_text(text.replace("TOOLSETS", WITH_TOOLS if tools else ""))
        command = [f"{venv}/bin/python", WORKER, name, "--rows"]
        written = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
        made.append(Environments(f"verifiers:{name}@{venv}", timeout=120))
        return made[-1], [json.loads(line) for line in written.stdout.splitlines()]

    yield make
    for environments in made:
        environments.end()


@pytest.mark.parametrize("twice", [False, True])
def test_the_real_verifiers(real, twice):
    environments, rows = real(f"sums_of_tests_{int(twice)}", twice=twice)
    texts = ("3", "it is 4")[not twice :]
    opening, steps = asyncio.run(play(environments, rows[2], *texts))
    assert opening == {"messages": rows[2]["prompt"], "tools": []}
    assert (steps[-1].reward, steps[-1].done, steps[-1].metrics["right"]) == (1.0, True, 1.0)
    assert steps[-1].metrics["sampled"] == 3.0 * len(texts)
    if twice:
        assert steps[0].observation == [{"role": "user", "content": "Sure?"}]


def test_tools_of_the_real_verifiers(real):
    """A whole episode, by ids: verifiers' own trace has the same ones as sampled."""
    environments, rows = real("sums_of_tests_tools", tools=True)
    tokenizer = chat_tokenizer(CHATML)
    call = '{"name": "adding_add", "arguments": {"a": 2, "b": 2}}'
    texts = [f"<tool_call>\n{call}\n</tool_call><|im_end|>", "it is 4<|im_end|>"]
    puppet = Puppet(tokenizer, lambda turn: texts[turn.number])
    engine = EpisodeEngine(
        puppet,
        tokenizer,
        environments,
        FakeStrategy(),
        limits=Limits(budget=600, max_opening=600),
        formats=dict.fromkeys(environments.names, ChatFormats(tokenizer)),
    )
    prompt = Prompt("", [], index=7, extra={"task": 2}, messages=rows[2]["prompt"])
    (rollout,) = engine.generate([prompt], SamplingParams(max_new_tokens=600))
    engine.close()
    whole = rollout.prompt.token_ids + rollout.response_ids
    for asked in puppet.asked:
        assert whole[: len(asked.token_ids)] == asked.token_ids
    said = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    sampled = [id for id, yes in zip(rollout.response_ids, rollout.trained) if yes]
    assert sampled == said[0] + said[1]
    assert rollout.extras["sampled"] == float(sum(sampled))
    answer = "<|im_start|>user\n<tool_response>\n4< |im_end|>\n</tool_response><|im_end|>\n"
    assert answer in tokenizer.decode(rollout.response_ids)
    assert "Add two numbers." in tokenizer.decode(rollout.prompt.token_ids)
    assert [turn["reward"] for turn in rollout.turns] == [0.0, 1.0]
