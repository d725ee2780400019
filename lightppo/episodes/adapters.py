"""Environments of other packages and trainers, as classes of our style.

``gym:ID`` and subclasses of ``gymnasium.Env``, ``reasoning_gym:NAME``, ``skyrl_gym:ID`` and
subclasses of its ``BaseTextEnv``, ``textworld:game.z8``, and OpenRLHF's agents as
``openrlhf:file.py``. ``openenv:URL`` is in ``openenv.py``, ``verifiers:TASKSET@VENV`` in
``verifiers_env.py``, agent programs are in ``agents.py``. Each package is imported where its prefix
is given. A row's column ``config`` has options for them.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lightppo.episodes.agents import environment_of, is_program
from lightppo.episodes.env_failures import Step
from lightppo.episodes.openenv import served
from lightppo.episodes.verifiers_env import verifiers
from lightppo.errors import ConfigError
from lightppo.user_code import error_text, is_users_fault, load_python_object

Adapted = tuple[Callable[[], Any], type, str]

# What the texts of OpenRLHF's agents write by hand, and our templates write for them.
_MARKUP = re.compile(
    r"<\|im_start\|>(?:user|assistant|system|tool)?\n?|<\|im_end\|>\n?|</?s>|\n\n(?:Human|Assistant): ?"
)
_MOST_SEED = 2**31 - 1
_GAME = re.compile(r"\.z[1-8]$|\.tw-pddl$")
_GAME_PROMPT = re.compile(r"\n>[^\n]*\Z")  # where the game waits for a command, and its status line


def adapted(prefix: str, name: str) -> Adapted:
    """Return what ``--env PREFIX:REST`` makes, its class and its name."""
    makers = {
        "gym": _gym,
        "reasoning_gym": _reasoning_gym,
        "skyrl_gym": _skyrl_gym,
        "textworld": _textworld,
        "openenv": _openenv,
        "verifiers": verifiers,
        "openrlhf": _openrlhf,
    }
    return makers[prefix](name)


def adapter_of(target: Any) -> Adapted | None:
    """Return the maker, the adapter and its contract for a class of another style, given as ``file.py:Class``."""
    if not isinstance(target, type):
        return None
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and issubclass(target, gymnasium.Env):
        return partial(GymEnvironment, target), GymEnvironment, "lightppo"
    skyrl_base = getattr(sys.modules.get("skyrl_gym.envs.base_text_env"), "BaseTextEnv", None)
    if skyrl_base is not None and issubclass(target, skyrl_base):
        return partial(SkyRLEnvironment, target), SkyRLEnvironment, "lightppo"
    if is_program(target):
        option = f"--env {target.__name__}"
        _installed(
            "openenv.core.harness.capture", f"{option}: an agent program asks openenv's server"
        )
        return (environment_class := environment_of(target)), environment_class, "lightppo"
    if _is_agent(target):
        return partial(_make_agent, target), OpenRLHFAgent, "lightppo"
    return None


def _installed(module_name: str, option: str) -> Any:
    """Return a package; ConfigError says how to install it."""
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        package_name = module_name.partition(".")[0].replace("_", "-")
        raise ConfigError(f"{option}: {error}; pip install {package_name}") from error


def _numbers_of(info: Mapping[Any, Any]) -> dict[str, float]:
    """Return the numbers of what an environment tells beside the observation."""
    return {
        str(metric_name): float(metric_value)
        for metric_name, metric_value in info.items()
        if isinstance(metric_value, (bool, int, float))
    }


# --- gymnasium


class GymEnvironment:
    """Play an environment of gymnasium by text: the model's turn is the action.

    For a discrete action space the last whole number of the turn counts; without one the model is asked again.
    """

    def __init__(self, make_environment: Callable[[], Any]) -> None:
        self._env = make_environment()
        space_type = type(self._env.action_space).__name__
        if space_type not in ("Text", "Discrete"):
            raise TypeError(
                f"actions of the space {space_type} cannot be told by text; use Text or Discrete"
            )

    def reset(self, seed: int, **columns: Any) -> str:
        """Return the first observation."""
        return self._text(self._env.reset(seed=seed % _MOST_SEED)[0])

    def step(self, text: str) -> Step:
        """Return one action."""
        action_space = self._env.action_space
        action = text.strip()
        if type(action_space).__name__ == "Discrete":
            numbers = re.findall(r"-?\d+", text)
            lowest = int(action_space.start)
            highest = int(action_space.start + action_space.n) - 1
            # Python may refuse to read a number of very many digits, and no action has 20.
            last_number = numbers[-1] if numbers and len(numbers[-1]) < 20 else None
            if last_number is None or not lowest <= int(last_number) <= highest:
                instruction = f"Answer with a whole number from {lowest} to {highest}."
                return Step(instruction, metrics={"invalid_action": 1.0})
            action = int(last_number)
        observation, reward, terminated, truncated, info = self._env.step(action)
        done = bool(terminated or truncated)
        return Step(self._text(observation), reward, done, _numbers_of(info))

    def close(self) -> None:
        """End it."""
        self._env.close()

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, str) and self._env.render_mode == "ansi":
            return self._env.render()
        return str(observation)


def _registered(name: str, find: Callable[[str], Any], option: str) -> tuple[str, Any]:
    """Return the id in gymnasium's ``ID`` or ``MODULE:ID``, where the module registers it, and what is found by it."""
    module_name, _, environment_id = name.rpartition(":")
    try:
        if module_name:
            importlib.import_module(module_name)
        return environment_id, find(environment_id)
    except BaseException as error:
        if not is_users_fault(error):
            raise
        raise ConfigError(f"{option}: {error_text(error)}") from error


def _gym(name: str) -> Adapted:
    option = f"--env gym:{name}"
    gymnasium = _installed("gymnasium", option)

    def find(environment_id: str) -> tuple[Any, Any]:
        gym_spec = gymnasium.spec(environment_id)
        creator = gym_spec.entry_point
        if not callable(creator):
            creator = gymnasium.envs.registration.load_env_creator(creator)
        return gym_spec, creator

    environment_id, (gym_spec, creator) = _registered(name, find, option)
    make_options = {}
    if "ansi" in (getattr(creator, "metadata", None) or {}).get("render_modes", ()):
        make_options["render_mode"] = "ansi"
    return (
        partial(GymEnvironment, partial(gymnasium.make, gym_spec, **make_options)),
        GymEnvironment,
        environment_id,
    )


# --- reasoning-gym


class ReasoningGymEnvironment:
    """Ask one question of reasoning-gym, made from the seed; the answer ends the episode, and is scored by its verifier."""

    def __init__(self, package: Any, dataset_name: str) -> None:
        self._package = package
        self._name = dataset_name

    def reset(self, seed: int, **columns: Any) -> str:
        """Return a question; a column ``config`` has options of the data set."""
        dataset_options = dict(columns.get("config") or {})
        if self._name == "composite":
            dataset_options["datasets"] = self._parts(dataset_options.get("datasets"))
        self._dataset = self._package.create_dataset(
            self._name, size=1, seed=seed % _MOST_SEED, **dataset_options
        )
        self._entry = self._dataset[0]
        return f"{self._entry['question']}\n\nGive the final answer as <answer>…</answer>."

    def step(self, text: str) -> Step:
        """Return the answer: what stands in the last tag, else the whole text."""
        answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        answer = (answers[-1] if answers else text).strip()
        score = self._score(answer)
        metrics = {"tagged": float(bool(answers)), "unreadable": float(score is None)}
        return Step(None, score or 0.0, done=True, metrics=metrics)

    def _score(self, answer: str) -> float | None:
        """``None``: the scorer, which works for the right answer, cannot read this one; some raise then."""
        try:
            return float(self._dataset.score_answer(answer, entry=self._entry))
        except Exception:
            self._dataset.score_answer(str(self._entry["answer"]), entry=self._entry)
            return None

    def _parts(self, datasets: Any) -> list[Any]:
        """Return the data sets of ``composite``: names, or objects with ``name``, ``weight`` and ``config``."""
        if not isinstance(datasets, (list, tuple)) or not datasets:
            raise ValueError(
                'composite needs a column config such as {"datasets": [{"name": "chain_sum", "weight": 2}, "gcd"]}'
            )
        dataset_parts = [
            {"name": dataset} if isinstance(dataset, str) else dict(dataset) for dataset in datasets
        ]
        make_part = self._package.composite.DatasetSpec
        return [
            make_part(
                dataset_part["name"],
                dataset_part.get("weight") or 1,
                dataset_part.get("config") or {},
            )
            for dataset_part in dataset_parts
        ]


def _reasoning_gym(dataset_name: str) -> Adapted:
    package = _installed("reasoning_gym", f"--env reasoning_gym:{dataset_name}")
    dataset_names = getattr(package.factory, "DATASETS", {dataset_name: None})
    if dataset_name not in dataset_names:
        raise ConfigError(
            f"--env reasoning_gym:{dataset_name}: no such data set; it has {', '.join(sorted(dataset_names))}"
        )
    make_environment = partial(ReasoningGymEnvironment, package, dataset_name)
    return make_environment, ReasoningGymEnvironment, dataset_name


# --- skyrl-gym


class SkyRLEnvironment:
    """Play a ``BaseTextEnv`` of skyrl-gym.

    Its constructor gets the column ``config`` as ``env_config``, and the row's other columns but
    ``prompt`` as ``extras``. What ``init`` adds to the row's messages opens the episode.
    """

    def __init__(self, make_environment: Callable[..., Any]) -> None:
        self._make = make_environment
        self._env: Any = None

    def reset(self, prompt: Any = None, config: Any = None, **columns: Any) -> list[Any] | None:
        """Make the environment of the row, and call its ``init``."""
        from omegaconf import OmegaConf  # skyrl-gym needs it, too

        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}] if prompt else []
        self._env = self._make(env_config=OmegaConf.create(config or {}), extras=columns)
        opening_messages, _ = self._env.init(copy.deepcopy(prompt or []))
        prompt_length = len(prompt or [])
        if opening_messages[:prompt_length] != (prompt or []):
            raise ValueError("init changes the row's messages; it may only add to them")
        return opening_messages[prompt_length:] or None

    def step(self, text: str) -> Step:
        """Return one turn."""
        output = self._env.step(text)
        if output.get("postprocessed_action") not in (None, text):
            raise ValueError(
                "step replaces what the model said by postprocessed_action; only the tokens that "
                "were sampled can be trained"
            )
        done = bool(output["done"])
        metrics = _numbers_of(output.get("metadata") or {})
        if done:
            metrics |= _numbers_of(self._env.get_metrics())
        return Step(output["observations"] or None, output["reward"], done, metrics)

    def close(self) -> None:
        """End it."""
        if self._env is not None:
            self._env.close()


def _skyrl_gym(name: str) -> Adapted:
    option = f"--env skyrl_gym:{name}"
    package = _installed("skyrl_gym", option)
    environment_id, _ = _registered(name, package.spec, option)
    return (
        partial(SkyRLEnvironment, partial(package.make, environment_id)),
        SkyRLEnvironment,
        environment_id,
    )


# --- TextWorld


class TextWorldEnvironment:
    """Play a game of TextWorld: the last line of the model's turn is the command.

    The reward of a turn is the score that it gained, as a share of the highest score if the game
    tells that. Of a folder of games, the column ``game`` names one. ``{"commands": true}`` in the
    column ``config`` shows the commands that the game takes.
    """

    # Threads may play different games, but the package reads all of them with one parser.
    _one_at_a_time = threading.Lock()

    def __init__(self, package: Any, game_path: Path) -> None:
        self._package = package
        self._path = game_path
        self._env: Any = None

    def reset(self, seed: int, game: str = "", config: Any = None, **columns: Any) -> str:
        """Return the first observation."""
        self._shows = bool((config or {}).get("commands"))
        info_names = ("won", "lost", "score", "max_score", "objective")
        requested_infos = dict.fromkeys([*info_names, *["admissible_commands"] * self._shows], True)
        game_path = self._path
        if game_path.is_dir():
            if not game:
                raise ValueError(
                    f"{game_path} is a folder: the row's column game must name one in it"
                )
            game_path /= game
        with self._one_at_a_time:
            self._env = self._package.start(
                str(game_path), self._package.EnvInfos(**requested_infos)
            )
            self._env.seed(seed % _MOST_SEED)
            game_state = self._env.reset()
        self._score = game_state.score or 0
        return self._observation(
            game_state, game_state.feedback[self._begin(game_state) :], self._shows
        )

    def step(self, text: str) -> Step:
        """Return one command."""
        command_lines = text.strip().splitlines() or [""]
        with self._one_at_a_time:
            game_state, score, done = self._env.step(command_lines[-1].removeprefix(">").strip())
        if score is None:
            raise ValueError("the game tells no score, which would be the reward")
        reward = (score - self._score) / (game_state.max_score or 1)
        self._score = score
        metrics = {
            metric_name: float(bool(game_state[metric_name]))
            for metric_name in ("won", "lost")
            if metric_name in game_state
        }
        observation = self._observation(game_state, game_state.feedback, self._shows and not done)
        return Step(observation, reward, bool(done), metrics if done else {})

    def close(self) -> None:
        """End the game."""
        if self._env is not None:
            self._env.close()

    @staticmethod
    def _begin(game_state: Any) -> int:
        """Return where the text begins that says what to do: a picture of letters stands before it."""
        if game_state.objective:
            return max(game_state.feedback.find(game_state.objective), 0)
        return 0

    @staticmethod
    def _observation(game_state: Any, text: str, with_commands: bool) -> str:
        text = _GAME_PROMPT.sub("", text).strip()
        if with_commands and game_state.admissible_commands:
            text += f"\n\nCommands: {', '.join(game_state.admissible_commands)}"
        return text


def _textworld(name: str) -> Adapted:
    option = f"--env textworld:{name}"
    game_path = Path(name)
    package = _installed("textworld", option)
    candidates = list(game_path.iterdir()) if game_path.is_dir() else [game_path]
    if not any(candidate.is_file() and _GAME.search(candidate.name) for candidate in candidates):
        raise ConfigError(
            f"{option}: no game there; name a file .z1 to .z8 or .tw-pddl, or a folder of such "
            "files (tw-make custom --output games/first.z8 makes one)"
        )
    return partial(TextWorldEnvironment, package, game_path), TextWorldEnvironment, game_path.stem


# --- OpenEnv


def _openenv(url: str) -> Adapted:
    option = f"--env openenv:{url}"
    if not re.match(r"(?:https?|wss?)://.", url):
        raise ConfigError(f"{option}: give the server's address, such as http://127.0.0.1:8000")
    return served(_installed("openenv.core", option), url, option)


# --- OpenRLHF


class OpenRLHFAgent:
    """Play an ``AgentInstance`` of OpenRLHF's ``agent_func``.

    It reads the columns ``prompt`` and ``label``. What its ``reset`` returns beyond the prompt opens the episode. Chat
    markup in its feedback is left out: the feedback becomes a message of the user, by the model's own template.
    ``sampling_params`` and images are not passed on.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._text = ""
        self._label: Any = None

    async def reset(self, **columns: Any) -> str | None:
        """Begin with the row's prompt."""
        prompt = _plain_prompt(columns.get("prompt"))
        self._label = columns.get("label")
        states = {"observation": prompt, "prompt": prompt, "label": self._label}
        self._text = str((await _awaited(self._agent.reset(states)))["observation"])
        added_text = self._text.removeprefix(prompt)
        return _without_markup(added_text) or None

    async def step(self, text: str) -> Step:
        """Return one turn."""
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
            str(metric_name): metric_value
            for metric_name, raw_number in {
                **(result.get("extra_logs") or {}),
                "scores": result.get("scores"),
            }.items()
            if isinstance(metric_value := _number(raw_number), (int, float))
        }
        done = bool(result["done"])
        reward = _number(result["rewards"])
        return Step(_without_markup(feedback) or None, reward, done, metrics)


def _openrlhf(spec: str) -> Adapted:
    option = f"--env openrlhf:{spec}"
    with _stand_in():
        agent = load_python_object(spec, "AgentInstance", option=option)
    if not _is_agent(agent):
        raise ConfigError(f"{option}: {agent!r} is no subclass of AgentInstanceBase")
    return partial(_make_agent, agent), OpenRLHFAgent, agent.__name__


async def _make_agent(agent_class: type) -> OpenRLHFAgent:
    """OpenRLHF's examples have ``async def __init__``."""
    agent = agent_class.__new__(agent_class)
    await _awaited(agent_class.__init__(agent))
    return OpenRLHFAgent(agent)


def _is_agent(target: Any) -> bool:
    return isinstance(target, type) and any(
        base_class.__name__ == "AgentInstanceBase" for base_class in target.__mro__[1:]
    )


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    """Return what a file of an agent imports, where OpenRLHF is not installed."""
    if importlib.util.find_spec("openrlhf") is not None:
        yield
        return
    module_names = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")
    modules = {class_name: ModuleType(class_name) for class_name in module_names}
    for class_name in ("AgentInstanceBase", "AgentExecutorBase"):
        setattr(modules[module_names[2]], class_name, type(class_name, (), {}))
    executor = type("MultiTurnAgentExecutor", (modules[module_names[2]].AgentExecutorBase,), {})
    modules[module_names[2]].MultiTurnAgentExecutor = executor
    modules[module_names[0]].utils = modules[module_names[1]]
    modules[module_names[1]].agent = modules[module_names[2]]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for class_name in module_names:
            sys.modules.pop(class_name, None)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _number(raw_number: Any) -> Any:
    """Return the number of a tensor with one number."""
    return raw_number.item() if hasattr(raw_number, "item") else raw_number


def _plain_prompt(prompt: Any) -> str:
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    return "" if prompt is None else str(prompt)


def _without_markup(text: str) -> str:
    return _MARKUP.sub("", text).strip()
