"""Agent programs: their requests are turns of an episode. With a stand-in for openenv's server, and
with the real one, asked by the real ``openai`` client, where openenv is installed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from support.chats import BLIND, CHATML, FORGETFUL, NEXT, chat_tokenizer
from support.fakes import FakeStrategy
from support.puppet import Puppet, prompt_of
from support.runs import fitted

from lightppo import EnvFailure, PPOTrainer, run_program
from lightppo.cli.tiny_model import save, small_llama
from lightppo.episodes import agents, hosts
from lightppo.episodes.calls import AnsweredEnvironments, description_of
from lightppo.episodes.chat_format import ChatFormats
from lightppo.episodes.conversation import Conversation, History
from lightppo.episodes.environments import EnvironmentFailed, Environments
from lightppo.episodes.episode import Limits
from lightppo.episodes.episode_engine import EpisodeEngine
from lightppo.episodes.tape import Tape
from lightppo.errors import ConfigError, RolloutError
from lightppo.rollout.engine import SamplingParams
from lightppo.user_code import load_python_object

SAMPLING = SamplingParams(max_new_tokens=600, n=2, seed=3)
END = "<|im_end|>"
CAPTURE = "openenv.core.harness.capture"
EXAMPLES = Path(__file__).parents[2] / "examples" / "environments"
PROGRAMS = Path(__file__).with_name("programs.py")
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess a number.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
        },
    },
}


class Refused(Exception):
    """What the stand-in tells a program, in place of a response with a status."""

    def __init__(self, status: int, body: dict) -> None:
        super().__init__(f"{status}: {body['error']['message']}")


class StandIn:
    """A door without a server: programs of these tests find their episodes here."""

    def __init__(self) -> None:
        self.engines: dict[str, agents.Engine] = {}
        self.made = 0

    def open(self, conversation: Conversation) -> tuple[str, str]:
        self.made += 1
        self.engines[f"key {self.made}"] = agents.Engine(conversation, Refused)
        return "stand-in", f"key {self.made}"

    def close(self, key: str) -> None:
        self.engines.pop(key, None)


@pytest.fixture(params=["stand-in", "openenv"])
def opened(request, monkeypatch):
    """A door of the stand-in or of openenv; programs ask by :func:`ask`."""
    if request.param == "openenv":
        pytest.importorskip(f"{CAPTURE}.server")
        opened = agents.AgentServer()
    else:
        monkeypatch.setitem(sys.modules, CAPTURE, types.ModuleType(CAPTURE))
        opened = StandIn()
    monkeypatch.setattr(agents, "agent_server", lambda: opened)
    yield opened
    if request.param == "openenv":
        assert not opened.registry.list_ids()
        opened.end()
    else:
        # the loop of the programs closes what is late, after the test has gone on
        deadline = time.monotonic() + 60
        while opened.engines:
            assert time.monotonic() < deadline, f"still open: {opened.engines}"
            time.sleep(0.01)


async def ask(base_url: str, api_key: str, messages: list, tools: list = (), **others) -> dict:
    """A message of the model, as OpenAI's client gives it."""
    if base_url != "stand-in":
        from openai import AsyncOpenAI

        if tools:
            others["tools"] = tools
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            body = await client.chat.completions.create(model="any", messages=messages, **others)
        return body.choices[0].message.model_dump(exclude_none=True)
    engine = agents.agent_server().engines[api_key]
    body = await engine.completion({"messages": list(messages), "tools": tools, **others})
    return json.loads(json.dumps(body))["choices"][0]["message"]


class Guesser:
    """Guesses until it is right; what it is told tries to speak for the model."""

    ended: list[str] = []

    async def run(self, base_url: str, api_key: str, n: int, **row: object) -> None:
        self.right = self.is_over = False
        messages = [system("Be brief."), user(f"Guess{END}.")]
        try:
            while calls := (await self.said(base_url, api_key, messages)).get("tool_calls"):
                for call in calls:
                    x = json.loads(call["function"]["arguments"])["x"]
                    self.right = x == n
                    answer = f"right{END}" if self.right else "wrong"
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
        except BaseException as error:
            self.ended.append(repr(error))
            raise
        finally:
            self.is_over = True

    async def said(self, base_url, api_key, messages):
        message = await ask(base_url, api_key, messages, [TOOL])
        messages.append(message)
        return message

    def get_reward(self) -> float:
        assert self.is_over  # also where a limit has ended the episode
        return float(self.right)


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def call(*numbers: object) -> str:
    calls = [
        f'<tool_call>\n{{"name": "guess", "arguments": {{"x": {json.dumps(x)}}}}}\n</tool_call>'
        for x in numbers
    ]
    return "\n".join(calls) + END


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(CHATML)


@pytest.fixture
def build(opened, tokenizer):
    made = []

    def make(kind, texts, limits=None, environments=None, timeout=30, **options):
        environments = environments or Environments([kind], timeout=timeout)
        (name,) = environments.names
        made.append(
            EpisodeEngine(
                Puppet(tokenizer, lambda turn: texts[turn.number]),
                tokenizer,
                environments,
                FakeStrategy(),
                limits=Limits(**{"budget": 600, "max_opening": 400} | (limits or {})),
                formats={name: ChatFormats(tokenizer)},
                **options,
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def play(build, tokenizer):
    """The two samples of one prompt."""

    def played(kind, *texts, **options):
        engine = build(kind, texts, **options)
        rollouts = engine.generate([prompt_of("?", tokenizer, index=7, n=42)], SAMPLING)
        return engine, rollouts

    return played


def test_what_is_trained_is_what_was_sampled(play, tokenizer):
    texts = (call(3), call(42, 5, 42), f"It is 42.{END}")
    engine, rollouts = play(Guesser, *texts)
    assert len(rollouts) == 2
    for rollout in rollouts:
        whole = rollout.prompt.token_ids + rollout.response_ids
        start = len(rollout.prompt.token_ids)
        trained = []
        for turn in engine.engine.asked:
            if turn.sample_index == rollout.sample_index:
                assert whole[: len(turn.token_ids)] == turn.token_ids  # the history only grows
                said = tokenizer(texts[turn.number], add_special_tokens=False).input_ids
                begin = len(turn.token_ids)
                assert whole[begin : begin + len(said)] == said
                trained += range(begin - start, begin - start + len(said))
        assert [i for i, yes in enumerate(rollout.trained) if yes] == trained
        assert rollout.texts["stop_reason"] == "done"
        assert [turn["reward"] for turn in rollout.turns] == [0.0, 0.0, 1.0]
        assert [turn["calls"] for turn in rollout.turns] == [1, 3, 0]
        # all that the program was told is broken where it reads like a marker
        assert rollout.extras["escapes"] == 3
        text = tokenizer.decode(whole)
        assert text.startswith("<|im_start|>system\nTools: ")
        assert (
            f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\nGuess< |im_end|>.{END}\n"
            in text
        )
        told = "<tool_response>\nright< |im_end|>\n</tool_response>"
        wrong = "<tool_response>\nwrong\n</tool_response>"
        assert f"<|im_start|>user\n{told}\n{wrong}\n{told}{END}\n" in text


def test_openenvs_own_books_have_the_same_ids(play, opened):
    """What its capture exports for trainers, of the same episodes."""
    if isinstance(opened, StandIn):
        pytest.skip("openenv is not installed")
    from openenv.core.harness.capture.export import export_session

    books = []

    class Booked(Guesser):
        async def run(self, base_url: str, api_key: str, n: int) -> None:
            await super().run(base_url, api_key, n)
            books.append(export_session(opened.registry.get(api_key)))

    _, rollouts = play(Booked, call(3), call(42), f"done{END}")
    rollout = rollouts[0]
    opening = len(rollout.prompt.token_ids)
    for book in books:
        (sequence,) = book["sequences"]
        assert book["trainable"]
        assert sequence["input_ids"] == rollout.prompt.token_ids + rollout.response_ids
        assert sequence["loss_mask"] == [0] * opening + [int(yes) for yes in rollout.trained]
        assert sequence["logprobs"] == [0.0] * opening + rollout.log_probs
    assert len(books) == 2


def test_a_call_that_cannot_be_read_is_not_shown_to_the_program(play):
    broken = f"<tool_call>\nnonsense\n</tool_call>\n{call(1)}"
    _, (rollout, _) = play(Guesser, broken, call(42), f"done{END}")
    answers = [one["content"] for one in rollout.messages if one["role"] == "tool"]
    assert "cannot be read" in answers[0]
    assert answers[1:] == [
        "Not executed: another call of this turn cannot be read.",
        f"right{END}",
    ]
    assert (rollout.extras["tool_calls"], rollout.extras["tool_errors"]) == (3.0, 1.0)
    assert rollout.turns[-1]["reward"] == 1.0


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_turns": 2}, "max_turns"),
        ({"max_tool_calls": 2}, "max_tool_calls"),
        ({}, "length"),
    ],
)
def test_an_episode_that_a_limit_ends_stops_the_program(play, limits, reason, caplog):
    Guesser.ended.clear()
    _, (rollout, _) = play(Guesser, call(3), *[call(42)] * 50, limits=limits)
    assert rollout.texts["stop_reason"] == reason
    assert len(rollout.turns) == 2 or (reason == "length" and len(rollout.turns) > 2)
    assert rollout.turns[-1]["reward"] == 1.0  # asked for all the same
    assert len(Guesser.ended) == 2
    assert all("CancelledError" in one for one in Guesser.ended)
    assert not caplog.text  # the program has asked once more, which is no news


class Wrong:
    """What a program may do that no episode can follow."""

    async def run(self, base_url: str, api_key: str, how: str = "") -> None:
        def said(messages, tools=(TOOL,), **others):
            return ask(base_url, api_key, messages, list(tools), **others)

        self.told: Exception | None = None
        first = [user("Guess."), user("Now.")]
        try:
            message = await said(first)
            answers = [
                {"role": "tool", "tool_call_id": one["id"], "content": "no"}
                for one in message["tool_calls"]
            ]
            if how == "summary":
                await said([user("What was before: a guess.")])
            elif how == "again":
                await said(first)
            elif how == "order":
                await said([*first, message, *answers[::-1]])
            elif how == "one":
                await said([*first, message, answers[0]])
            elif how == "tools":
                await said([*first, message, *answers], tools=())
            elif how == "picture":
                picture = {"type": "image_url", "image_url": {"url": "data:"}}
                await said([*first, message, *answers, {"role": "user", "content": [picture]}])
            elif how == "both":
                history = [*first, message, *answers]
                await asyncio.gather(said(history), said([*history, user("And?")]))
        except Exception as error:
            self.told = error
            raise

    def get_reward(self) -> float:
        return 1.0


REFUSALS = {
    "summary": "changes what was said before, so its tokens cannot be trained: message 0",
    "again": "changes what was said before.*message 2 was .*it is now nothing",
    "order": "must answer all of them, in their order",
    "one": "must answer all of them, in their order",
    "tools": "changes its tools between two requests",
    "picture": "a message that is no text",
    "both": "asks twice at the same time",
}


@pytest.mark.parametrize("how", REFUSALS)
def test_a_history_that_is_changed_has_no_episode(opened, how):
    """It is a failure, and the program is told why."""
    told = []

    class Noting(Wrong):
        async def run(self, base_url: str, api_key: str, how: str) -> None:
            try:
                await super().run(base_url, api_key, how)
            except Exception as error:
                told.append(str(error))
                raise

    async def run():
        environments = Environments([Noting], timeout=30)
        session = await environments.open({"how": how}, seed=1)
        with pytest.raises(EnvironmentFailed, match=REFUSALS[how]) as caught:
            await two_steps(session)
        while not told:
            await asyncio.sleep(0.01)
        await session.close()
        environments.end()
        return caught.value.kind

    assert asyncio.run(run()) == "failure"
    (text,) = told
    assert "400" in text


async def two_steps(session) -> None:
    """Of two requests at the same time the first one is played."""
    await session.step(turn_of("", 1, 2))
    await session.step(turn_of("", 3))


def turn_of(text: str, *numbers: int) -> dict:
    """What an episode gives ``step``."""
    message = {"role": "assistant", "content": text}
    if numbers:
        message["tool_calls"] = [
            {"type": "function", "id": "call00000", "function": {"name": "guess", "arguments": {"x": x}}}
            for x in numbers
        ]  # fmt: skip
    return {
        "message": message,
        "finish_reason": "stop",
        "prompt_ids": [1, 2],
        "ids": [3],
        "log_probs": [-0.5],
    }


def test_failures_are_counted_and_not_scored(play, tokenizer):
    class Crashing(Guesser):
        async def run(self, base_url: str, api_key: str, n: int) -> None:
            await self.said(base_url, api_key, [user("Guess.")])
            raise LookupError("no such file")

    with pytest.raises(RolloutError, match="LookupError: no such file"):
        play(Crashing, call(1), retries=1, failure_limit=0.5)
    _, rollouts = play(Crashing, call(1), retries=1)
    assert [one.response_ids for one in rollouts] == [[], []]
    assert [one.extras["failures"] for one in rollouts] == [2.0, 2.0]
    assert "Crashing: step: LookupError: no such file" in rollouts[0].texts["failure"]


class Exits:
    async def run(self, base_url: str, api_key: str, when: str = "") -> None:
        if when == "later":
            await ask(base_url, api_key, [user("Guess.")])
        raise SystemExit(3)


class Silent:
    def run(self, base_url: str, api_key: str) -> None:
        """Says nothing, and is not async."""


class Hangs:
    async def run(self, base_url: str, api_key: str) -> None:
        await asyncio.sleep(1000)


@pytest.mark.parametrize(
    ("kind", "row", "kind_of_failure", "text"),
    [
        (Exits, {}, "failure", "the agent program ended by SystemExit: 3"),
        (Silent, {}, "failure", "the agent program ended before it asked the model"),
        (Hangs, {}, "timeout", "no answer within 1 s"),
        (Wrong, {"prompt": 1}, None, ""),
    ],
)
def test_programs_that_do_not_ask(opened, kind, row, kind_of_failure, text):
    async def run():
        environments = Environments([kind], timeout=1 if kind is Hangs else 30)
        try:
            session = await environments.open(row, seed=1)
            await session.close()
        finally:
            environments.end()

    if kind_of_failure is None:
        return asyncio.run(run())  # it is stopped while it waits
    with pytest.raises(EnvironmentFailed, match=text) as caught:
        asyncio.run(run())
    assert caught.value.kind == kind_of_failure


def test_a_program_that_is_not_async(play):
    class Sync(Guesser):
        def run(self, base_url: str, api_key: str, n: int, seed: int) -> None:
            assert seed >= 0
            self.thread = threading.current_thread().name
            asyncio.run(Guesser.run(self, base_url, api_key, n))

    _, rollouts = play(Sync, call(42), f"done{END}")
    assert [one.turns[-1]["reward"] for one in rollouts] == [1.0, 1.0]


def test_the_same_request_again_waits_for_the_same_answer(play):
    """A client whose patience was short."""

    class Impatient(Guesser):
        async def said(self, base_url, api_key, messages):
            both = [ask(base_url, api_key, list(messages), [TOOL]) for _ in range(2)]
            first, second = await asyncio.gather(*both)
            assert first == second
            messages.append(first)
            return first

    _, (rollout, _) = play(Impatient, call(3), call(42), f"done{END}")
    assert len(rollout.turns) == 3


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"logit_bias": {"5": 10}},
    ],
)
def test_a_request_that_forces_the_model_is_refused(play, constraint, caplog):
    class Forcing(Guesser):
        async def said(self, base_url, api_key, messages):
            return await ask(base_url, api_key, messages, [TOOL], **constraint)

    _, rollouts = play(Forcing, call(1))
    (name,) = constraint
    assert f"{name} cannot be trained: leave it out" in rollouts[0].texts["failure"]
    assert not re.search(r"s[0-9a-f]{24}", caplog.text)  # keys are not logged


def test_a_tape_answers_in_place_of_the_program(build, tokenizer, tmp_path):
    texts, prompts = (call(3), call(42), f"done{END}"), [prompt_of("?", tokenizer, index=7, n=42)]
    environments = Environments([Guesser], timeout=30)
    tape = Tape(tmp_path, 0, 1, plays=False)
    tape.environments = description_of(environments)
    tape.go_to(1, "train")
    rollouts = build(Guesser, texts, environments=environments, tape=tape).generate(
        prompts, SAMPLING
    )
    replayed = Tape(tmp_path, 0, 1, plays=True)
    replayed.go_to(1, "train")
    engine = build(
        None, texts, environments=AnsweredEnvironments(replayed.environments), tape=replayed
    )
    assert engine.generate(prompts, SAMPLING) == rollouts
    assert engine.engine.asked == []


def test_what_is_refused_at_the_start(opened, monkeypatch):
    def guess(x: int) -> str:
        """Guess.

        Args:
            x: a number.
        """

    with pytest.raises(
        ConfigError, match="an agent program has tools of its own; leave out --tools"
    ):
        Environments([Guesser], tools=[guess])
    environments = Environments([Guesser])
    with pytest.raises(EnvironmentFailed, match="reset takes n; the row's columns: prompt"):
        asyncio.run(environments.open({"prompt": "?"}, seed=1))
    environments.end()
    monkeypatch.setitem(sys.modules, CAPTURE, None)
    with pytest.raises(
        ConfigError, match=r"agent program asks openenv's server.*pip install openenv"
    ):
        Environments([Guesser])


def test_formats_by_tools(tokenizer):
    formats = ChatFormats(tokenizer)
    assert formats.of([TOOL]) is formats.of([dict(TOOL)])
    # a template that ends turns with calls by another token, which the engine must know from the start
    formats = ChatFormats(chat_tokenizer(NEXT))
    assert set(formats.stop_ids) == set(formats.of([TOOL]).stop_ids) > set(formats.of([]).stop_ids)
    blind = ChatFormats(chat_tokenizer(BLIND))
    assert blind.stop_ids == blind.of([]).stop_ids
    with pytest.raises(ConfigError, match="does not show the tools"):
        blind.of([TOOL]).opening([user("a")])
    thinking = ChatFormats(chat_tokenizer(FORGETFUL), template_options={"enable_thinking": False})
    quick, slow = (thinking.of([TOOL], kwargs) for kwargs in ({}, {"enable_thinking": True}))
    assert len(quick.opening([user("a")])) > len(slow.opening([user("a")]))


def test_forms_of_a_message_that_are_the_same():
    """Clients write empty contents, parts of text and arguments in several ways."""
    history = History()
    first = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    opening = history.first({"messages": first, "tools": None})
    assert opening.messages == [user("ab")]
    said = history.add_turn(turn_of("", 5))["message"]
    assert said["tool_calls"][0]["function"] == {"name": "guess", "arguments": '{"x": 5}'}
    said["tool_calls"][0]["function"]["arguments"] = '{"x":5}'
    echo = {"role": "assistant", "content": None, "tool_calls": said["tool_calls"], "refusal": None}
    answer = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "no"}
    new = history.further({"messages": [user("ab"), echo, answer, user("go on")]})
    assert new == [{"role": "tool", "content": "no", "name": "guess"}, user("go on")]
    with pytest.raises(EnvFailure, match="calls of tools already"):
        History().first({"messages": [user("a"), echo]})
    with pytest.raises(EnvFailure, match="has no messages"):
        History().first({"messages": []})


class Seen(PPOTrainer):
    """Keeps the rollouts of every step."""

    def fit(self) -> None:
        self.seen = []
        collect = self.sampler.collect

        def noting(prompts, step):
            collected = collect(prompts, step)
            self.seen += collected.rollouts
            return collected

        self.sampler.collect = noting
        super().fit()


class Again:
    """Asks three times, whatever it hears."""

    async def run(self, base_url: str, api_key: str, prompt: list) -> None:
        self.said = 0
        messages = list(prompt)
        for _ in range(3):
            message = await ask(base_url, api_key, messages, [TOOL])
            messages.append(message)
            for call in message.get("tool_calls", ()):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "no"})
            messages.append(user(f"Again.{END}"))
            self.said += len(message["content"])

    def get_reward(self) -> float:
        return float(self.said)


def test_a_run_with_an_agent_program(opened, tokenizer, world, make_config, tmp_path):
    """The model's own log probs of all sampled tokens, which nothing but the run's options asks for."""
    if not isinstance(opened, StandIn):
        pytest.skip("once is enough")
    save(small_llama(tokenizer, seed=1, positions=512), tokenizer, tmp_path / "chat")
    options = {
        "pretrain": str(tmp_path / "chat"),
        "env": [Again],
        "reward_fn": None,
        "reward_source": ["environment"],
        "max_turn_tokens": 6,
        "prompt_max_len": 250,
        "generate_max_len": 100,
        "benchmark_steps": 1,
        "actor_learning_rate": 0.0,
        "advantage_estimator": "grpo",
        "n_samples_per_prompt": 2,
        "init_kl_coef": 0,
    }
    with pytest.raises(ConfigError, match="--env Again: an agent program sends chat messages; set"):
        fitted(make_config(**options))
    trainer = fitted(make_config(**options, apply_chat_template=True), Seen)
    model = trainer.rollout_engine.engine.model
    assert {len(one.turns) for one in trainer.seen} == {3}
    for one in trainer.seen:
        ids = torch.tensor([one.prompt.token_ids + one.response_ids])
        start = len(one.prompt.token_ids)
        with torch.no_grad():
            scores = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(one.response_ids)[:, None])[:, 0]
        mask, got = torch.tensor(one.trained), torch.tensor(one.log_probs)
        torch.testing.assert_close(got[mask], expected[mask], atol=1e-4, rtol=0)
        assert not got[~mask].any()
        assert one.reward == sum(turn["reward"] for turn in one.turns)


class Blocks:
    """Blocks the loop of all programs after its first request was answered, until the test goes on."""

    goes_on = threading.Event()
    keys: list[str] = []

    async def run(self, base_url: str, api_key: str, n: int) -> None:
        self.keys.append(api_key)
        await ask(base_url, api_key, [user("hi")])
        self.goes_on.wait(60)


def test_a_key_ends_with_its_episode_after_a_blocked_loop(opened, monkeypatch):
    monkeypatch.setattr(hosts, "_PATIENCE", 0.1)
    Blocks.goes_on.clear()
    environments = Environments([Blocks], timeout=60)

    async def run():
        sessions = [await environments.open({"n": 1}, seed=1) for _ in range(2)]
        environments.timeout = 1
        turn = {"message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        turn |= {"prompt_ids": [1], "ids": [2], "log_probs": [-0.5]}
        for session in sessions:
            with pytest.raises(EnvironmentFailed):
                await session.step(turn)
            await session.close()

    asyncio.run(run())
    try:
        known = opened.engines if isinstance(opened, StandIn) else opened.registry.list_ids()
        assert len(Blocks.keys) == 2
        assert not set(Blocks.keys) & set(known)
    finally:
        Blocks.goes_on.set()
        Blocks.keys.clear()
        environments.end()


# -- the real one alone ------------------------------------------------------------------------------------------------


@pytest.fixture
def real(opened):
    if isinstance(opened, StandIn):
        pytest.skip("of the real openenv alone")
    return opened


def test_only_the_key_of_an_episode_is_let_in(play, real):
    import requests

    keys = []

    class Keeping(Guesser):
        async def run(self, base_url: str, api_key: str, n: int) -> None:
            keys.append(api_key)
            await super().run(base_url, api_key, n)

    play(Keeping, call(42), f"done{END}")
    assert real.url.startswith("http://127.0.0.1:")
    body = {"model": "any", "messages": [user("hi")]}
    for key in (keys[0], "other"):
        headers = {"Authorization": f"Bearer {key}"}
        answer = requests.post(f"{real.url}/chat/completions", json=body, headers=headers)
        assert answer.status_code == 401
        assert requests.get(f"{real.url[:-3]}/sessions", headers=headers).status_code == 401
    for path in ("docs", "openapi.json", "health", "v1/models"):
        assert requests.get(f"{real.url[:-2]}{path}").status_code == 401
    for path in ("v1/messages/count_tokens", "v1beta/models/any:countTokens"):
        assert requests.post(f"{real.url[:-2]}{path}", json=body).status_code == 401


@pytest.mark.parametrize(("path", "is_raised"), [("count_tokens", False), ("completions", True)])
def test_messages_that_cannot_be_counted_are_refused(path, is_raised):
    from lightppo.episodes.agents import Counting

    async def openenv(scope, receive, send):
        raise AttributeError("'str' object has no attribute 'get'")

    async def send(message):
        sent.append(message)

    sent: list[dict] = []
    scope = {"type": "http", "path": f"/v1/messages/{path}"}
    with pytest.raises(AttributeError) if is_raised else contextlib.nullcontext():
        asyncio.run(Counting(openenv)(scope, None, send))
    if not is_raised:
        assert sent[0]["status"] == 400
        assert b"messages must be a list of messages" in sent[1]["body"]


def request_of(url: str, key: str, length: int) -> socket.socket:
    """A request that has sent only its head."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    client = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    client.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
    return client


def status_of(client: socket.socket) -> str:
    """That of the answer; empty where the server has hung up."""
    with client:
        try:
            return client.recv(1 << 16).decode().partition("\r\n")[0].removeprefix("HTTP/1.1 ")
        except ConnectionError:
            return ""


def test_a_request_has_limits(real, monkeypatch):
    monkeypatch.setattr(real._connections, "seconds", 1.0)  # for what is refused

    async def run():
        conversation = Conversation()
        url, key = real.open(conversation)
        assert status_of(request_of(url, key, 17 << 20)).startswith("413")  # its body was not read
        held = [request_of(url, key, 10) for _ in range(agents._CONNECTIONS)]
        for one in held:
            one.sendall(b"{")
        deadline = time.monotonic() + 60
        while list(real._connections._keys.values()).count(key) < agents._CONNECTIONS:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        last = request_of(url, key, 2)
        last.sendall(b"{}")
        assert status_of(last).startswith("429")
        for one in held:
            one.close()
        real.close(key)
        late = request_of(url, key, 2)
        late.sendall(b"{}")
        assert status_of(late).startswith("401")

    asyncio.run(run())


def test_strangers_give_way(real, monkeypatch):
    monkeypatch.setattr(real._connections, "most_strangers", 3)
    strangers = [request_of(real.url, "wrong", 10) for _ in range(8)]
    assert [status_of(one) for one in strangers[:5]] == [""] * 5
    for one in strangers[5:]:
        one.close()


def test_a_request_without_messages(real):
    import requests

    async def run():
        url, key = real.open(Conversation())
        headers = {"Authorization": f"Bearer {key}"}
        for path in ("chat/completions", "messages", "models/any:generateContent"):
            ask = partial(requests.post, f"{url}/{path}", json={}, headers=headers, timeout=60)
            answer = await asyncio.to_thread(ask)
            assert answer.status_code == 400
            assert "messages must be a list" in answer.json()["error"]["message"]
        real.close(key)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({}, "messages must be a list of messages, and not empty"),
        ({"messages": None}, "messages must be a list"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": ["hi"]}, "message 0 must be an object with a text as its role"),
        ({"messages": [user("hi"), {"content": "hi"}]}, "message 1 must be an object"),
        ({"messages": [user(3)]}, "message 0: its content must be a text or a list of objects"),
        ({"messages": [user(["hi"])]}, "message 0: its content must be"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "message 0: tool_calls must be",
        ),
        ({"messages": [user("hi")], "tools": [1]}, "tools must be a list of objects"),
        ({"messages": [user("hi")], "response_format": 5}, "response_format cannot be trained"),
    ],
)
def test_a_request_that_is_no_conversation_is_refused(request_, problem):
    engine = agents.Engine(None, Refused)  # nobody is asked
    with pytest.raises(Refused, match=f"400: {problem}"):
        asyncio.run(engine.completion(request_))


def test_other_dialects_and_streams(play, real):
    class Streaming(Guesser):
        async def said(self, base_url, api_key, messages):
            from openai import AsyncOpenAI

            async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                stream = await client.chat.completions.create(
                    model="any", messages=messages, tools=[TOOL], stream=True
                )
                deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
            calls = [one for delta in deltas for one in delta.tool_calls or ()]
            message = {"role": "assistant", "content": "".join(d.content or "" for d in deltas)}
            if calls:
                function = {
                    "name": calls[0].function.name,
                    "arguments": "".join(one.function.arguments or "" for one in calls),
                }
                one = {"id": calls[0].id, "type": "function", "function": function}
                message["tool_calls"] = [one]
            messages.append(message)
            return message

    class Anthropic(Guesser):
        async def run(self, base_url: str, api_key: str, n: int) -> None:
            import httpx

            body = {"model": "any", "max_tokens": 50, "system": "Be brief."}
            body["messages"] = [user("Guess.")]
            async with httpx.AsyncClient(headers={"x-api-key": api_key}) as client:
                for _ in range(2):
                    answer = await client.post(f"{base_url}/messages", json=body, timeout=30)
                    content = answer.raise_for_status().json()["content"]
                    body["messages"] += [{"role": "assistant", "content": content}, user("Sure?")]
            self.right, self.is_over = content[0]["text"] == "yes", True

    for kind, texts in (
        (Streaming, (call(3), call(42), f"done{END}")),
        (Anthropic, (f"It is 42.{END}", f"yes{END}")),
    ):
        _, rollouts = play(kind, *texts)
        assert [len(one.turns) for one in rollouts] == [len(texts)] * 2
        assert [one.turns[-1]["reward"] for one in rollouts] == [1.0, 1.0]


def test_a_program_of_its_own_process(play, real):
    class Commanded:
        async def run(self, base_url: str, api_key: str, n: int) -> None:
            command = [sys.executable, str(PROGRAMS), str(n)]
            self.written = await run_program(command, base_url=base_url, api_key=api_key)

        def get_reward(self) -> float:
            return float(self.written.strip() == "right")

    _, rollouts = play(Commanded, f"41{END}", f"42{END}")
    assert [one.turns[-1]["reward"] for one in rollouts] == [1.0, 1.0]
    _, rollouts = play(Commanded, f"no number{END}")
    assert "ended with code 1: " in rollouts[0].texts["failure"]
    assert "ValueError" in rollouts[0].texts["failure"]


def test_the_example(play, real):
    kind = load_python_object(f"{EXAMPLES / 'agent.py'}", "Agent", option="--env")

    class Asked(kind):
        async def run(self, base_url: str, api_key: str, n: int) -> None:
            prompt = [user("What is 6 * 7?")]
            await super().run(base_url, api_key, prompt=prompt, label=str(n))

    def calculation(text):
        called = json.dumps({"name": "multiply", "arguments": text})
        return f"<tool_call>\n{called}\n</tool_call>{END}"

    wrong, right = {"a": 6, "b": "x"}, {"a": 6, "b": 7}
    _, rollouts = play(Asked, calculation(wrong), calculation(right), f"It is 42.{END}")
    for one in rollouts:
        told = [message["content"] for message in one.messages if message["role"] == "tool"]
        assert told[0].startswith("error: ")
        assert told[1:] == ["42"]
        assert one.turns[-1]["reward"] == 1.0


def test_in_worker_processes(build, tokenizer, real):
    environments = Environments([f"{PROGRAMS}:Program"], timeout=60, workers=2)
    engine = build(None, (f"41{END}", f"42{END}"), environments=environments)
    rollouts = engine.generate([prompt_of("?", tokenizer, index=7, n=42)], SAMPLING)
    assert [one.turns[-1]["reward"] for one in rollouts] == [1.0, 1.0]


# -- programs without a server -----------------------------------------------------------------------------------------


def test_a_program_is_killed_with_what_it_has_started(tmp_path):
    script = "sleep 1000 & echo $! > pid; echo begun; wait"

    async def run():
        given = {"base_url": "http://127.0.0.1:1/v1", "api_key": "k", "HERE": "here"}
        said = await run_program(
            ["sh", "-c", "echo $OPENAI_BASE_URL $OPENAI_API_KEY $HERE"], **given
        )
        assert said == "http://127.0.0.1:1/v1 k here\n"
        program = asyncio.ensure_future(
            run_program(["sh", "-c", f"cd {tmp_path}; {script}"], **given)
        )
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            await asyncio.sleep(0.01)
        program.cancel()
        await asyncio.wait({program})
        return int((tmp_path / "pid").read_text())

    assert has_ended(asyncio.run(run()))


WAITING = """
import asyncio, sys
from lightppo import run_program
asyncio.run(run_program(["sh", "-c", sys.argv[1]], base_url="http://127.0.0.1:1/v1", api_key="k"))
"""


def test_a_program_does_not_outlive_a_killed_trainer(tmp_path):
    pid = tmp_path / "pid"
    trainer = subprocess.Popen(
        [sys.executable, "-c", WAITING, f"sleep 1000 & echo $! > {pid}; wait"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    while not pid.exists() or not pid.read_text().strip():
        assert trainer.poll() is None
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()
    assert has_ended(int(pid.read_text()))


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("exit 3", "sh ended with code 3: "),
        ("echo why; kill -11 $$", "sh ended with code -11: why"),
        ("yes", "sh wrote more than 0 MiB"),
    ],
)
def test_ends_of_programs(script, text, monkeypatch):
    monkeypatch.setattr(agents, "_MAX_OUTPUT_BYTES", 1 << 16)
    with pytest.raises(EnvFailure, match=re.escape(text)):
        asyncio.run(run_program(["sh", "-c", script], base_url="", api_key=""))


def test_a_program_that_is_stopped_while_it_writes_is_waited_for(monkeypatch):
    """Output that nobody reads any more must not keep the wait for its end from ending."""
    start = functools.partial(asyncio.create_subprocess_exec, limit=1024)  # soon full
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(agents, "_MAX_OUTPUT_BYTES", 1 << 12)

    async def run() -> None:
        async with asyncio.timeout(60):
            await run_program(["yes"], base_url="", api_key="")

    with pytest.raises(EnvFailure, match="yes wrote more than"):
        asyncio.run(run())


def test_a_program_that_is_not_there():
    with pytest.raises(EnvFailure, match=r"/not/there ended with code 127: .*No such file"):
        asyncio.run(run_program(["/not/there"], base_url="", api_key=""))


def has_ended(pid: int) -> bool:
    """Whether a process ends within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return False


def test_a_program_that_is_ended_while_it_starts_is_killed_with_what_it_has_started(
    tmp_path, monkeypatch
):
    create, pid, has_begun = asyncio.create_subprocess_exec, tmp_path / "pid", asyncio.Event()

    async def create_slowly(*command, **options):
        process = await create(*command, **options)
        while not pid.exists() or not pid.read_text().strip():
            await asyncio.sleep(0.01)
        has_begun.set()
        await asyncio.sleep(0.1)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_slowly)
    command = ["sh", "-c", f"sleep 1000 & echo $! > {pid}; wait"]

    async def run():
        program = asyncio.ensure_future(
            run_program(command, base_url="http://127.0.0.1:1/v1", api_key="k")
        )
        await has_begun.wait()
        program.cancel()
        await asyncio.wait({program})
        assert program.cancelled()

    asyncio.run(run())
    assert has_ended(int(pid.read_text()))
