"""Environments of other packages and trainers, as classes of our style.

``gym:ID`` and subclasses of ``gymnasium.Env``, ``reasoning_gym:NAME``, and OpenRLHF's agents as ``openrlhf:file.py``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from lightppo.errors import ConfigError
from lightppo.plugins.episodes.contract import Step
from lightppo.user_code import error_text, load_python_object

Adapted = tuple[Callable[[], Any], type, str]

# What the texts of OpenRLHF's agents write by hand, and our templates write for them.
_MARKUP = re.compile(
    r"<\|im_start\|>(?:user|assistant|system|tool)?\n?|<\|im_end\|>\n?|</?s>|\n\n(?:Human|Assistant): ?"
)
_MOST_SEED = 2**31 - 1


def adapted(prefix: str, rest: str) -> Adapted:
    """What ``--env PREFIX:REST`` makes, its class and its name."""
    return {"gym": _gym, "reasoning_gym": _reasoning_gym, "openrlhf": _openrlhf}[prefix](rest)


def adapter_of(found: Any) -> Adapted | None:
    """For a class of another style, given as ``file.py:Class``: its maker, the adapter, and the contract of that."""
    if not isinstance(found, type):
        return None
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and issubclass(found, gymnasium.Env):
        return partial(GymEnvironment, found), GymEnvironment, "lightppo"
    if _is_agent(found):
        return partial(_make_agent, found), OpenRLHFAgent, "lightppo"
    return None


def _installed(name: str, option: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.replace("_", "-")
        raise ConfigError(f"{option}: {error}; pip install {package}") from error


# --- gymnasium


class GymEnvironment:
    """An environment of gymnasium that is played by text: the model's turn is the action.

    For a discrete action space the last whole number of the turn counts; without one the model is asked again.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._env = make()
        kind = type(self._env.action_space).__name__
        if kind not in ("Text", "Discrete"):
            raise TypeError(
                f"actions of the space {kind} cannot be told by text; use Text or Discrete"
            )

    def reset(self, seed: int, **row: Any) -> str:
        """The first observation."""
        return self._text(self._env.reset(seed=seed % _MOST_SEED)[0])

    def step(self, text: str) -> Step:
        """One action."""
        space, action = self._env.action_space, text.strip()
        if type(space).__name__ == "Discrete":
            numbers = re.findall(r"-?\d+", text)
            first, last = int(space.start), int(space.start + space.n) - 1
            # of more digits than any action, which Python may refuse to read
            number = numbers[-1] if numbers and len(numbers[-1]) < 20 else None
            if number is None or not first <= int(number) <= last:
                ask = f"Answer with a whole number from {first} to {last}."
                return Step(ask, metrics={"invalid_action": 1.0})
            action = int(number)
        observation, reward, terminated, truncated, info = self._env.step(action)
        metrics = {
            str(key): float(value)
            for key, value in info.items()
            if isinstance(value, (bool, int, float))
        }
        return Step(self._text(observation), reward, bool(terminated or truncated), metrics)

    def close(self) -> None:
        """End it."""
        self._env.close()

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, str) and self._env.render_mode == "ansi":
            return self._env.render()
        return str(observation)


def _gym(name: str) -> Adapted:
    option = f"--env gym:{name}"
    gymnasium = _installed("gymnasium", option)
    registration = gymnasium.envs.registration
    try:
        module, _, own = name.rpartition(":")  # gymnasium's own MODULE:ID, which registers it
        if module:
            importlib.import_module(module)
        spec = gymnasium.spec(own)
        creator = registration.load_env_creator(spec.entry_point)
    except Exception as error:
        raise ConfigError(f"{option}: {error_text(error)}") from error
    options = {}
    if "ansi" in (getattr(creator, "metadata", None) or {}).get("render_modes", ()):
        options["render_mode"] = "ansi"
    return partial(GymEnvironment, partial(gymnasium.make, spec, **options)), GymEnvironment, own


# --- reasoning-gym


class ReasoningGymEnvironment:
    """One question of reasoning-gym, made from the seed; the answer ends the episode, and is scored by its verifier."""

    def __init__(self, package: Any, name: str) -> None:
        self._package = package
        self._name = name

    def reset(self, seed: int, **row: Any) -> str:
        """A question; a column ``config`` has options of the data set."""
        options = row.get("config") or {}
        self._dataset = self._package.create_dataset(
            self._name, size=1, seed=seed % _MOST_SEED, **options
        )
        self._entry = self._dataset[0]
        return f"{self._entry['question']}\n\nGive the final answer as <answer>…</answer>."

    def step(self, text: str) -> Step:
        """The answer: what stands in the last tag, else the whole text."""
        answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        answer = (answers[-1] if answers else text).strip()
        score = self._dataset.score_answer(answer, entry=self._entry)
        return Step(None, float(score), done=True, metrics={"tagged": float(bool(answers))})


def _reasoning_gym(name: str) -> Adapted:
    package = _installed("reasoning_gym", f"--env reasoning_gym:{name}")
    known = getattr(package.factory, "DATASETS", {name: None})
    if name not in known:
        raise ConfigError(
            f"--env reasoning_gym:{name}: no such data set; it has {', '.join(sorted(known))}"
        )
    make = partial(ReasoningGymEnvironment, package, name)
    return make, ReasoningGymEnvironment, name


# --- OpenRLHF


class OpenRLHFAgent:
    """An ``AgentInstance`` of OpenRLHF's ``agent_func``.

    It reads the columns ``prompt`` and ``label``. What its ``reset`` returns beyond the prompt opens the episode. Chat
    markup in its feedback is left out: the feedback becomes a message of the user, by the model's own template.
    ``sampling_params`` and images are not passed on.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._text = ""
        self._label: Any = None

    async def reset(self, **row: Any) -> str | None:
        """Begin with the row's prompt."""
        prompt, self._label = _plain_prompt(row.get("prompt")), row.get("label")
        states = {"observation": prompt, "prompt": prompt, "label": self._label}
        self._text = str((await _awaited(self._agent.reset(states)))["observation"])
        new = self._text.removeprefix(prompt)
        return _without_markup(new) or None

    async def step(self, text: str) -> Step:
        """One turn."""
        states = {
            "observation_text": self._text,
            "action_text": text,
            "label": self._label,
            "sampling_params": None,
        }
        result = await _awaited(self._agent.step(states))
        feedback = str(result["environment_feedback"])
        self._text += text + feedback
        metrics = {
            str(key): number
            for key, value in {
                **(result.get("extra_logs") or {}),
                "scores": result.get("scores"),
            }.items()
            if isinstance(number := _number(value), (int, float))
        }
        done, reward = bool(result["done"]), _number(result["rewards"])
        return Step(_without_markup(feedback) or None, reward, done, metrics)


def _openrlhf(spec: str) -> Adapted:
    option = f"--env openrlhf:{spec}"
    with _stand_in():
        agent = load_python_object(spec, "AgentInstance", option=option)
    if not _is_agent(agent):
        raise ConfigError(f"{option}: {agent!r} is no subclass of AgentInstanceBase")
    return partial(_make_agent, agent), OpenRLHFAgent, agent.__name__


async def _make_agent(kind: type) -> OpenRLHFAgent:
    """OpenRLHF's examples have ``async def __init__``."""
    agent = kind.__new__(kind)
    await _awaited(kind.__init__(agent))
    return OpenRLHFAgent(agent)


def _is_agent(found: Any) -> bool:
    return isinstance(found, type) and any(
        base.__name__ == "AgentInstanceBase" for base in found.__mro__[1:]
    )


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    """What a file of an agent imports, where OpenRLHF is not installed."""
    if importlib.util.find_spec("openrlhf") is not None:
        yield
        return
    names = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")
    modules = {name: ModuleType(name) for name in names}
    for name in ("AgentInstanceBase", "AgentExecutorBase"):
        setattr(modules[names[2]], name, type(name, (), {}))
    executor = type("MultiTurnAgentExecutor", (modules[names[2]].AgentExecutorBase,), {})
    modules[names[2]].MultiTurnAgentExecutor = executor
    modules[names[0]].utils, modules[names[1]].agent = modules[names[1]], modules[names[2]]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _number(value: Any) -> Any:
    """Of a tensor with one number, the number."""
    return value.item() if hasattr(value, "item") else value


def _plain_prompt(prompt: Any) -> str:
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    return "" if prompt is None else str(prompt)


def _without_markup(text: str) -> str:
    return _MARKUP.sub("", text).strip()
