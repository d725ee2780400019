#!/usr/bin/env bash
# transformers 5.24.0: `parse_response` keeps the last piece of a message's text. A field that comes twice, without
# "repeats", is written over without a word: of "Looking.<tool_call>…</tool_call>Found." the content is "Found.".
# With "repeats" and "join" it is whole. Rows: the field's options, the content that is read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3 jinja2==3.1.6
"$folder/venv/bin/python" -W ignore - 2>"$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

print("transformers", transformers.__version__)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
found = []
for options in ({}, {"repeats": True, "join": " "}):
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
            "content": {"close": "<|im_end|>", "content": "text", **options},
        },
    }
    message = tokenizer.parse_response(f"Looking.{CALL}Found.<|im_end|>", prefix="")
    assert len(message["tool_calls"]) == 1
    found.append(message["content"])
    print(f"  {options!s:32} {message['content']!r}")
assert found == ["Found.", "Looking. Found."], found
PYTHON
