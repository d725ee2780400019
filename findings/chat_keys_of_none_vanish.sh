#!/usr/bin/env bash
# transformers 5.24.0: `apply_chat_template` drops the keys of a message whose value is None, so that a template which
# asks for them goes another way than with the message that was given, and with transformers 5.19. Values of None further
# inside stay. Rows: what a template asks, what it sees.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3 jinja2==3.1.6
"$folder/venv/bin/python" -W ignore - 2>"$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
import jinja2
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

print("transformers", transformers.__version__)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
CALL = {"type": "function", "function": {"name": "look", "arguments": {"where": None}}}
CHAT = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
QUESTIONS = (
    "messages[0].content is none",
    "'content' in messages[0]",
    "'where' in messages[0].tool_calls[0].function.arguments",
)
seen = []
for question in QUESTIONS:
    template = "{{ " + question + " }}"
    given = jinja2.Template(template).render(messages=CHAT)
    answer = tokenizer.apply_chat_template(CHAT, chat_template=template, tokenize=False)
    seen.append((given, answer))
    print(f"  {question:56} {answer:6} of the chat that was given: {given}")
assert seen == [("True", "False"), ("True", "False"), ("True", "True")], seen
PYTHON
