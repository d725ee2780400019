"""Classes written for TRL's ``environment_factory`` (1.16), unmodified, by TRL's rules."""

from __future__ import annotations

import asyncio

import pytest

from lightppo.episodes.environments import EnvironmentFailed, Environments

# In the style of TRL's own pages: an environment that owns its data, one that ends by an exception, one by an exception
# that is no text, with an async tool and an async reward.
SOURCE = '''
import random
from lightppo.episodes.environments import EnvFailure

class IncrementEnv:
    made = 0

    def __init__(self):
        IncrementEnv.made += 1

    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.kwargs = sorted(kwargs)
        self.target = random.randint(1, 1000)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    def add(self, value: str) -> dict:
        """
        Anything.

        Args:
            value: A value
        """
        return {"value": value}

    def close(self) -> int:
        """Close the door."""
        return self.made

    def show(self) -> list:
        """Show the columns."""
        return self.kwargs

class WordleEnv:
    def __init__(self):
        self.resets = 0

    def reset(self, **kwargs) -> str | None:
        self.resets += 1
        self.reward = 0.0
        self.done = False
        return None

    async def guess(self, guess: str) -> str:
        """
        Make a guess.

        Args:
            guess: The guessed word, formatted as '[abcde]'
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = True
        self.reward = 0.5
        return f"X G Y {self.resets}"

    def step(self, action: str) -> str:
        """
        A tool of this name.

        Args:
            action: What to do
        """
        if action == "world":
            raise EnvFailure("the server is gone")
        return action

    async def get_reward(self) -> float | None:
        return self.reward if self.done else None

def make():
    """A factory, as TRL takes."""
    return WordleEnv()

ENVIRONMENTS = {"increment": IncrementEnv, "wordle": make}
'''


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "env.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(params=[0, 1], ids=["here", "process"])
def environments(path, request):
    environments = Environments(
        f"{path}:ENVIRONMENTS", contract="trl", timeout=60, workers=request.param
    )
    yield environments
    environments.end()


async def play(environments, row, *calls, seed=1):
    session = await environments.open(row, seed=seed)
    try:
        texts = [await session.call(name, arguments) for name, arguments in calls]
        reward = await session.get_reward()
    finally:
        await session.close()
    return (
        session.opening,
        [reply.text for reply in texts],
        [reply.error for reply in texts],
        reward,
    )


def test_tools_are_all_public_methods_in_the_order_of_trl(environments):
    names = {
        name: [tool["function"]["name"] for tool in environments.tools(name)]
        for name in environments.names
    }
    assert names == {
        "increment": ["add", "close", "increment", "show"],
        "wordle": ["guess", "step"],
    }


def test_any_exception_of_a_tool_is_text(environments):
    calls = [
        ("increment", {"step": 3}), ("increment", {"step": "3"}), ("increment", {"by": 3}), ("decrement", {}),
        ("add", {"value": 3}), ("show", {}),
    ]  # fmt: skip
    row = {"environment": "increment", "prompt": "p", "n": 1}
    opening, texts, errors, reward = asyncio.run(play(environments, row, *calls))
    assert opening.startswith("Increment the counter by ")
    assert texts[0] == "3"
    assert texts[1].startswith("{'error': \"unsupported operand type")
    assert "unexpected keyword argument 'by'" in texts[2]
    assert "no tool 'decrement'" in texts[3]
    assert texts[4] == "{'value': 3}"  # arguments are handed over as they are
    assert texts[5] == "['n', 'prompt']"  # without the column that routes
    assert errors == [False, True, True, True, False, False]
    assert reward == 3.0


def test_objects_are_made_once_and_reset_often(environments):
    row = {"environment": "increment"}
    made = {asyncio.run(play(environments, row, ("close", {})))[1][0] for _ in range(3)}
    assert made == {"1"}
    row = {"environment": "wordle"}
    found = [asyncio.run(play(environments, row, ("guess", {"guess": "a"}))) for _ in range(3)]
    assert [texts for _, texts, _, _ in found] == [[f"X G Y {i}"] for i in (1, 2, 3)]


def test_the_end_of_a_game_and_async_rewards(environments):
    row = {"environment": "wordle"}
    calls = [("guess", {"guess": "a"}), ("guess", {"guess": "b"}), ("step", {"action": "left"})]
    opening, texts, errors, reward = asyncio.run(play(environments, row, *calls))
    assert opening is None
    assert texts == ["X G Y 1", "{'error': 'Game over.'}", "left"]
    assert errors == [False, True, False]
    assert reward == 0.5
    assert asyncio.run(play(environments, row))[3] is None


def test_a_failed_world_is_no_text_and_its_object_is_not_used_again(environments):
    row = {"environment": "wordle"}
    asyncio.run(play(environments, row))
    with pytest.raises(EnvironmentFailed, match="the server is gone") as caught:
        asyncio.run(play(environments, row, ("step", {"action": "world"})))
    assert (caught.value.kind, caught.value.place) == ("failure", "tool")
    texts = asyncio.run(play(environments, row, ("guess", {"guess": "a"})))[1]
    assert texts == ["X G Y 1"]


def test_reward_functions_see_the_object(path):
    environments = Environments(f"{path}:WordleEnv", contract="trl", timeout=60)

    async def run():
        session = await environments.open({"environment": "anything"}, seed=1)
        await session.call("guess", {"guess": "a"})
        reward = session.environment.reward
        await session.close()
        return reward

    assert asyncio.run(run()) == 0.5
    environments.end()


def test_one_environment_needs_no_column(path):
    environments = Environments(f"{path}:IncrementEnv", contract="trl", timeout=60)
    row = {"environment": "elsewhere", "prompt": "p"}
    texts = asyncio.run(play(environments, row, ("show", {})))[1]
    assert texts == ["['environment', 'prompt']"]
    environments.end()


def test_samples_of_a_prompt_start_alike_in_processes(path):
    environments = Environments(f"{path}:IncrementEnv", contract="trl", timeout=60, workers=2)

    async def run():
        sessions = [await environments.open({}, seed=seed) for seed in (4, 4)]
        for session in sessions:
            await session.close()
        return [session.opening for session in sessions]

    try:
        first, second = asyncio.run(run())
        third = asyncio.run(play(environments, {}, seed=5))[0]
    finally:
        environments.end()
    assert first == second != third


def test_text_parts_of_reset(tmp_path):
    path = tmp_path / "env.py"
    path.write_text(
        """
class Parts:
    def reset(self, kind, **kwargs):
        return [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": kind, "text": "c"}]
"""
    )
    environments = Environments(f"{path}:Parts", contract="trl", timeout=60)
    assert asyncio.run(play(environments, {"kind": "text"}))[0] == "abc"
    with pytest.raises(EnvironmentFailed, match="not text: image"):
        asyncio.run(play(environments, {"kind": "image"}))
    environments.end()


def test_hundreds_of_sessions_share_no_object(path):
    environments = Environments(f"{path}:IncrementEnv", contract="trl", timeout=60)

    async def one(i):
        return (await play(environments, {}, ("increment", {"step": i}), ("close", {})))[1]

    async def run():
        return await asyncio.gather(*(one(i) for i in range(200)))

    found = asyncio.run(run())
    assert [texts[0] for texts in found] == [str(i) for i in range(200)]
    assert int(found[0][1]) <= 200
    environments.end()
