"""The environments in examples/ do what they say."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from lightppo import ToolError
from lightppo.episodes.environments import Environments

FOLDER = Path(__file__).parents[2] / "examples" / "environments"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("entries", "tools", "names"),
    [
        (["guess.py:Guess"], [], {"guess"}),
        ([], ["calculator.py:calculate", "library.py:search"], {"calculate", "search"}),
        (["guess.py:Between"], [], set()),
        (["lookup.py:Drawers"], [], set()),
    ],
)
def test_they_load(entries, tools, names):
    environments = Environments(
        [f"{FOLDER}/{entry}" for entry in entries], tools=[f"{FOLDER}/{tool}" for tool in tools]
    )
    (name,) = environments.names
    assert {tool["function"]["name"] for tool in environments.tools(name)} == names
    environments.end()


def test_the_calculator_computes_and_runs_nothing():
    calculate = load("calculator").calculate
    assert calculate("2 * (3 + 4) - -1 / 4") == "14.25"
    for text in ("1/0", "2 +", "__import__('os')", "2 ** 9999999", "x", "'a' * 3", "1" * 300):
        with pytest.raises(ToolError):
            calculate(text)


def test_the_library_finds_a_paragraph():
    search = load("library").search
    assert "CUDA graphs" in search("which kernels does a decoding step with CUDA graphs launch")
    with pytest.raises(ToolError, match="ask with others"):
        search("xyzzy")


def test_guesses():
    guess = load("guess").Guess()
    assert guess.reset(n=42, name="x") == "Guess a number from 1 to 99."
    assert [guess.guess(x).text for x in (7, 50, 42)] == ["too low", "too high", "right"]
    with pytest.raises(ToolError):
        guess.guess(100)


class TestBetween:
    def test_a_game(self):
        game = load("guess").Between()
        assert game.reset(label="07", input="01-31=") is None
        steps = [game.step(f"{text}.") for text in ("20", "03", "99", "x", "01", "7")]
        assert [step.observation for step in steps] == [
            "01-19=", "04-19=", "04-19=", "04-19=", "04-19=", None,
        ]  # fmt: skip
        assert [step.reward for step in steps] == [*[-0.1] * 5, 1.0]
        assert [step.done for step in steps] == [*[False] * 5, True]
        assert [step.metrics["accuracy"] for step in steps] == [*[0.0] * 5, 1.0]

    def test_demonstrations_are_games_with_more_guesses_than_needed(self):
        guess = load("guess")
        lengths = []
        for row in guess.demonstrations(2000, seed=0):
            guesses = row["output"].split(".")[:-1]
            lengths.append(len(guesses))
            told, number = row["input"], guesses[0]
            for said in guesses[1:]:
                low, high = map(int, told.rstrip("=").split("-"))
                assert low <= int(number) <= high
                told, _, number = said.rpartition("=")
        assert 6.2 < sum(lengths) / len(lengths) < 6.8
        assert max(lengths) == 9  # of which some have not found it
        middle = []
        for number in range(1, 32):
            game, said, count = guess.Between(), None, 0
            game.reset(label=f"{number:02d}")
            while said is None or not said.done:
                said, count = game.step(f"{(game.low + game.high) // 2:02d}."), count + 1
            middle.append(count)
        assert sum(middle) / len(middle) == pytest.approx(129 / 31)  # 4.2


class TestDrawers:
    def test_an_answer_without_a_question_is_a_guess(self):
        lookup = load("lookup")
        rows = lookup.rows(3000, seed=0)
        assert len({row["label"] for row in rows}) == 100
        rng = random.Random(0)
        right = sum(row["label"] == f"{rng.randrange(100):02d}" for row in rows)
        assert right < 60  # of 3,000

    def test_a_question_and_an_answer(self):
        drawers = load("lookup").Drawers()
        drawers.reset(drawer="07", label="58", input="07=")
        step = drawers.step("?07.")
        assert (step.observation, step.reward, step.done) == ("58.", 0.0, False)
        assert drawers.step("?08.").observation == drawers.step("?08.").observation
        assert drawers.step("58.").reward == 1.0
        assert drawers.step("59.").reward == 0.0
        assert drawers.step("59.").done

    def test_half_of_the_demonstrations_have_a_mistake(self):
        rows = load("lookup").demonstrations(2000, seed=0)
        right = [row for row in rows if row["output"].count(".") == 3]
        asked = [row for row in right if row["output"].split(".")[1] == row["output"].split(".")[2]]
        assert len(right) == pytest.approx(1400, abs=80)
        assert len(asked) == pytest.approx(806, abs=80)
