"""Foreign environments. gymnasium and reasoning-gym are the real ones where they are installed, else stand-ins with the
same calls; OpenRLHF's agents are classes as its examples have them."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import types

import pytest

from lightppo.errors import ConfigError
from lightppo.plugins.episodes.environments import EnvironmentFailed, Environments

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

envs = types.SimpleNamespace(registration=types.SimpleNamespace(load_env_creator=lambda entry: entry))
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

    package.create_dataset = lambda name, **options: {"chain_sum": Sums}[name](**options)
    package.factory = types.SimpleNamespace(DATASETS={"chain_sum": Sums})
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
    assert (step.reward, step.done, step.metrics) == (1.0, True, {"tagged": 1.0})
    assert asyncio.run(play(environments, row, entry["answer"]))[1][0].reward == 1.0
    assert asyncio.run(play(environments, row, "<answer>none</answer>"))[1][0].reward < 1
    assert asyncio.run(play(environments, row, seed=8))[0] != opening
    with pytest.raises(ConfigError, match=r"no such data set; it has .*chain_sum"):
        Environments("reasoning_gym:nothing")


AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"] + states.get("label", "")}

    async def step(self, states: dict, **kwargs):
        self.seen = states["observation_text"]
        done = states["action_text"] == states["label"]
        reward = torch.tensor([1.0]) if done else torch.tensor(0)
        feedback = (
            "\\n\\nHuman: [CORRECT]\\n</s>" if done else
            "<|im_end|>\\n<|im_start|>user\\nPlease try again.<|im_end|>\\n<|im_start|>assistant\\n"
        )
        self.step_idx += 1
        return {
            "rewards": reward, "scores": reward, "environment_feedback": feedback, "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"turn_count": torch.tensor(self.step_idx), "text": self.seen},
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
