"""Prompts as text and ids."""

from __future__ import annotations

import logging

import pytest

from lightppo.data.rows import PromptTemplate
from lightppo.errors import BadRowError, DataError

USER = {"role": "user", "content": "hi"}


def test_text_stays_or_goes_through_the_input_template(tokenizer) -> None:
    assert PromptTemplate(tokenizer).render("a{}b").text == "a{}b"
    rendered = PromptTemplate(tokenizer, input_template="{x} Q: {}\nA:").render("1{}")
    assert rendered.text == "{x} Q: 1{}\nA:"  # other braces are text, in the template and in the prompt
    assert (rendered.is_chat, rendered.messages) == (False, None)


def test_chat_template_and_system_prompt(tokenizer) -> None:
    assert PromptTemplate(tokenizer).render([USER]).text == "<u>hi~\n<a>"
    as_chat = PromptTemplate(tokenizer, apply_chat_template=True, system_prompt="be").render("hi")
    assert as_chat.text == "<s>be~\n<u>hi~\n<a>"
    assert as_chat.messages == [USER]  # without the system prompt: a reward model has its own
    own = [{"role": "system", "content": "own"}, USER]
    assert PromptTemplate(tokenizer, system_prompt="be").render(own).text == "<s>own~\n<u>hi~\n<a>"


def test_a_prompt_that_ends_with_the_assistant_is_continued(tokenizer) -> None:
    chat = [USER, {"role": "assistant", "content": "x ="}]
    assert PromptTemplate(tokenizer).render(chat).text == "<u>hi~\n<a>x ="


def test_contradictions(tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match="--input_template and --apply_chat_template"):
        PromptTemplate(tokenizer, apply_chat_template=True, input_template="{}")
    with pytest.raises(DataError, match=r"exactly one \{\}"):
        PromptTemplate(tokenizer, input_template="Q:")
    with pytest.raises(DataError, match="--system_prompt needs chat rows"):
        PromptTemplate(tokenizer, system_prompt="be").render("text")
    with pytest.raises(DataError, match="--input_template is for plain text"):
        PromptTemplate(tokenizer, input_template="Q: {}").render([USER])
    with caplog.at_level(logging.WARNING):
        PromptTemplate(tokenizer, input_template="Q: {}\\nA:")
    assert "not a line break" in caplog.text


def test_a_tokenizer_without_a_chat_template(make_tokenizer) -> None:
    bare = make_tokenizer(chat=False)
    with pytest.raises(DataError, match=r"--apply_chat_template: the tokenizer .* has no chat template"):
        PromptTemplate(bare, apply_chat_template=True)
    with pytest.raises(DataError, match="the rows are chats, but the tokenizer"):
        PromptTemplate(bare).render([USER])


def test_a_chat_that_the_template_refuses_is_a_bad_row(tokenizer) -> None:
    with pytest.raises(BadRowError, match="unknown role wizard") as caught:
        PromptTemplate(tokenizer).render([{"role": "wizard", "content": "hi"}])
    assert caught.value.reason == "template"


def test_begin_of_text_once_and_no_end_of_text(make_tokenizer) -> None:
    tokenizer = make_tokenizer(bos=True, append_eos=True)
    assert tokenizer("ab")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer("ab")["input_ids"][-1] == tokenizer.eos_token_id
    template = PromptTemplate(tokenizer)
    rendered = [template.render(p) for p in ("ab", [USER], "^ab")]

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids)

    # plain text gets one; a chat only what its template writes; a text that has one gets no second
    assert [text(ids) for ids in template.encode_rendered(rendered)] == ["^ab", "<u>hi~\n<a>", "^ab"]
    assert text(template.encode(["ab~"], special_tokens=True)[0]) == "^ab~"  # the text's own end stays
