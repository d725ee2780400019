"""What a response says beside its thinking, by the marks of all families."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.chats import chat_tokenizer

from lightppo.data.records import Prompt, Rollout
from lightppo.verifiers.code import CodeReward, CodeVerdict
from lightppo.verifiers.formats import FormatReward
from lightppo.verifiers.math import find_answer
from lightppo.verifiers.thinking import THINKING, Thinking, after_thinking


def rollout(prompt: str, text: str, tokenizer: Any = None, **fields: Any) -> Rollout:
    ids = [2] if tokenizer is None else tokenizer(text, add_special_tokens=False).input_ids
    shown = text if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
    return Rollout(Prompt(prompt, [1]), 0, ids, shown, "length", **fields)


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("so 5", "so 5"),
        ("<think>3</think>5", "5"),
        ("3</think>5", "5"),
        ("<think>3", None),
        ("<think>3</think>5<think>", None),
        ("<think>3</think>4</think>5", "5"),
    ],
)
def test_after_thinking(text: str, rest: str | None) -> None:
    assert after_thinking(text) == rest


@pytest.mark.parametrize(("opener", "closer"), THINKING)
@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "text"])
@pytest.mark.parametrize("opened", [True, False], ids=["by the prompt", "by the model"])
def test_marks_of_families(opener: str, closer: str, special: bool, opened: bool) -> None:
    marks = (
        "<|start|> <|channel|> <|message|> <|end|>"
        if "<|channel|>" in opener
        else f"{opener} {closer}"
    )
    tokenizer = chat_tokenizer(None, added=f"<s> </s> {marks if special else ''}", end="</s>")
    thinking = Thinking(tokenizer)
    prompt, begin = (f"question\n{opener}\n", "") if opened else ("question\n", opener)
    behind = "<|start|>assistant<|channel|>final<|message|>" if closer == "<|end|>" else ""
    whole = f"{begin}is it \\boxed{{3}}?{closer}{behind}It is \\boxed{{5}}.</s>"
    shown = thinking.shown(rollout(prompt, whole, tokenizer))
    assert shown.startswith("<think>is it")
    assert after_thinking(shown).removesuffix("</s>") == "It is \\boxed{5}."
    cut = thinking.shown(rollout(prompt, f"{begin}is it \\boxed{{3}}? 4", tokenizer))
    assert cut == "<think>is it \\boxed{3}? 4"
    assert find_answer(cut) is None


def test_a_token_that_ends_turns_ends_no_thinking() -> None:
    """Phi's <|end|> is half of another family's marks."""
    tokenizer = chat_tokenizer(None, added="<s> </s> <|end|>", end="<|end|>")
    assert Thinking(tokenizer).shown(rollout("q", "It is 5.<|end|>", tokenizer)) == "It is 5."


def test_thinking_that_the_prompt_ends_is_over() -> None:
    assert Thinking().shown(rollout("q<think>\n\n</think>\n\n", "5")) == "5"


def test_the_text_of_an_episode_is_its_last_turn() -> None:
    assert Thinking().shown(rollout("q<think>\n", "5", turns=[{"end": 0}])) == "5"


def test_rewards_do_not_read_an_open_thought(make_math: Callable[..., Any]) -> None:
    cut = rollout("q<think>\n", "```python\nprint(1)\n```\nso \\boxed{5}")
    cut.prompt.label = "5"
    cut.prompt.extra = {"input_output": {"inputs": [""], "outputs": ["1"]}}
    asked: list[str] = []

    def verify(code: str, tests: Any, *, first_failure_ends: bool) -> CodeVerdict:
        asked.append(code)
        return CodeVerdict([True])

    code = CodeReward(SimpleNamespace(verify=verify, concurrency=1, close=lambda: None))
    assert (code.score([cut]).scores, asked) == ([0.0], [])
    assert make_math().score([cut]).scores == [0.0]
    assert FormatReward("think").score([cut]).scores == [0.0]
    done = rollout("q<think>\n", "so</think> 5")
    assert FormatReward("think").score([done]).scores == [1.0]


@pytest.fixture
def make_math() -> Callable[..., Any]:
    pytest.importorskip("latex2sympy2_extended")
    from lightppo.verifiers.math import MathReward

    return lambda: MathReward(reward_workers=1)
