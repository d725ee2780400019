"""Plays episodes of verifiers 0.4 in a Python of its own, and asks for each turn of the model.

    PYTHON verifiers_worker.py TASKSET [--check | --rows]

It needs verifiers there, nothing of lightppo. It reads and writes a JSON object a line:

- read: ``{"open": ID, "task": 3}``, ``{"close": ID}``, and for a turn of the model ``{"say": ID,
  "message": {…}, "finish_reason": "stop", "prompt_ids": […], "ids": […], "log_probs": […]}``
- written: ``{"id": ID, "messages": […], "tools": […]}`` for a turn to answer; at the end
  ``{"id": ID, "reward": 1.0, "metrics": {…}}`` or ``{"id": ID, "failure": "…"}``

``--check`` loads the taskset and ends; ``--rows`` writes its tasks as rows for ``--prompt_data``.

verifiers runs an agent program that asks for the model; here a client of verifiers answers it, in
place of the one that verifiers trains with: its traces get the ids that the model read and said. The
program is its chat, which offers the task's tools and runs no code of the model's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

_MOST_SECONDS = 86_400.0  # for a turn; --env_timeout is shorter
_END_SECONDS = 10.0


def load(taskset: str) -> Any:
    """Return the environment of a taskset with its one agent as a plain chat; ValueError if it has more."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    config: dict[str, Any] = {"taskset": {"id": taskset}}
    agents = list(agent_config_fields(resolve_env_config(config)))
    if len(agents) != 1:
        raise ValueError(f"{taskset} has the agents {', '.join(agents)}; only one can be trained")
    config[agents[0]] = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    return load_environment(resolve_env_config(config))


def rows(env: Any) -> Iterator[dict[str, Any]]:
    """Yield each task's number and how its conversation begins."""
    from verifiers.v1.dialects.chat import message_to_wire

    for task_number, task in enumerate(env.taskset.load()):
        system_prompt = task.data.system_prompt
        prompt = task.data.prompt
        opening_messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        if isinstance(prompt, str):
            opening_messages.append({"role": "user", "content": prompt})
        else:
            opening_messages += [message_to_wire(message) for message in prompt or ()]
        yield {"prompt": opening_messages, "task": task_number}


class Episodes:
    """Keep the episodes of this process, and the turns that they wait for."""

    def __init__(self, env: Any, write: Any) -> None:
        self.env = env
        self.write = write
        self.sessions: dict[str, str] = {}  # by id of verifiers' trace
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._futures: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._iterator = iter(env.taskset.load())
        self._loaded: list[Any] = []

    def read(self, message: dict[str, Any]) -> None:
        """Do what a line asks for."""
        if "open" in message:
            playing = self._play(message["open"], message["task"])
            self._tasks[message["open"]] = asyncio.ensure_future(playing)
        elif "say" in message:
            future = self._futures.pop(message["say"], None)
            if future is not None and not future.done():  # otherwise the episode has just failed
                future.set_result(message)
        elif task := self._tasks.pop(message["close"], None):
            task.cancel()

    async def end(self) -> None:
        """End all episodes: nobody is there any more to whom they could answer."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_SECONDS)

    async def turn(self, trace: str, **request: Any) -> dict[str, Any]:
        """Return what the model says to a conversation."""
        session = self.sessions[trace]
        if session in self._futures:
            raise ValueError("the program asks twice at the same time; it must ask in turn")
        self._futures[session] = asyncio.get_running_loop().create_future()
        self.write({"id": session} | request)
        return await asyncio.wait_for(self._futures[session], _MOST_SECONDS)

    async def _play(self, session: str, task_number: int) -> None:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import TrainClientConfig

        try:
            context = ModelContext("model", TrainClientConfig(renderer_model_name=None))
            slot = self.env.slots(self._task(task_number))[0]
            episode = await self.env.run_slot(
                slot, context, on_trace=lambda trace: self.sessions.update({trace.id: session})
            )
            self.write({"id": session} | _outcome(episode))
        except Exception as error:
            self.write({"id": session, "failure": f"{type(error).__name__}: {error}"})
        finally:
            self._tasks.pop(session, None)
            self._futures.pop(session, None)
            for trace in [
                trace_id for trace_id, session_id in self.sessions.items() if session_id == session
            ]:
                del self.sessions[trace]

    def _task(self, task_number: int) -> Any:
        self._loaded += islice(self._iterator, max(task_number + 1 - len(self._loaded), 0))
        if not 0 <= task_number < len(self._loaded):
            raise IndexError(f"task {task_number}: the taskset has {len(self._loaded)}")
        return self._loaded[task_number]


def _outcome(episode: Any) -> dict[str, Any]:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        return {
            "failure": "; ".join(f"{failure.type}: {failure.message}" for failure in errors)
            or "not ok"
        }
    (trace,) = episode.traces
    reward_parts = {
        metric_name: reward.value
        for metric_name, reward in trace.rewards.items()
        if reward is not None
    }
    metrics = {
        metric_name: metric_value
        for metric_name, metric_value in trace.metrics.items()
        if metric_value is not None
    }
    return {"reward": trace.reward, "metrics": reward_parts | metrics}


def attach(episodes: Episodes) -> None:
    """Let verifiers ask the episodes where it would ask a server."""
    from verifiers.v1.clients import Client
    from verifiers.v1.clients.train import serialize_completion, tool_to_wire
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.interception import server
    from verifiers.v1.types import AssistantMessage, Response, ToolCall, TurnTokens, Usage

    class Asking(Client):
        async def get_response(
            self, dialect, body, sampling, session_id=None, turn=None, headers=None
        ):
            request = turn if turn is not None else dialect.parse_request(body)
            messages = turn.prompt if turn is not None else request.messages
            model_turn = await episodes.turn(
                session_id,
                messages=[message_to_wire(item) for item in messages],
                tools=[tool_to_wire(item) for item in request.tools or ()],
            )
            tool_calls = [
                ToolCall(id=tool_call["id"], **tool_call["function"])
                for tool_call in model_turn["message"].get("tool_calls", ())
            ]
            response = Response(
                id="",
                created=0,
                model=body["model"],
                message=AssistantMessage(
                    content=model_turn["message"]["content"] or None,
                    reasoning_content=model_turn["message"].get("reasoning_content"),
                    tool_calls=tool_calls or None,
                ),
                finish_reason=model_turn["finish_reason"],
                usage=Usage(
                    prompt_tokens=len(model_turn["prompt_ids"]),
                    completion_tokens=len(model_turn["ids"]),
                ),
                tokens=TurnTokens(
                    prompt_ids=model_turn["prompt_ids"],
                    completion_ids=model_turn["ids"],
                    completion_logprobs=model_turn["log_probs"],
                ),
            )
            response.raw = serialize_completion(response, body["model"])
            return response

    server.resolve_client = lambda config: Asking()


async def serve(env: Any, write: Any) -> None:
    """Play what is asked for until the input ends."""
    episodes = Episodes(env, write)
    attach(episodes)
    reader = asyncio.StreamReader(limit=2**26)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    async with env.serving():
        while line := await reader.readline():
            episodes.read(json.loads(line))
        await episodes.end()


def main() -> None:
    """Exit code 1 if the taskset cannot be played; the reason is the last line of stderr."""
    taskset = sys.argv[1]
    mode = sys.argv[2:]
    # What packages print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message, ensure_ascii=False) + "\n")
        answers.flush()

    try:
        env = load(taskset)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if mode == ["--rows"]:
        for row in rows(env):
            write(row)
    elif mode != ["--check"]:
        asyncio.run(serve(env, write))


if __name__ == "__main__":
    main()
