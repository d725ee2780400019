"""Foreign environments. The packages are the real ones where they are installed, otherwise stand-ins
with the same calls; OpenRLHF's agents are classes as its examples have them."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import sys
import types

import pytest

from lightppo.episodes.adapters import ReasoningGymEnvironment
from lightppo.episodes.environments import EnvironmentFailed, Environments
from lightppo.errors import ConfigError

# gymnasium's protocol, for machines without it
GYMNASIUM = """
import types

class Env:
    metadata = {"render_modes": []}
    render_mode = None
    def reset(self, *, seed=None, options=None): ...
    def close(self): ...

class Text:
    def __init__(self, max_length): ...

class Discrete:
    def __init__(self, n, start=0): self.n, self.start = n, start

spaces = types.SimpleNamespace(Text=Text, Discrete=Discrete)
_known = {}

def register(id, entry_point):
    _known[id] = types.SimpleNamespace(entry_point=entry_point)

def spec(id):
    if id not in _known: raise KeyError(f"Environment `{id}` doesn't exist.")
    return _known[id]

def make(spec, **options):
    return spec.entry_point(**options)
"""

GAMES = """
import gymnasium

class Echo(gymnasium.Env):
    def __init__(self):
        self.action_space = gymnasium.spaces.Text(100)
        self.observation_space = gymnasium.spaces.Text(100)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"seed {seed}", {}
    def step(self, action):
        if action == "break": raise OSError("no game")
        return action.upper(), 0.5, action == "end", False, {"length": len(action), "text": action}

class Walk(gymnasium.Env):
    metadata = {"render_modes": ["ansi"]}
    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.action_space = gymnasium.spaces.Discrete(3, start=1)
        self.observation_space = gymnasium.spaces.Discrete(10)
    def reset(self, *, seed=None, options=None):
        self.at = 0
        return self.at, {}
    def step(self, action):
        self.at += action
        return self.at, float(action), False, self.at > 4, {}
    def render(self): return "." * self.at + "@"

class Body(Echo):
    def __init__(self):
        super().__init__()
        class Box: ...
        self.action_space = Box()

gymnasium.register(id="lightppo/Walk-v0", entry_point=Walk)
"""


@pytest.fixture
def games(tmp_path, monkeypatch):
    """A file with environments; its module registers one."""
    if importlib.util.find_spec("gymnasium") is None:
        (tmp_path / "gymnasium.py").write_text(GYMNASIUM)
    (tmp_path / "games_of_tests.py").write_text(GAMES)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path / "games_of_tests.py"
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("gymnasium", "games_of_tests"):
            del sys.modules[name]


async def play(environments, row, *texts, seed=7):
    session = await environments.open(row, seed=seed)
    try:
        return session.opening, [await session.step(text) for text in texts]
    finally:
        await session.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_class_of_gymnasium(games, workers):
    environments = Environments(f"{games}:Echo", timeout=60, workers=workers)
    try:
        assert (environments.names, environments.tools("Echo")) == (["Echo"], [])
        opening, (first, last) = asyncio.run(play(environments, {"any": 1}, " hi ", "end"))
        with pytest.raises(EnvironmentFailed, match="no game"):
            asyncio.run(play(environments, {}, "break"))
    finally:
        environments.end()
    assert opening == "seed 7"
    assert (first.observation, first.reward, first.done) == ("HI", 0.5, False)
    assert first.metrics == {"length": 2.0}
    assert last.done


def test_a_registered_environment_of_gymnasium(games):
    environments = Environments("gym:games_of_tests:lightppo/Walk-v0", timeout=60)
    assert environments.names == ["lightppo/Walk-v0"]
    texts = ("I go 1, then 2", "nowhere", "9", f"{'9' * 5000}", "3")
    opening, steps = asyncio.run(play(environments, {}, *texts))
    assert opening == "@"
    assert [step.observation for step in steps] == [
        "..@", *["Answer with a whole number from 1 to 3."] * 3, ".....@",
    ]  # fmt: skip
    assert [step.reward for step in steps] == [2.0, 0.0, 0.0, 0.0, 3.0]
    assert [step.done for step in steps] == [False] * 4 + [True]


def test_what_gymnasium_cannot_give(games):
    importlib.import_module("games_of_tests")
    with pytest.raises(ConfigError, match="gym:lightppo/Nothing"):
        Environments("gym:lightppo/Nothing-v0")
    environments = Environments(f"{games}:Body", timeout=60)
    with pytest.raises(EnvironmentFailed, match="space Box cannot be told by text") as caught:
        asyncio.run(play(environments, {}))
    assert caught.value.place == "constructor"


def test_the_real_gymnasium():
    pytest.importorskip("gymnasium")
    environments = Environments("gym:FrozenLake-v1", timeout=60)
    opening, (step,) = asyncio.run(play(environments, {}, "go 2"))
    assert "SFFF" in opening.replace("\x1b[41mS\x1b[0m", "S")
    assert (step.reward, step.done) == (0.0, False)
    assert step.metrics.keys() >= {"prob"}


@pytest.fixture
def reasoning(monkeypatch):
    """The package, or one with the same calls."""
    if importlib.util.find_spec("reasoning_gym") is not None:
        return
    package = types.ModuleType("reasoning_gym")

    class Sums:
        def __init__(self, seed, size, max_terms=6):
            self.seed = seed

        def __getitem__(self, index):
            terms = [str(self.seed % 10), "3"]
            return {
                "question": f"State the final answer to {' + '.join(terms)} =",
                "answer": str(int(terms[0]) + 3),
                "metadata": {},
            }

        def score_answer(self, answer, entry):
            return 1.0 if answer == entry["answer"] else 0.0

    class Factors(Sums):
        def score_answer(self, answer, entry):
            return 1.0 if int(answer) == int(entry["answer"]) else 0.0

    class Composite:
        def __init__(self, seed, size, datasets):
            self.parts = [kinds[one.name](seed, size, **one.config) for one in datasets]
            assert all(one.weight > 0 for one in datasets)

        def __getitem__(self, index):
            return self.parts[-1][index]

        def score_answer(self, answer, entry):
            return self.parts[-1].score_answer(answer, entry)

    kinds = {"chain_sum": Sums, "prime_factorization": Factors, "composite": Composite}
    package.create_dataset = lambda name, **options: kinds[name](**options)
    package.factory = types.SimpleNamespace(DATASETS=kinds)

    @dataclasses.dataclass
    class DatasetSpec:
        name: str
        weight: float
        config: dict

    package.composite = types.SimpleNamespace(DatasetSpec=DatasetSpec)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)


def test_reasoning_gym(reasoning):
    import reasoning_gym

    environments = Environments("reasoning_gym:chain_sum", timeout=60)
    row = {"config": {"max_terms": 3}}
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=7, max_terms=3)[0]
    right = f"It is <answer>0</answer>, no: <answer> {entry['answer']} </answer>."
    opening, (step,) = asyncio.run(play(environments, row, right))
    assert opening.startswith(entry["question"])
    assert "<answer>" in opening
    assert (step.reward, step.done, step.metrics) == (
        1.0,
        True,
        {"tagged": 1.0, "unreadable": 0.0},
    )
    assert asyncio.run(play(environments, row, entry["answer"]))[1][0].reward == 1.0
    assert asyncio.run(play(environments, row, "<answer>none</answer>"))[1][0].reward < 1
    assert asyncio.run(play(environments, row, seed=8))[0] != opening
    with pytest.raises(ConfigError, match=r"no such data set; it has .*chain_sum"):
        Environments("reasoning_gym:nothing")


def test_an_answer_that_the_scorer_cannot_read_is_wrong(reasoning):
    environments = Environments("reasoning_gym:prime_factorization", timeout=60)
    _, (step,) = asyncio.run(play(environments, {}, "<answer>banana</answer>"))
    assert (step.reward, step.metrics["unreadable"]) == (0.0, 1.0)


def test_a_scorer_that_fails_for_the_right_answer_too_is_a_failure():
    class Broken:
        def __getitem__(self, index):
            return {"question": "2 + 2 =", "answer": "4"}

        def score_answer(self, answer, entry):
            return 1 / 0

    package = types.SimpleNamespace(create_dataset=lambda name, **options: Broken())
    environment = ReasoningGymEnvironment(package, "broken")
    environment.reset(seed=1)
    with pytest.raises(ZeroDivisionError):
        environment.step("5")


def test_reasoning_gym_composite(reasoning):
    environments = Environments("reasoning_gym:composite", timeout=60)
    parts = [
        "prime_factorization",
        {"name": "chain_sum", "weight": 1e9, "config": {"max_terms": 3}},
    ]
    opening, _ = asyncio.run(play(environments, {"config": {"datasets": parts}}, "0"))
    assert opening.startswith("State the final answer")
    with pytest.raises(
        EnvironmentFailed, match=r'composite needs a column config such as {"datasets"'
    ):
        asyncio.run(play(environments, {}, "0"))


AGENT = """
import numpy
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"] + states.get("label", "")}

    async def step(self, states: dict, **kwargs):
        self.seen = states["observation_text"]
        done = states["action_text"] == states["label"]
        reward = numpy.array([1.0]) if done else numpy.array(0)
        feedback = (
            "\\n\\nHuman: [CORRECT]\\n</s>" if done else
            "<|im_end|>\\n<|im_start|>user\\nPlease try again.<|im_end|>\\n<|im_start|>assistant\\n"
        )
        self.step_idx += 1
        return {
            "rewards": reward, "scores": reward, "environment_feedback": feedback, "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"turn_count": numpy.array(self.step_idx), "text": self.seen},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)


class Plain(AgentInstanceBase):
    def __init__(self): ...
    async def reset(self, states: dict, **kwargs): return states
    async def step(self, states: dict, **kwargs): return {"rewards": states["observation_text"]}
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_agents_of_openrlhf(tmp_path, workers):
    path = tmp_path / "agent_func.py"
    path.write_text(AGENT)
    environments = Environments(f"openrlhf:{path}", timeout=60, workers=workers)
    row = {"prompt": [{"role": "user", "content": "Q"}], "label": "yes"}
    try:
        opening, (first, last) = asyncio.run(play(environments, row, "no", "yes"))
        assert "openrlhf" not in sys.modules
    finally:
        environments.end()
    assert environments.names == ["AgentInstance"]
    assert opening == "yes"
    assert (first.observation, first.reward, first.done) == ("Please try again.", 0.0, False)
    assert first.metrics == {"turn_count": 1.0, "scores": 0.0}
    assert (last.observation, last.reward, last.done) == ("[CORRECT]", 1.0, True)
    plain = Environments(f"openrlhf:{path}:Plain", timeout=60)
    with pytest.raises(EnvironmentFailed, match="KeyError"):
        asyncio.run(play(plain, {"prompt": "Q", "label": "x"}, "a"))
    with pytest.raises(ConfigError, match="is no subclass of AgentInstanceBase"):
        Environments(f"openrlhf:{path}:AgentExecutor")


# skyrl-gym's protocol (0.4), and what it takes of omegaconf, for machines without them
SKYRL = {
    "skyrl_gym/__init__.py": """
from skyrl_gym.core import Env
from skyrl_gym.envs.registration import make, register, registry, spec
""",
    "skyrl_gym/core.py": """
class Env:
    def step(self, action): raise NotImplementedError
    def init(self, *kwargs): raise NotImplementedError
    def close(self): pass
""",
    "skyrl_gym/envs/__init__.py": "",
    "skyrl_gym/envs/registration.py": """
import importlib, types
from skyrl_gym.core import Env

registry = {}

def register(id, entry_point=None, kwargs=None):
    registry[id] = types.SimpleNamespace(id=id, entry_point=entry_point, kwargs=kwargs or {})

def spec(env_id):
    if registry.get(env_id) is None: raise Exception(f"No registered env with id: {env_id}")
    return registry[env_id]

def make(id, **kwargs):
    creator = spec(id).entry_point
    if isinstance(creator, str):
        module, name = creator.split(":")
        creator = getattr(importlib.import_module(module), name)
    env = creator(**{**spec(id).kwargs, **kwargs})
    if not isinstance(env, Env): raise TypeError("The environment must inherit from skyrl_gym.Env")
    return env
""",
    "skyrl_gym/envs/base_text_env.py": """
from skyrl_gym import Env

class BaseTextEnvStepOutput(dict):
    pass

class BaseTextEnv(Env):
    def __init__(self):
        self.turns, self.max_turns = 0, 1
    def init(self, prompt): return prompt, {}
    def get_metrics(self): return {}
""",
    "omegaconf.py": """
class OmegaConf:
    @staticmethod
    def create(values):
        import types
        return types.SimpleNamespace(**values)
""",
}

TEXT_GAMES = """
import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Multiply(BaseTextEnv):
    closed = 0

    def __init__(self, env_config=None, extras={}):
        super().__init__()
        assert "reward_spec" in extras, "reward_spec field is required"
        assert "prompt" not in extras and "config" not in extras
        self.truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras["max_turns"]
        self.hint = env_config.hint

    def init(self, prompt):
        if self.hint == "rewrite":
            return [{"role": "user", "content": "another"}], {}
        return [*prompt, {"role": "user", "content": self.hint}], {}

    def step(self, action):
        self.turns += 1
        done = action == self.truth or self.turns >= self.max_turns
        again = [] if done else [{"role": "user", "content": "again"}]
        output = BaseTextEnvStepOutput(
            observations=again, reward=float(action == self.truth), done=done,
            metadata={"parsed": action, "length": len(action)},
        )
        if action == "long":
            output["postprocessed_action"] = "l"
        return output

    def close(self):
        Multiply.closed += 1

    def get_metrics(self):
        return {"steps": self.turns, "last": "x"}

skyrl_gym.register(id="multiply", entry_point=f"{__name__}:Multiply")
"""


@pytest.fixture
def text_games(tmp_path, monkeypatch):
    """A file with an environment of skyrl-gym, which registers it."""
    if importlib.util.find_spec("skyrl_gym") is None:
        for name, text in SKYRL.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    (tmp_path / "text_games_of_tests.py").write_text(TEXT_GAMES)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path / "text_games_of_tests.py"
    registration = sys.modules.get("skyrl_gym.envs.registration")
    if registration is not None:
        registration.registry.pop("multiply", None)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("skyrl_gym", "omegaconf", "text_games_of_tests"):
            del sys.modules[name]


MULTIPLY = {
    "prompt": [{"role": "user", "content": "6 * 7"}],
    "reward_spec": {"ground_truth": "42"},
    "max_turns": 3,
    "config": {"hint": "whole numbers"},
}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_registered_environment_of_skyrl_gym(text_games, workers):
    environments = Environments(
        "skyrl_gym:text_games_of_tests:multiply", timeout=60, workers=workers
    )
    try:
        opening, (first, last) = asyncio.run(play(environments, MULTIPLY, "41", "42"))
        assert (environments.names, environments.tools("multiply")) == (["multiply"], [])
    finally:
        environments.end()
    assert opening == [{"role": "user", "content": "whole numbers"}]
    assert first.observation == [{"role": "user", "content": "again"}]
    assert (first.reward, first.done, first.metrics) == (0.0, False, {"length": 2.0})
    assert (last.observation, last.reward, last.done) == (None, 1.0, True)
    assert last.metrics == {"length": 2.0, "steps": 2.0}


def test_a_class_of_skyrl_gym(text_games):
    environments = Environments(f"{text_games}:Multiply", timeout=60)
    row = MULTIPLY | {"prompt": "6 * 7"}  # a prompt that is no chat
    opening, (step,) = asyncio.run(play(environments, row, "42"))
    assert (opening[0]["content"], step.reward, step.done) == ("whole numbers", 1.0, True)
    rewritten = MULTIPLY | {"config": {"hint": "rewrite"}}
    with pytest.raises(EnvironmentFailed, match="init changes the row's messages"):
        asyncio.run(play(environments, rewritten))
    with pytest.raises(EnvironmentFailed, match="postprocessed_action"):
        asyncio.run(play(environments, MULTIPLY, "long"))
    with pytest.raises(EnvironmentFailed, match="reward_spec field is required"):
        asyncio.run(play(environments, {"prompt": "6 * 7"}))
    with pytest.raises(ConfigError, match=r"skyrl_gym:none: .*No registered env with id: none"):
        Environments("skyrl_gym:none")


def test_the_real_skyrl_gym():
    pytest.importorskip("skyrl_gym")
    environments = Environments("skyrl_gym:gsm8k_multi_turn", timeout=60)
    row = {"prompt": "2 + 2?", "reward_spec": {"ground_truth": "4"}, "max_turns": 3}
    opening, (none, wrong, right) = asyncio.run(play(environments, row, "no", "#### 5", "#### 4"))
    assert opening is None
    assert "#### ANSWER" in none.observation[0]["content"]
    assert (none.reward, wrong.reward) == (0.0, pytest.approx(0.2 / 3))
    assert (right.observation, right.reward, right.done) == (None, 1.0, True)
    assert right.metrics == {"steps": 3.0}


# TextWorld's protocol (1.7): missing entries of a state are None, a step's number is the whole score
TEXTWORLD = """
import os

INFOS = ("won", "lost", "score", "max_score", "objective", "admissible_commands", "moves")

class EnvInfos:
    def __init__(self, **kwargs):
        unknown = set(kwargs) - set(INFOS)
        if unknown: raise ValueError(f"Unknown information requested: {sorted(unknown)}.")
        self.asked = [name for name in INFOS if kwargs.get(name)]

class GameState(dict):
    def __getattr__(self, name): return self.get(name)

class Environment:
    def __init__(self, path, infos):
        self.silent = "silent" in path
        self.infos = infos
        self.closed = False
    def seed(self, seed=None): self.seeded = seed
    def reset(self):
        self.at, self.score = 0, 0
        return self._state("   $$$ $$\\n$$\\n\\nGo east, twice.\\n\\n-= Attic =-\\n", False)
    def step(self, command):
        assert not self.closed
        good = command == "go east"
        self.at += good
        self.score = None if self.silent else self.at
        state = self._state("You go." if good else f"What is {command}?", self.at == 2)
        return state, self.score, self.at == 2
    def close(self): self.closed = True
    def _state(self, text, won):
        told = {
            "won": won, "lost": False, "score": self.score, "max_score": 2,
            "objective": "Go east, twice.", "admissible_commands": ["go east", "look"],
        }
        state = {name: value for name, value in told.items() if name in self.infos.asked}
        prompt = "\\n>" + " " * 40 + "-= Attic =-0/1"
        return GameState(feedback=text + "\\n" + prompt, **state)

def start(path, request_infos=None, wrappers=[]):
    if not os.path.isfile(path): raise IOError(f"Unable to find game '{path}'.")
    return Environment(path, request_infos or EnvInfos())
"""


@pytest.fixture
def text_worlds(tmp_path, monkeypatch):
    """A folder with two games of a stand-in for TextWorld."""
    package = types.ModuleType("textworld")
    exec(TEXTWORLD, package.__dict__)
    monkeypatch.setitem(sys.modules, "textworld", package)
    for name in ("east.z8", "silent.z8", "notes.json"):
        (tmp_path / name).write_text("")
    return tmp_path


def test_a_game_of_textworld(text_worlds):
    environments = Environments(f"textworld:{text_worlds}/east.z8", timeout=60)
    assert (environments.names, environments.tools("east")) == (["east"], [])
    texts = ("dance", "I think.\n> go east", "", "go east\n")
    opening, steps = asyncio.run(play(environments, {"prompt": "p"}, *texts))
    assert opening == "Go east, twice.\n\n-= Attic =-"
    assert [step.observation for step in steps] == [
        "What is dance?", "You go.", "What is ?", "You go.",
    ]  # fmt: skip
    assert [step.reward for step in steps] == [0.0, 0.5, 0.0, 0.5]
    assert [step.done for step in steps] == [False, False, False, True]
    assert [step.metrics for step in steps] == [{}, {}, {}, {"won": 1.0, "lost": 0.0}]


def test_games_of_a_folder_and_their_commands(text_worlds):
    environments = Environments(f"rooms=textworld:{text_worlds}", timeout=60)
    assert environments.names == ["rooms"]
    row = {"game": "east.z8", "config": {"commands": True}}
    opening, (first, last) = asyncio.run(play(environments, row, "go east", "go east"))
    assert opening.endswith("-= Attic =-\n\nCommands: go east, look")
    assert first.observation == "You go.\n\nCommands: go east, look"
    assert last.observation == "You go."
    with pytest.raises(EnvironmentFailed, match="the row's column game must name one"):
        asyncio.run(play(environments, {}))
    with pytest.raises(EnvironmentFailed, match="Unable to find game"):
        asyncio.run(play(environments, {"game": "west.z8"}))
    with pytest.raises(EnvironmentFailed, match="tells no score"):
        asyncio.run(play(environments, {"game": "silent.z8"}, "look"))
    for name in ("notes.json", "west.z8"):
        with pytest.raises(ConfigError, match=r"no game there; name a file .z1 to .z8"):
            Environments(f"textworld:{text_worlds}/{name}")


def test_the_real_textworld(tmp_path):
    textworld = pytest.importorskip("textworld")
    options = textworld.GameOptions()
    options.seeds, options.nb_rooms, options.nb_objects, options.quest_length = 1234, 2, 4, 2
    options.path = str(tmp_path / "game.z8")
    path, game = textworld.make(options)
    environments = Environments(f"textworld:{path}", timeout=60)
    commands = game.metadata["walkthrough"]
    row = {"config": {"commands": True}}

    async def side_by_side():
        return await asyncio.gather(
            *(play(environments, row, "dance", *commands) for _ in range(8))
        )

    played = asyncio.run(side_by_side())
    assert len({opening for opening, _ in played}) == 1
    opening, (dance, *steps) = played[0]
    assert opening.startswith(game.objective)
    assert commands[0] in opening.rpartition("Commands: ")[2]
    assert dance.observation.startswith("That's not a verb I recognise.\n\nCommands: ")
    assert sum(step.reward for step in steps) == 1.0
    assert (steps[-1].done, steps[-1].metrics) == (True, {"won": 1.0, "lost": 0.0})


@pytest.mark.parametrize("prefix", ["gym", "reasoning_gym", "skyrl_gym", "textworld", "openenv"])
def test_a_package_that_is_not_installed(monkeypatch, prefix):
    name = {"gym": "gymnasium", "openenv": "openenv.core"}.get(prefix, prefix)
    monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    package = name.partition(".")[0].replace("_", "-")
    with pytest.raises(ConfigError, match=f"--env {prefix}:http.*; pip install {package}$"):
        Environments(f"{prefix}:http://127.0.0.1:1")
