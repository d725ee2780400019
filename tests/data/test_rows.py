"""Which part of a row is prompt, label, completion."""

from __future__ import annotations

import pytest

from lightppo.data.rows import (
    checked_chat,
    lookup,
    read_label,
    read_prompt,
    resolve_fields,
    template_options,
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


def test_no_images_and_no_tools_are_nothing() -> None:
    assert template_options({"images": [], "tools": [], "chat_template_kwargs": None}) == {}
    assert template_options({"image": None, "tools": "[]"}) == {}


def test_a_last_turn_of_calls_alone_is_no_empty_message() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "guess", "arguments": {}}]}
    assert checked_chat([USER, call], "'messages'")[-1]["content"] == ""
