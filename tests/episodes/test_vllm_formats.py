"""Calls read by vLLM's parsers."""

from __future__ import annotations

import pytest
from support.chats import CHATML, TOOLS, chat_tokenizer

from lightppo.episodes.chat_format import ChatFormat
from lightppo.episodes.tool_formats import Call, find_format, vllm_formats
from lightppo.errors import ConfigError

pytestmark = pytest.mark.vllm

# As GLM writes.
KEYS = CHATML.replace(
    """{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}""",
    """{{- '<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + value | string + '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}""",
)
ADDED = "<|im_start|> <|im_end|> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <think> </think>"


def test_the_parser_of_a_family_is_found():
    assert KEYS != CHATML
    chat = ChatFormat(chat_tokenizer(KEYS, added=ADDED), TOOLS)
    chat.check()
    text = "Hm.<tool_call>guess\n<arg_key>x</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
    turn = chat.parse(chat.control.encode(f"{text}<|im_end|>"), stopped=True)
    assert (turn.text, turn.calls) == ("Hm.", (Call("guess", {"x": 5}),))
    assert len(list(vllm_formats(text))) == 1


def test_parsers_have_names():
    with pytest.raises(ConfigError, match=r"of vLLM: .*glm45"):
        find_format("no such parser")
    entry = find_format("pythonic")
    tokenizer = chat_tokenizer(CHATML)
    assert entry.fn("[guess(x=5)]", tools=TOOLS, tokenizer=tokenizer, end="")[1] == [
        Call("guess", {"x": 5})
    ]
