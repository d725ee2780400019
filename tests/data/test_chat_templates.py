"""Prompts and chats as text and ids."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, Features, Json
from support.chats import BLIND, CHATML, DEAF, FORGETFUL, HEADERS, TOOLS

from lightppo.data.chat_templates import PromptTemplate
from lightppo.data.datasets import PromptDataset
from lightppo.data.rows import (
    checked_chat,
    template_options,
    text_or_chat,
)
from lightppo.errors import BadRowError, DataError

USER = {"role": "user", "content": "2+2?"}
HI = {"role": "user", "content": "hi"}


def test_text_stays_or_goes_through_the_input_template(tokenizer) -> None:
    assert PromptTemplate(tokenizer).render("a{}b").text == "a{}b"
    rendered = PromptTemplate(tokenizer, input_template="{x} Q: {}\nA:").render("1{}")
    # other braces are text, in the template and in the prompt
    assert rendered.text == "{x} Q: 1{}\nA:"
    assert (rendered.is_chat, rendered.messages) == (False, None)


def test_chat_template_and_system_prompt(tokenizer) -> None:
    assert PromptTemplate(tokenizer).render([HI]).text == "<u>hi~\n<a>"
    as_chat = PromptTemplate(tokenizer, apply_chat_template=True, system_prompt="be").render("hi")
    assert as_chat.text == "<s>be~\n<u>hi~\n<a>"
    assert as_chat.messages == [HI]  # without the system prompt: a reward model has its own
    own = [{"role": "system", "content": "own"}, HI]
    assert PromptTemplate(tokenizer, system_prompt="be").render(own).text == "<s>own~\n<u>hi~\n<a>"


def test_a_prompt_that_ends_with_the_assistant_is_continued(tokenizer) -> None:
    chat = [HI, {"role": "assistant", "content": "x ="}]
    assert PromptTemplate(tokenizer).render(chat).text == "<u>hi~\n<a>x ="


def test_contradictions(tokenizer) -> None:
    with pytest.raises(DataError, match=r"--input_template .*--apply_chat_template"):
        PromptTemplate(tokenizer, apply_chat_template=True, input_template="{}")
    with pytest.raises(DataError, match="--input_template"):
        PromptTemplate(tokenizer, input_template="Q:")
    with pytest.raises(DataError, match="--system_prompt"):
        PromptTemplate(tokenizer, system_prompt="be").render("text")
    with pytest.raises(DataError, match="--input_template"):
        PromptTemplate(tokenizer, input_template="Q: {}").render([HI])


def test_a_tokenizer_without_a_chat_template(make_tokenizer) -> None:
    bare = make_tokenizer(chat=False)
    with pytest.raises(DataError, match="--apply_chat_template"):
        PromptTemplate(bare, apply_chat_template=True)
    with pytest.raises(DataError, match="chat template"):
        PromptTemplate(bare).render([HI])


def test_a_chat_that_the_template_refuses_is_a_bad_row(tokenizer) -> None:
    with pytest.raises(BadRowError, match="unknown role wizard") as caught:
        PromptTemplate(tokenizer).render([{"role": "wizard", "content": "hi"}])
    assert caught.value.reason == "template"


def test_begin_of_text_once_and_no_end_of_text(make_tokenizer) -> None:
    tokenizer = make_tokenizer(bos=True, append_eos=True)
    assert tokenizer("ab")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer("ab")["input_ids"][-1] == tokenizer.eos_token_id
    template = PromptTemplate(tokenizer)
    rendered = [template.render(p) for p in ("ab", [HI], "^ab")]

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids)

    # plain text gets one; a chat only what its template writes; a text that has one gets no second
    assert [text(ids) for ids in template.encode_rendered(rendered)] == [
        "^ab",
        "<u>hi~\n<a>",
        "^ab",
    ]
    # the text's own end stays
    assert text(template.encode(["ab~"], special_tokens=True)[0]) == "^ab~"


# -- tools, calls, variables of the template ---------------------------------------------------------------------------

CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "id": "1", "function": {"name": "guess", "arguments": {"x": 7, "why": None}}}
]}  # fmt: skip
RESULT = {"role": "tool", "content": "too low"}
PLAYED = [USER, CALL, RESULT]


def as_texts(chat: list[dict]) -> list[dict]:
    """OpenAI's form: arguments are texts of JSON."""
    (call,) = chat[1]["tool_calls"]
    text = json.dumps(call["function"]["arguments"])
    function = call["function"] | {"arguments": text}
    return [chat[0], chat[1] | {"tool_calls": [call | {"function": function}]}, *chat[2:]]


@pytest.fixture
def chatml(tokenizer):
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["objects", "text"])
def test_tools_of_a_row_reach_the_template(chatml, tools) -> None:
    rows = [{"prompt": [USER], "tools": tools}, {"prompt": [USER], "tools": None}]
    with_tools, without = PromptDataset(Dataset.from_list(rows), chatml)
    assert '"name": "guess"' in with_tools.text
    assert '"required": ["word"]' in with_tools.text
    assert "null" not in with_tools.text  # of the other tool's properties
    assert "Tools" not in without.text


@pytest.mark.parametrize("template", [CHATML, CHATML.replace(" | tojson + '}", " + '}")])
@pytest.mark.parametrize("form", [list, as_texts])
def test_arguments_are_written_once(tokenizer, template, form) -> None:
    # the second template writes them as they are, and cannot write an object
    tokenizer.chat_template = template
    rows = Dataset.from_dict(
        {"prompt": [json.dumps(form(PLAYED))]}, features=Features(prompt=Json())
    )
    (prompt,) = PromptDataset(rows, tokenizer)
    # as JSON has it: nobody but the writer of the row put the null there
    assert '"arguments": {"x": 7, "why": null}}\n</tool_call>' in prompt.text


@pytest.mark.parametrize("written", ["m.content", "m['content'] + ''", "m.content | trim"])
def test_a_call_without_a_text(tokenizer, written) -> None:
    """Releases of transformers differ in a None: the template sees it, or finds no content at all."""
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ WRITTEN }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]"
        "{% endfor %}"
    ).replace("WRITTEN", written)
    without = {key: value for key, value in CALL.items() if key != "content"}
    for call in (CALL, CALL | {"content": None}, without):
        chat = checked_chat([USER, call, RESULT], "'prompt'")
        text = PromptTemplate(tokenizer).render(chat).text
        assert text.startswith(f'[{USER["content"]}][{{"name": "guess"'), text


def test_a_template_that_would_write_python(tokenizer) -> None:
    tokenizer.chat_template = CHATML.replace(" | tojson + '}", " | string + '}")
    text = PromptTemplate(tokenizer).render(checked_chat(PLAYED, "'prompt'")).text
    assert '"arguments": {"x": 7, "why": null}}' in text


def test_a_message_that_quotes_arguments_as_python_does(chatml) -> None:
    quoted = [*PLAYED[:2], {"role": "tool", "content": "guess got {'x': 7, 'why': None}"}]
    text = PromptTemplate(chatml).render(checked_chat(quoted, "'prompt'")).text
    assert '"arguments": {"x": 7, "why": null}}' in text


def test_fields_that_only_other_rows_have_are_not_written(chatml) -> None:
    call = {"type": "function", "id": "2", "function": {"name": "look_up"}}
    call["function"]["arguments"] = {"word": "a"}
    other = [USER, CALL | {"tool_calls": [call]}, RESULT]
    rows = Dataset.from_list([{"prompt": PLAYED}, {"prompt": other}])
    assert "why" in str(rows[1]["prompt"])  # Arrow has put it there
    first, second = PromptDataset(rows, chatml)
    assert '"arguments": {"x": 7}}' in first.text
    assert '"arguments": {"word": "a"}}' in second.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["a.png"]}, "'images' is list .*; models read text alone here"),
        ({"image": "a.png"}, "'image' is str 'a.png'; models read text alone here"),
        ({"tools": ["guess"]}, r"'tools' is list \['guess'\]; a list of JSON schemas"),
        ({"tools": "guess"}, "'tools' is not JSON"),
        ({"chat_template_kwargs": "no"}, "'chat_template_kwargs' is not JSON"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' must be a JSON object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "has 'tokenize', which is no variable"),
        ({"chat_template_kwargs": {"thinks": True}}, "the chat template does not read 'thinks'"),
        ({"tools": [{"name": "guess"}], "prompt": "2+2?"}, "'tools' is for a chat template, and"),
        ({"prompt": [USER, {"role": "human", "content": "hi"}]}, "messages of the role 'human'"),
        ({"prompt": [{"role": "developer", "content": "2"}, USER]}, "messages of the role 'deve"),
        ({"prompt": [USER, CALL | {"tool_calls": "x"}]}, r"\[1\].tool_calls is not JSON"),
        ({"prompt": [USER, CALL | {"tool_calls": [{"name": 1}]}]}, "has no name of a function"),
        (
            {"prompt": [USER, CALL | {"tool_calls": [{"name": "f", "arguments": "{"}]}]},
            r"\[1\].tool_calls\[0\].arguments is not JSON",
        ),
        (
            {"prompt": [USER, CALL | {"tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            r"\[1\].tool_calls\[0\].arguments is list \[1\]; an object is needed",
        ),
    ],
)
def test_what_a_template_cannot_take_is_refused_by_name(chatml, row, message) -> None:
    row = {"prompt": [USER]} | row

    def rendered():
        options = template_options(row)
        return PromptTemplate(chatml).render(text_or_chat(row["prompt"], "'prompt'"), options)

    with pytest.raises(BadRowError, match=message):
        rendered()


def test_parts_that_the_template_drops(tokenizer) -> None:
    template = PromptTemplate(tokenizer)
    tokenizer.chat_template = BLIND
    with pytest.raises(BadRowError, match=r"does not show the tools \(guess, look_up\)"):
        template.render([USER], {"tools": TOOLS})
    described = {"role": "system", "content": "You may call guess and look_up."}
    assert "guess" in template.render([described, USER], {"tools": TOOLS}).text
    tokenizer.chat_template = DEAF
    with pytest.raises(BadRowError, match="drops the text of messages of the role 'tool'"):
        template.render(PLAYED)
    # Like Llama 3.1's: a text beside calls is dropped. It is found by chance in the question, and in a probe is not.
    tokenizer.chat_template = HEADERS
    assert "guess" in template.render(checked_chat(PLAYED, "'prompt'")).text
    with pytest.raises(BadRowError, match="of the role 'assistant' beside calls"):
        template.render([USER, checked_chat([CALL | {"content": "2"}], "")[0], RESULT])
    tokenizer.chat_template = CHATML.replace("message.content + '<|", "message.content[:9] + '<|")
    with pytest.raises(BadRowError, match=r"the text of message 1 \(user\) as it is"):
        template.render([{"role": "user", "content": "short, and then something longer"}])


def test_white_space_json_and_earlier_thinking_may_be_written_otherwise(tokenizer) -> None:
    tokenizer.chat_template = FORGETFUL.replace("message.content + '<|", "message.content | trim + '<|")  # fmt: skip
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
    chat = [{"role": "user", "content": " a\n "}, thought, USER]
    assert "hm" not in PromptTemplate(tokenizer).render(chat).text
    tokenizer.chat_template = HEADERS
    result = {"role": "tool", "content": 'a "quoted"\nline ü'}
    assert "\\n" in PromptTemplate(tokenizer).render([*checked_chat(PLAYED[:2], ""), result]).text


def test_variables_of_the_template(tokenizer) -> None:
    tokenizer.chat_template = FORGETFUL
    quick = PromptTemplate(tokenizer, chat_template_kwargs='{"enable_thinking": false}')
    assert quick.render([USER]).text.endswith("<think>\n\n</think>\n\n")
    # those of a row go before
    slow = quick.render([USER], {"enable_thinking": True}).text
    assert slow.endswith("<think>\n")
    assert slow == PromptTemplate(tokenizer).render([USER]).text
    with pytest.raises(DataError, match="--chat_template_kwargs: the chat template does not read"):
        PromptTemplate(tokenizer, chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(DataError, match="--chat_template_kwargs needs chat rows"):
        quick.render("2+2?")
    rows = [{"prompt": [USER], "chat_template_kwargs": kwargs} for kwargs in ({"enable_thinking": False}, {})]  # fmt: skip
    first, second = PromptDataset(Dataset.from_list(rows), tokenizer)
    assert (first.text, second.text) == (quick.render([USER]).text, slow)
