"""Episodes with tools on the tape: calls, refusals, failed tries, templates; played without the class."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import ClassVar

import pytest
from support.chats import CHATML, chat_tokenizer
from support.fakes import FakeStrategy
from support.puppet import Puppet, prompt_of

from lightppo import EnvFailure, Reply, ToolError
from lightppo.episodes.calls import AnsweredEnvironments, description_of
from lightppo.episodes.chat_format import ChatFormat
from lightppo.episodes.environments import Environments
from lightppo.episodes.episode import Limits
from lightppo.episodes.episode_engine import EpisodeEngine
from lightppo.episodes.tape import Tape
from lightppo.episodes.tape_files import TapeError
from lightppo.errors import RolloutError
from lightppo.rollout.engine import SamplingParams

END = "<|im_end|>"
SAMPLING = SamplingParams(max_new_tokens=600, n=2, seed=3)


class Shop:
    """The first call of a tool fails."""

    asked: ClassVar[list[str]] = []
    failures: ClassVar[list[str]] = []

    def reset(self, **row: object) -> str:
        self.asked.append("reset")
        return "Buy."

    def price(self, x: int) -> Reply:
        """Asks a price.

        Args:
            x: of what.
        """
        self.asked.append("price")
        if x > 9:
            raise ToolError("there is no such thing")
        with contextlib.suppress(IndexError):
            raise EnvFailure(self.failures.pop())
        return Reply(f"{len(self.asked)} €", reward=0.5, done=x == 0, metrics={"sold": 1.0})

    def get_reward(self) -> float:
        return len(self.asked) / 8


def call(x: object) -> str:
    return f'<tool_call>\n{{"name": "price", "arguments": {{"x": {json.dumps(x)}}}}}\n</tool_call>{END}'


SAID = [call(3), call(10), f"<tool_call>broken{END}", call(0)]


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(CHATML)


@pytest.fixture
def engine_of(tokenizer, tmp_path):
    made = []

    def make(said, *, plays=False, kind=Shop, contract="lightppo", **options):
        tape = Tape(tmp_path, 0, 1, plays=plays)
        if plays:
            environments = AnsweredEnvironments(tape.environments)
        else:
            environments = Environments([kind], contract=contract, timeout=30)
            tape.environments = description_of(environments)
        tape.go_to(1, "train")
        formats = {n: ChatFormat(tokenizer, environments.tools(n)) for n in environments.names}
        made.append(
            EpisodeEngine(
                Puppet(tokenizer, lambda turn: said[turn.number]),
                tokenizer,
                environments,
                FakeStrategy(),
                limits=Limits(budget=600, max_opening=400),
                formats=formats,
                tape=tape,
                **{"retries": 1} | options,
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def recorded(engine_of, tokenizer):
    Shop.asked.clear()
    Shop.failures[:] = ["the shop is closed"]
    prompts = [prompt_of("What?", tokenizer, index=7)]
    return prompts, engine_of(SAID).generate(prompts, SAMPLING)


def test_it_is_played_without_class_and_engine(recorded, engine_of):
    prompts, rollouts = recorded
    asked = list(Shop.asked)
    assert sum(one.extras.get("failures", 0) for one in rollouts) == 1
    assert {one.extras["tool_errors"] for one in rollouts} == {2.0}
    engine = engine_of(["never"] * 9, plays=True)
    assert engine.generate(prompts, SAMPLING) == rollouts
    assert engine.engine.asked == []
    assert Shop.asked == asked


def test_a_resume_with_the_environment_asks_nothing_either(recorded, engine_of):
    prompts, rollouts = recorded
    asked = list(Shop.asked)
    assert engine_of(["never"] * 9, retries=7).generate(prompts, SAMPLING) == rollouts
    assert Shop.asked == asked


def test_a_prompt_that_is_not_on_the_tape(recorded, engine_of, tokenizer):
    with pytest.raises(TapeError, match="has no answer: call of prompt 8, sample 0, try 0, turn 0"):
        engine_of(SAID, plays=True).generate([prompt_of("What?", tokenizer, index=8)], SAMPLING)


def test_another_conversation_is_named(recorded, engine_of, tokenizer):
    """Its template, or its row, has changed since."""
    with pytest.raises(
        TapeError, match=r"turn of .*prompt 7, sample \d, try 0, turn 1, with context"
    ):
        engine_of(SAID, plays=True).generate([prompt_of("Why?", tokenizer, index=7)], SAMPLING)


def test_an_episode_that_fails_for_good_is_not_tried_again(engine_of, tokenizer):
    prompts = [prompt_of("What?", tokenizer, index=7)]

    class Closed(Shop):
        def price(self, x: int) -> str:
            """Asks a price. Args: x: of what."""
            raise EnvFailure("closed")

    failed = engine_of(SAID, kind=Closed).generate(prompts, SAMPLING)
    assert [one.extras["failures"] for one in failed] == [2.0, 2.0]
    assert engine_of(SAID, plays=True, retries=9).generate(prompts, SAMPLING) == failed


def test_objects_that_reward_functions_ask_are_on_no_tape(engine_of, tokenizer):
    """A resume with TRL's classes plays again; a tape that plays has the rewards, too."""
    prompts = [prompt_of("What?", tokenizer, index=7)]

    class Kept(Shop):
        def step(self) -> str:
            """Nothing."""

    Shop.failures.clear()
    engine_of(SAID, kind=Kept, contract="trl").generate(prompts, SAMPLING)
    resumed = engine_of(SAID, kind=Kept, contract="trl").generate(prompts, SAMPLING)
    assert all(isinstance(one.environment, Kept) for one in resumed)
    played = engine_of(["never"] * 9, plays=True).generate(prompts, SAMPLING)
    assert [one.environment for one in played] == [None, None]
    assert [one.messages for one in played] == [one.messages for one in resumed]


def test_an_error_that_ends_the_run_is_met_again(engine_of, tokenizer):
    prompts, sampling = [prompt_of("What?" * 99, tokenizer, index=7)], replace(SAMPLING, n=1)
    limit = r"prompt 7 has \d+ tokens with what its environment adds"
    with pytest.raises(RolloutError, match=limit):
        engine_of(SAID).generate(prompts, sampling)
    asked = list(Shop.asked)
    with pytest.raises(RolloutError, match=limit):
        engine_of(SAID, plays=True).generate(prompts, sampling)
    assert Shop.asked == asked
