"""Which part of a row is prompt, label, completion; prompts as text and ids."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, Features, Json
from support.chats import BLIND, CHATML, DEAF, FORGETFUL, HEADERS, TOOLS

from lightppo.data.chat_templates import PromptTemplate
from lightppo.data.datasets import PromptDataset
from lightppo.data.rows import (
    checked_chat,
    lookup,
    read_label,
    read_prompt,
    resolve_fields,
    template_options,
    text_or_chat,
)
from lightppo.errors import BadRowError, DataError

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 3},
}
AREAL_MATH = {"prompt": "2+2?", "query_id": "7", "solutions": ["\\boxed{4}"], "task": "math"}
AREAL_CODE = {
    "prompt": "add",
    "query_id": "8",
    "input_output": '{"inputs": ["1 1"], "outputs": ["2"]}',
    "task": "code",
}
AREAL_GSM8K = {"messages": [USER], "answer": "so\n#### 4"}

PROMPTS = [
    (VERL, [USER], "4"),
    ({"prompt": "2+2?", "completion": "4", "solution": "4"}, "2+2?", "4"),
    ({"prompt": [USER], "ground_truth": [4]}, [USER], [4]),
    ({"messages": [USER, ANSWER]}, [USER], None),
    ({"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "5"}]}, [USER], None),
    (
        {
            "chosen": "\n\nHuman: 2+2?\n\nAssistant: It is 4",
            "rejected": "\n\nHuman: 2+2?\n\nAssistant: It is 5",
        },
        "\n\nHuman: 2+2?\n\nAssistant:",
        None,
    ),
    (AREAL_MATH, "2+2?", ["\\boxed{4}"]),
    (AREAL_CODE, "add", AREAL_CODE["input_output"]),
    (AREAL_GSM8K, [USER], "so\n#### 4"),
    ({"question": "2+2?", "answer": "4"}, "2+2?", "4"),
    ({"input": "2+2?", "prompt": "another", "label": 0}, "2+2?", 0),
]


@pytest.mark.parametrize(("row", "prompt", "label"), PROMPTS)
def test_known_forms(row: dict, prompt: object, label: object) -> None:
    fields = resolve_fields(list(row))
    assert read_prompt(row, fields)[0] == prompt
    assert read_label(row, fields) == label


def test_explicit_keys_win() -> None:
    row = {"input": "a", "prompt": "b", "answer": "x", "meta": {"q": "c", "truth": 5}}
    assert read_prompt(row, resolve_fields(list(row), input_key="prompt")) == ("b", "prompt")
    fields = resolve_fields(list(row), input_key="meta.q", label_key="meta.truth")
    assert read_prompt(row, fields) == ("c", "meta.q")
    assert read_label(row, fields) == 5
    assert fields.columns_in(list(row)) == ["meta"]
    assert lookup({"a.b": 1, "a": {"b": 2}}, "a.b") == 1  # a column of that very name first


def test_forms_are_told_apart_row_by_row() -> None:
    rows = [
        {"prompt": [USER], "question": None, "answer": None},
        {"prompt": None, "question": "q", "answer": "5"},
    ]
    fields = resolve_fields(["prompt", "question", "answer"])
    assert [read_prompt(r, fields)[1] for r in rows] == ["prompt", "question"]
    assert [read_label(r, fields) for r in rows] == [None, "5"]


def test_missing_columns_are_listed() -> None:
    with pytest.raises(DataError, match=r"--input_key 'query' .*: a, b$"):
        resolve_fields(["a", "b", "__origin__"], input_key="query")
    with pytest.raises(DataError, match=r"--label_key 'gold' .* prompt"):
        resolve_fields(["prompt"], label_key="gold")
    with pytest.raises(DataError, match=r"--input_key .*: a, b"):
        resolve_fields(["a", "b"])


BAD = [
    ({"prompt": None}, "missing", "'prompt' missing or null"),
    ({"prompt": 7}, "wrong_type", "'prompt' is int 7; text or a list of chat messages"),
    ({"prompt": {"role": "user"}}, "wrong_type", "'prompt' is dict"),
    ({"prompt": "  \n"}, "empty", "'prompt' is empty"),
    ({"prompt": []}, "empty", "empty list of messages"),
    ({"prompt": ["hi"]}, "wrong_type", r"'prompt'\[0\] is str 'hi'"),
    ({"prompt": [{"content": "hi"}]}, "wrong_type", "has a role"),
    (
        {"prompt": [USER, {"role": "user", "content": [{"type": "image"}]}]},
        "wrong_type",
        r"\[1\].content is list",
    ),
    ({"prompt": [USER, {"role": "user", "content": " "}]}, "empty", "last message is empty"),
    ({"messages": [ANSWER]}, "missing", "an answer but no prompt"),
    ({"chosen": [USER], "rejected": "x"}, "wrong_type", "list and str"),
    ({"chosen": "It is 4", "rejected": "It is 5"}, "missing", "share no prompt"),
]


@pytest.mark.parametrize(("row", "reason", "message"), BAD)
def test_bad_rows(row: dict, reason: str, message: str) -> None:
    with pytest.raises(BadRowError, match=message) as caught:
        read_prompt(row, resolve_fields(list(row)))
    assert caught.value.reason == reason


def test_a_row_without_the_explicit_label() -> None:
    fields = resolve_fields(["prompt", "gold"], label_key="gold")
    with pytest.raises(BadRowError, match="'gold'"):
        read_label({"prompt": "a", "gold": None}, fields)
    assert read_label({"prompt": "a", "gold": 0}, fields) == 0  # a falsy label is a label


def test_arrows_empty_fields_are_taken_out_of_messages() -> None:
    row = {"prompt": [{**USER, "tool_calls": None, "name": None}]}
    assert read_prompt(row, resolve_fields(["prompt"]))[0] == [USER]


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


def test_no_images_and_no_tools_are_nothing() -> None:
    assert template_options({"images": [], "tools": [], "chat_template_kwargs": None}) == {}
    assert template_options({"image": None, "tools": "[]"}) == {}


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


def test_a_last_turn_of_calls_alone_is_no_empty_message() -> None:
    assert checked_chat([USER, CALL], "'messages'")[-1]["content"] == ""
