"""Reading calls of tools."""

from __future__ import annotations

import importlib.util

import pytest
from support.chats import CHATML, TOOLS, chat_tokenizer

from lightppo.episodes.tool_formats import (
    TOOL_FORMATS,
    Call,
    ToolFormat,
    find_format,
    vllm_formats,
)
from lightppo.errors import ConfigError


def read(name: str, text: str):
    return TOOL_FORMATS[name].fn(text, tools=TOOLS, tokenizer=None, end="")


@pytest.mark.parametrize(
    ("name", "text", "rest", "calls"),
    [
        ("hermes", "So.", "So.", []),
        (
            "hermes",
            'So.\n<tool_call>\n{"name": "guess", "arguments": {"x": 5}}\n</tool_call>',
            "So.\n",
            [Call("guess", {"x": 5})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>\n<tool_call>{"name": "b"}',
            "\n",
            [Call("a", {"x": 1}), Call("b", {})],
        ),
        (
            "qwen_xml",
            "Hm <tool_call>\n<function=guess>\n<parameter=x>\n5\n</parameter>\n<parameter=why>\n 7\n\n"
            "</parameter>\n</function>\n</tool_call>",
            "Hm ",
            [Call("guess", {"x": 5, "why": " 7\n"})],
        ),
        (
            "qwen_xml",
            "<function=guess><parameter=x>five</function>",
            "",
            [Call("guess", {"x": "five"})],
        ),
        ("qwen_xml", "<function=other>\n</function>", "", [Call("other", {})]),
        (
            "llama3",
            '{"name": "guess", "parameters": {"x": 5}}; {"name": "look_up", "arguments": {"word": "a"}}',
            "",
            [Call("guess", {"x": 5}), Call("look_up", {"word": "a"})],
        ),
        (
            "llama3",
            'Well <|python_tag|>{"name": "guess", "parameters": {"x": 5}}',
            "Well ",
            [Call("guess", {"x": 5})],
        ),
        ("llama3", '{"answer": 5}', '{"answer": 5}', []),
        ("llama3", "The answer is {5}.", "The answer is {5}.", []),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "guess", "arguments": {"x": 5}, "id": "abc123def"}]',
            "",
            [Call("guess", {"x": 5}, id="abc123def")],
        ),
        (
            "mistral",
            'So [TOOL_CALLS]guess[ARGS]{"x": 5}[TOOL_CALLS]look_up[CALL_ID]a1[ARGS]{"word": "[x]"}',
            "So ",
            [Call("guess", {"x": 5}), Call("look_up", {"word": "[x]"}, id="a1")],
        ),
    ],
)
def test_calls_are_read(name, text, rest, calls):
    assert read(name, text) == (rest, calls)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("hermes", "<tool_call>guess 5</tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "guess", "arguments": {"x": 5}</tool_call>', "character"),
        ("hermes", '<tool_call>{"arguments": {"x": 5}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": "guess", "arguments": [5]}</tool_call>', "type list"),
        ("hermes", '<tool_call>["guess"]</tool_call>', "type list"),
        ("hermes", '<tool_call>{"name": "guess", "arguments": {"x": NaN}}</tool_call>', "NaN"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nested"),
        ("qwen_xml", "<tool_call>guess</tool_call>", "<function=name>"),
        ("llama3", "<|python_tag|>guess.call(x=5)", "not valid JSON"),
        ("llama3", '{"name": "guess", "parameters": {"x": 5}', "not valid JSON"),
        ("mistral", "[TOOL_CALLS]guess", "JSON object"),
        ("mistral", '[TOOL_CALLS][{"name": "guess"', "not valid JSON"),
    ],
)
def test_what_cannot_be_read_is_text_for_the_model(name, text, said):
    _, (call,) = read(name, text)
    assert said in call.problem
    assert "Nothing was executed" in call.problem


def test_values_of_the_xml_format_follow_the_schema():
    tools = [
        {
            "function": {
                "name": "f",
                "parameters": {
                    "properties": {
                        "text": {"type": "string"},
                        "maybe": {"type": ["string", "null"]},
                        "many": {"type": "array"},
                        "yes": {"type": "boolean"},
                        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    }
                },
            }
        }
    ]
    written = {"text": "7", "maybe": "null", "many": "[1]", "yes": "True", "either": "x7"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in written.items())
    _, (call,) = TOOL_FORMATS["qwen_xml"].fn(f"<function=f>{body}</function>", tools=tools)
    assert call.arguments == {
        "text": "7",
        "maybe": None,
        "many": [1],
        "yes": True,
        "either": "x7",
    }


def test_a_response_template_reads_and_its_errors_are_text_for_the_model():
    tokenizer = chat_tokenizer(CHATML)
    if not hasattr(tokenizer, "response_template"):
        pytest.skip("this transformers has no response templates")
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<|im_end|>", "content": "text"},
        },
    }

    def read_turn(text: str):
        return TOOL_FORMATS["response_template"].fn(
            text, tools=TOOLS, tokenizer=tokenizer, end="<|im_end|>"
        )

    text = 'So<tool_call>{"name": "guess", "arguments": {"x": 5}}</tool_call>'
    assert read_turn(text) == ("So", [Call("guess", {"x": 5})])
    _, (call,) = read_turn("<tool_call>{guess}</tool_call>")
    assert "JSON" in call.problem


def test_a_format_of_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def read(text, **_):\n    return text, []\n")
    assert find_format(f"{path}:read").fn("hello") == ("hello", [])


def test_a_format_of_another_plugin():
    entry = ToolFormat(lambda text, **_: (text, []), markers=("<<",))
    TOOL_FORMATS.register("mine", entry)
    try:
        assert find_format("mine") is entry
    finally:
        del TOOL_FORMATS["mine"]


def test_an_unknown_name_without_vllm(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'hermse'.*hermes.*not installed"):
        find_format("hermse")
    assert list(vllm_formats("<arg_key>")) == []
