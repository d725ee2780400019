"""Whole episodes: ids that only grow, masks, limits, failures; with an engine that says what a script says."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import ClassVar

import pytest
from support.chats import CHATML, chat_tokenizer
from support.fakes import FakeStrategy
from support.fixtures.data_rows import build_sentence_piece
from support.puppet import Puppet, prompt_of

from lightppo import EnvFailure, Reply, Step, ToolError
from lightppo.episodes import episode_engine
from lightppo.episodes.chat_format import ChatFormat
from lightppo.episodes.environments import Environments
from lightppo.episodes.episode import Limits, PlainText
from lightppo.episodes.episode_engine import EpisodeEngine
from lightppo.errors import ConfigError, RolloutError
from lightppo.rewards.reward_styles import BoundFunction
from lightppo.rollout.engine import RolloutEngine, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=600, n=2, seed=3)
END = "<|im_end|>"


class Guess:
    """As in docs/environments.md."""

    def reset(self, n: int, **row: object) -> str:
        self.n, self.rewards = n, 0.0
        return "Guess."

    def guess(self, x: int) -> str:
        """Guess a number.

        Args:
            x: your number.
        """
        if not 0 < x < 100:
            raise ToolError("between 1 and 99")
        if x == self.n:
            return Reply("right", done=True, reward=1.0, metrics={"found": 1.0})
        return "too low" if x < self.n else "too high"

    def get_reward(self) -> float:
        return 0.25


def call(x: object, name: str = "guess") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"x": {json.dumps(x)}}}}}\n</tool_call>{END}'


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(CHATML)


@pytest.fixture
def build(tokenizer):
    """An engine of episodes over a puppet; it is closed at the end."""
    made = []

    def make(kind: type, script, contract: str = "lightppo", strategy=None, **options):
        engine = Puppet(tokenizer, script)
        environments = Environments([kind], contract=contract, timeout=options.pop("timeout", 30))
        formats = {}
        for name in environments.names:
            tools = environments.tools(name)
            formats[name] = ChatFormat(tokenizer, tools)
            formats[name].check()
        limits = {"budget": 600, "max_opening": 400} | options.pop("limits", {})
        made.append(
            EpisodeEngine(
                engine,
                tokenizer,
                environments,
                strategy or FakeStrategy(),
                limits=Limits(**limits),
                formats=formats,
                **options,
            )
        )
        return made[-1]

    before = set(threading.enumerate())  # a run that a test broke off may have left one
    yield make
    for engine in made:
        engine.close()
        assert engine.engine.closed == 1
    new = set(threading.enumerate()) - before
    assert not [one for one in new if one.name == "episodes"]


def spoken(texts: list[str]):
    """Every conversation says these texts, one a turn."""
    return lambda turn: texts[turn.number]


def test_no_blank_is_put_before_an_observation():
    tokenizer = build_sentence_piece()
    said = tokenizer("Q: ", add_special_tokens=False).input_ids
    for text in ("4", "A4", " 4"):
        ids = PlainText(tokenizer).ids_of([{"role": "user", "content": text}])
        assert tokenizer.decode(said + ids) == "Q: " + text


def test_options_of_a_row_reach_the_template(build, tokenizer):
    """Its tools stand in place of the environment's, whose calls are played all the same."""
    engine = build(Guess, spoken([call(42)]))
    shown = {"name": "guess", "description": "Only once!", "parameters": {"type": "object"}}
    prompt = prompt_of("Which?", tokenizer, n=42, tools=[shown])
    (rollout,) = engine.generate([prompt], SamplingParams(max_new_tokens=300))
    text = tokenizer.decode(rollout.prompt.token_ids)
    assert "Only once!" in text
    assert "your number" not in text
    assert rollout.extras["found"] == 1.0
    prompt = prompt_of("Which?", tokenizer, n=42, tools=[shown | {"name": "sing"}])
    with pytest.raises(
        ConfigError, match="a row's tools have 'sing', which its environment has not"
    ):
        engine.generate([prompt], SamplingParams(max_new_tokens=300))


def test_it_is_a_rollout_engine(build):
    engine = build(Guess, spoken([END]))
    assert isinstance(engine, RolloutEngine)
    assert engine.capabilities.reports_finished


class TestConversation:
    texts = (call(500), call("many"), call(5, name="gues"), f"hm {call(50)}", call(42))

    @pytest.fixture
    def played(self, build, tokenizer):
        engine = build(Guess, spoken(list(self.texts)))
        prompts = [prompt_of("Which number?", tokenizer, index=7, n=42)]
        finished = []
        rollouts = engine.generate(prompts, SAMPLING, on_finished=finished.extend)
        assert {id(one) for one in finished} == {id(one) for one in rollouts}
        return engine, rollouts

    def test_what_is_trained_is_what_was_sampled(self, played, tokenizer):
        engine, rollouts = played
        assert [(one.prompt.index, one.sample_index) for one in rollouts] == [(7, 0), (7, 1)]
        for rollout in rollouts:
            whole = rollout.prompt.token_ids + rollout.response_ids
            start = len(rollout.prompt.token_ids)
            asked = [
                turn for turn in engine.engine.asked if turn.sample_index == rollout.sample_index
            ]
            trained = []
            for turn in asked:
                assert whole[: len(turn.token_ids)] == turn.token_ids  # the history only grows
                said = tokenizer(self.texts[turn.number], add_special_tokens=False).input_ids
                begin = len(turn.token_ids)
                assert whole[begin : begin + len(said)] == said
                trained += range(begin - start, begin - start + len(said))
            assert [i for i, yes in enumerate(rollout.trained) if yes] == trained
            assert (
                rollout.trained_length
                == len(trained)
                == sum(-2 * log_prob for log_prob in rollout.log_probs)
            )
            assert [turn.sampled for turn in asked] == [
                sum(rollout.trained[: len(turn.token_ids) - start]) for turn in asked
            ]

    def test_the_text_is_the_templates(self, played, tokenizer):
        """As one rendering of all messages, whose calls this template writes as the model did."""
        _, (rollout, _) = played
        text = tokenizer.decode(rollout.prompt.token_ids + rollout.response_ids)
        answers = [message for message in rollout.messages if message["role"] == "tool"]
        said = [message["content"] for message in answers]
        assert said[0] == "between 1 and 99"
        assert "x" in said[1]
        assert "guess" in said[2]
        assert said[3:] == ["too high", "right"][: len(said) - 3]
        for message in answers[:-1]:
            assert f"<tool_response>\n{message['content']}\n</tool_response>{END}" in text
        assert text.endswith(call(42))
        assert text.startswith("<|im_start|>system\nTools: ")
        assert "<|im_start|>user\nWhich number?\n\nGuess.<|im_end|>\n" in text

    def test_records(self, played):
        _, (rollout, _) = played
        assert [turn["calls"] for turn in rollout.turns] == [1] * 5
        assert [turn["errors"] for turn in rollout.turns] == [1, 1, 1, 0, 0]
        assert [turn["reward"] for turn in rollout.turns] == [0, 0, 0, 0, 1.25]
        assert rollout.turns[-1]["end"] == len(rollout.response_ids) - 1
        expected = {"turns": 5.0, "tool_calls": 5.0, "tool_errors": 3.0, "found": 1.0}
        assert expected.items() <= rollout.extras.items()
        assert rollout.texts["stop_reason"] == "done"
        assert json.loads(rollout.texts["conversation"]) == rollout.messages
        assert rollout.finish_reason == "stop"


class TestEnds:
    prompt = ("Which number?", {"n": 42})

    def one(self, engine, tokenizer, **sampling):
        question, columns = self.prompt
        how = SamplingParams(**{"max_new_tokens": 600, "seed": 3} | sampling)
        (rollout,) = engine.generate([prompt_of(question, tokenizer, **columns)], how)
        return rollout

    @pytest.mark.parametrize(
        ("texts", "limits", "reason", "turns"),
        [
            ([call(1), f"I give up.{END}"], {}, "answer", 2),
            ([call(1), call(2), call(3)], {"max_turns": 2}, "max_turns", 2),
            ([call(1), call(2), call(3)], {"max_tool_calls": 2}, "max_tool_calls", 2),
            ([call(1) for _ in range(50)], {}, "length", None),
        ],
    )
    def test_reasons(self, build, tokenizer, texts, limits, reason, turns):
        rollout = self.one(build(Guess, spoken(texts), limits=limits), tokenizer)
        assert rollout.texts["stop_reason"] == reason
        assert rollout.truncated == (reason == "length")
        assert len(rollout.response_ids) <= 600
        assert rollout.trained[-1]  # nothing stands behind the last turn
        assert turns in (None, len(rollout.turns))

    def test_a_turn_that_was_cut_is_closed_and_not_read(self, build, tokenizer):
        """Its end is added, but not trained; a call in it is none."""
        engine = build(Guess, spoken([call(1)]), limits={"max_turn_tokens": 12})
        rollout = self.one(engine, tokenizer)
        assert rollout.texts["stop_reason"] == "answer"
        assert rollout.turns[0]["calls"] == 0
        assert len(rollout.response_ids) == 12

    def test_between_turns_of_a_talk_the_end_is_added(self, build, tokenizer):
        engine = build(
            Talk, spoken([f"{'long ' * 20}{END}", f"bye{END}"]), limits={"max_turn_tokens": 9}
        )
        rollout = self.one(engine, tokenizer)
        end = tokenizer.convert_tokens_to_ids(END)
        assert rollout.trained[:9] == [True] * 9
        assert rollout.response_ids[9] == end
        assert not rollout.trained[9]
        assert rollout.messages[-2]["content"] == "I heard 3 words"

    def test_observations_are_shortened(self, build, tokenizer):
        class Long(Guess):
            def guess(self, x: int) -> str:
                """Guess.

                Args:
                    x: a number.
                """
                return "begin " + "middle " * 100 + "end"

        limits = {"max_observation_len": 20}
        rollout = self.one(build(Long, spoken([call(1), END]), limits=limits), tokenizer)
        text = next(one["content"] for one in rollout.messages if one["role"] == "tool")
        assert text.startswith("begin")
        assert text.endswith("end")
        assert " … [cut] … " in text
        assert len(tokenizer(text).input_ids) < 40

    def test_an_opening_that_is_too_long(self, build, tokenizer):
        engine = build(Guess, spoken([END]), limits={"max_opening": 30})
        with pytest.raises(RolloutError, match=r"prompt 0 has .* raise --prompt_max_len, now 30"):
            self.one(engine, tokenizer)


class Talk:
    """Counts words."""

    def reset(self, **row: object) -> None: ...

    def step(self, text: str) -> Step:
        if text == "bye":
            return Step(None, reward=2.0, done=True)
        return Step(f"I heard {len(text.split())} words", reward=0.5)


def test_a_prompt_that_is_no_chat_goes_on_as_text(tokenizer):
    environments = Environments([Talk])
    engine = EpisodeEngine(
        Puppet(tokenizer, spoken([f"one two{END}", f"bye{END}"])),
        tokenizer,
        environments,
        FakeStrategy(),
        limits=Limits(budget=100, max_opening=50),
        formats={"Talk": PlainText(tokenizer)},
    )
    prompt = prompt_of("Talk: ", tokenizer)
    prompt.messages = None
    (rollout,) = engine.generate([prompt], SamplingParams(max_new_tokens=100))
    engine.close()
    assert tokenizer.decode(rollout.response_ids) == f"one two{END}I heard 2 wordsbye{END}"
    assert [turn["reward"] for turn in rollout.turns] == [0.5, 2.0]
    assert rollout.response_text == "bye"


def test_objects_of_trls_contract_are_there_until_they_are_scored(build, tokenizer):
    """They are made once and reset often; reward functions get them as ``environments``."""

    class Trl:
        made: ClassVar[list] = []

        def __init__(self):
            self.made.append(self)

        def reset(self, n, **row):
            self.n, self.guesses = n, []

        def guess(self, x: int) -> str:
            """
            Guess a number.

            Args:
                x: the number

            Returns:
                what it is
            """
            self.guesses.append(x)
            if x > 90:
                raise ValueError("too large to be true")
            return "no"

    engine = build(Trl, spoken([call(95), call(7), END]), contract="trl")
    prompts = [prompt_of("Which?", tokenizer, index=i, n=i) for i in range(2)]
    for _ in range(4):
        rollouts = engine.generate(prompts, SAMPLING)
        arguments = BoundFunction(trl_reward, "trl_reward").calls(rollouts)[0].kwargs
        objects = arguments["environments"]
        assert len({id(one) for one in objects}) == 4
        assert [one.n for one in objects] == [0, 0, 1, 1]
        assert [one.guesses for one in objects] == [[95, 7]] * 4
        roles = ["assistant", "tool", "assistant", "tool", "assistant"]
        assert [[m["role"] for m in part] for part in arguments["completions"]] == [roles] * 4
        assert "too large to be true" in arguments["completions"][0][1]["content"]
    assert len(Trl.made) == 8  # of two calls; the third takes those of the first


def trl_reward(completions, environments, **columns):
    return [0.0] * len(completions)


# -- failures ----------------------------------------------------------------------------------------------------------


class Fragile(Guess):
    """Fails for one row, at a place that the row names."""

    def reset(self, n: int, fails: str = "", **row: object) -> None:
        self.fails, self.n = fails, n
        self._fail("reset")

    def guess(self, x: int) -> str:
        """Guess.

        Args:
            x: a number.
        """
        self._fail("tool")
        return "no"

    def get_reward(self) -> float:
        self._fail("get_reward")
        return float("nan") if self.fails == "nan" else 1.0

    def close(self) -> None:
        self._fail("close")

    def _fail(self, place: str) -> None:
        if self.fails == place:
            raise EnvFailure("the world is gone") if place == "tool" else ValueError("it broke")
        if self.fails == f"hang in {place}":
            threading.Event().wait(20)


PLACES = ["reset", "tool", "get_reward", "nan", "close", "hang in reset", "hang in tool"]


class TestFailures:
    def play(self, engine, tokenizer, fails: str, others: int = 3):
        prompts = [
            prompt_of("Which?", tokenizer, index=i, n=42, fails=fails if i == 1 else "")
            for i in range(1 + others)
        ]
        return engine.generate(prompts, SAMPLING)

    @pytest.mark.parametrize("fails", PLACES)
    def test_its_samples_are_left_out_and_others_are_untouched(
        self, build, tokenizer, fails, caplog
    ):
        timeout = 0.3 if "hang" in fails else 30
        script = spoken([call(1), f"done{END}"])
        engine = build(Fragile, script, timeout=timeout, retries=1)
        whole = {
            (one.prompt.index, one.sample_index): one.response_ids
            for one in self.play(build(Fragile, script), tokenizer, "")
        }
        with caplog.at_level(logging.WARNING):
            rollouts = self.play(engine, tokenizer, fails)
        assert [(one.prompt.index, one.sample_index) for one in rollouts] == list(whole)
        for one in rollouts:
            if one.prompt.index != 1:
                assert one.response_ids == whole[one.prompt.index, one.sample_index]
                assert one.turns[-1]["reward"] == 1.0
                continue
            assert one.response_ids == []
            assert one.extras["failures"] == 2  # tried twice
            assert one.extras["timeouts"] == (2 if "hang" in fails else 0)
            assert "Fragile" in one.texts["failure"]
        assert "the environments of 2 of 8 episodes failed, which are left out" in caplog.text

    def test_too_many_end_the_run_on_every_rank(self, build, tokenizer):
        other = FakeStrategy(exchange=lambda rank, value: [value, (6, ["the other's failed"] * 4)])
        engine = build(Fragile, spoken([call(1), END]), strategy=other, failure_limit=0.5)
        assert len(self.play(engine, tokenizer, "reset", others=3)) == 8  # 6 of 14
        with pytest.raises(
            RolloutError, match=r"of 6 of 10 episodes failed \(--env_failure_limit 0.5\)"
        ):
            self.play(engine, tokenizer, "reset", others=1)

    def test_one_retry_that_works_is_counted(self, build, tokenizer):
        class Once(Guess):
            failed = threading.Event()

            def reset(self, n: int, **row: object) -> None:
                super().reset(n)
                if not self.failed.is_set():
                    self.failed.set()
                    raise OSError("not yet")

        engine = build(Once, spoken([call(42)]), retries=1)
        rollouts = engine.generate([prompt_of("Which?", tokenizer, n=42)], SAMPLING)
        assert sorted(one.extras.get("failures", 0.0) for one in rollouts) == [0.0, 1.0]
        assert all(one.response_ids for one in rollouts)

    def test_all_seconds_of_an_episode_are_limited(self, build, tokenizer):
        engine = build(Guess, spoken([call(1), END]), limits={"seconds": 1e-9})
        (rollout,) = engine.generate(
            [prompt_of("Which?", tokenizer, n=42)], SamplingParams(max_new_tokens=300)
        )
        assert "--episode_timeout is 1e-09" in rollout.texts["failure"]
        assert rollout.extras["timeouts"] == 1

    def test_samples_of_a_prompt_start_alike(self, build, tokenizer):
        class Moody(Guess):
            count = 0

            def reset(self, n: int, **row: object) -> str:
                super().reset(n)
                type(self).count += 1
                return f"Mood {self.count}"

        engine = build(Moody, spoken([END]))
        with pytest.raises(
            RolloutError, match=r"samples 0 and 1 start with different texts.*seed="
        ):
            engine.generate([prompt_of("Which?", tokenizer, n=42)], SAMPLING)

    def test_seeds(self, build, tokenizer):
        class Seeded(Guess):
            def reset(self, n: int, seed: int, **row: object) -> str:
                super().reset(n)
                return f"Seed {seed}"

        engine = build(Seeded, spoken([END]))
        prompts = [prompt_of("Which?", tokenizer, index=i, n=42) for i in range(3)]
        texts = [one.prompt.messages[-1]["content"] for one in engine.generate(prompts, SAMPLING)]
        assert len(set(texts)) == 3
        again = [one.prompt.messages[-1]["content"] for one in engine.generate(prompts, SAMPLING)]
        assert again == texts

    def test_first_messages_that_cannot_be_shown_fail_their_episode_alone(self, build, tokenizer):
        class Pictures(Guess):
            def reset(self, n: int, **row: object) -> list[dict]:
                super().reset(n)
                content = "Guess." if n == 42 else [{"type": "image", "url": "x"}]
                return [{"role": "user", "content": content}]

        engine = build(Pictures, spoken([call(42)]), failure_limit=0.9)
        prompts = [prompt_of("Which?", tokenizer, index=n, n=n) for n in (42, 7)]
        rollouts = engine.generate(prompts, SAMPLING)
        assert [bool(one.response_ids) for one in rollouts] == [True, True, False, False]
        assert "the first messages: an observation is no text" in rollouts[2].texts["failure"]

    def test_what_is_no_failure_of_an_environment_ends_the_call(self, build, tokenizer):
        engine = build(Guess, spoken([call(1)]))  # a second turn has no text
        with pytest.raises(IndexError):
            engine.generate([prompt_of("Which?", tokenizer, n=42)], SAMPLING)
        engine.engine.script = spoken([END])
        assert len(engine.generate([prompt_of("Which?", tokenizer, n=42)], SAMPLING)) == 2


class TestClosing:
    def test_environments_that_hang_in_close_take_one_time_limit_together(
        self, build, tokenizer, caplog
    ):
        class Hangs:
            go = threading.Event()

            def reset(self, **row):
                return ""

            def guess(self, x: int) -> str:
                """Guess.

                Args:
                    x: a number.
                """
                return "no"

            def close(self):
                self.go.wait(60)

        engine = build(Hangs, spoken([END]), contract="lightppo")
        engine.environments.contract = "trl"  # its objects are kept, and closed at the end
        prompts = [prompt_of("Which?", tokenizer, index=i) for i in range(4)]
        assert len(engine.generate(prompts, SAMPLING)) == 8
        engine.environments.timeout = 0.5
        begin = time.monotonic()
        with caplog.at_level(logging.WARNING):
            engine.close()
        assert time.monotonic() - begin < 4  # 8 times 0.5, one after the other
        assert caplog.text.count("Hangs: close: no answer within 0.5 s") == 8
        Hangs.go.set()
        engine.engine.closed -= 1  # the fixture closes it again

    def test_what_blocks_the_thread_of_episodes_is_named(self, tokenizer, monkeypatch):
        go = threading.Event()

        class Blocks(Environments):
            async def close(self):
                go.wait(60)

        monkeypatch.setattr(episode_engine, "_GRACE_SECONDS", 0.3)
        engine = EpisodeEngine(
            Puppet(tokenizer, spoken([END])),
            tokenizer,
            Blocks([Guess], timeout=0.1),
            FakeStrategy(),
            limits=Limits(budget=9, max_opening=9),
            formats={},
        )
        with pytest.raises(RolloutError, match=r"does not end|takes more than 0.4 s") as caught:
            engine.close()
        assert "test_episodes.py" in str(caught.value)
        assert "close" in str(caught.value)
        assert engine.engine.closed == 1
        go.set()
        engine._thread.join(60)
        assert not engine._thread.is_alive()


def test_an_engine_that_samples_no_turns_is_refused(tokenizer):
    from lightppo.errors import ConfigError

    class Old(Puppet):
        generate_turns = None

    engine = Old(tokenizer, spoken([END]))
    with pytest.raises(ConfigError, match="--env: Old samples no turns"):
        EpisodeEngine(engine, tokenizer, None, FakeStrategy(), limits=None, formats={})
