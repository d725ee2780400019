"""Small chat templates, each with one property of those that are published, and a tokenizer for them."""

from __future__ import annotations

from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess a number.",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer", "description": "your number"},
                    "why": {"type": "string", "description": "your reason"},
                },
                "required": ["x"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "the word"}},
                "required": ["word"],
            },
        },
    },
]

_CHATML_TOOLS = "{%- if tools %}{{ '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
_CHATML_RESULTS = """
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
"""
_CHATML_PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

CHATML = (
    _CHATML_TOOLS
    + """
{%- for message in messages %}
{%- if message.role in ('user', 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}"""
    + _CHATML_RESULTS
    + "{%- endif %}{%- endfor %}"
    + _CHATML_PROMPT
)
"""Calls as Hermes and Qwen2.5 write them, a line break behind the end of a turn."""

XML = CHATML.replace(
    """{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}""",
    """{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' + key + '>\\n' + value | string + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}""",
)
"""Calls as Qwen3-Coder writes them."""

FORGETFUL = CHATML.replace(
    "{{- '<|im_start|>assistant\\n' + (message.content or '') }}",
    "{{- '<|im_start|>assistant\\n' + (message.content or '').split('</think>')[-1].lstrip('\\n') }}",
).replace(
    "{{ '<|im_start|>assistant\\n' }}",
    "{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{{ '\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '' }}",
)
"""Opens the thinking of each new turn, and drops the thinking of earlier turns."""

DEAF = CHATML.replace("message.role == 'tool'", "message.role == 'nobody'")
"""Drops messages of tools without a word."""

BLIND = CHATML.replace("{%- if tools %}", "{%- if false %}")
"""Does not show the tools."""

HEADERS = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' and loop.first and tools %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' + tools | tojson + '\\n' + message.content + '<|eot_id|>' }}
{%- elif message.role in ('user', 'system') %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{%- if not loop.first and messages[loop.index0 - 1].role == 'assistant' and not messages[loop.index0 - 1].tool_calls %}
{{- raise_exception('a tool answers nothing') }}
{%- endif %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{%- else %}
{{- message.content }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""Like Llama 3.1: tools in the first user message, one call a turn, results only behind a call."""

BRACKETS = """{{- bos_token }}
{%- set state = namespace(last='') %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if state.last == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools and loop.first else '' }}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
{%- endfor %}
{{- eos_token }}
{%- elif message.role == 'assistant' %}
{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | tojson }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}
{{- raise_exception('no messages of the role ' + message.role) }}
{%- endif %}
{%- set state.last = message.role %}
{%- endfor %}"""
"""Like Mistral: no system message, no two user messages in a row, ids of calls, nothing that opens a turn."""

NEXT = """{%- if tools %}{{ '<|system|>\\n' + tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'system') %}
{{- '<|' + message.role + '|>\\n' + message.content }}
{%- elif message.role == 'tool' %}
{{- '<|observation|>' if messages[loop.index0 - 1].role != 'tool' else '' }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}
{{- '<|assistant|>\\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
"""Like GLM: a turn has no end of its own, the next message's first token ends it."""

PLAIN = """{%- for message in messages %}
{{- ('USER: ' if message.role == 'user' else 'ASSISTANT: ') + message.content }}
{{- '\\n' if message.role == 'user' else eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
"""Roles in plain text."""

ENDLESS = PLAIN.replace("eos_token", "''")
"""No token ends a turn."""

# What is added to the vocabulary, and the end of a text.
_ADDED = {
    CHATML: "<|im_start|> <|im_end|> <tool_call> </tool_call> <|endoftext|>",
    XML: "<|im_start|> <|im_end|> <tool_call> </tool_call> <|endoftext|>",
    FORGETFUL: "<|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> "
    "</tool_response> <|endoftext|>",
    HEADERS: "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|python_tag|> <|eom_id|>",
    BRACKETS: "<s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS]",
    NEXT: "<|system|> <|user|> <|assistant|> <|observation|> <tool_call> </tool_call> <|endoftext|>",
    PLAIN: "<s> </s>",
    ENDLESS: "<s> </s>",
}
_ENDS = {HEADERS: "<|eot_id|>", BRACKETS: "</s>", NEXT: "<|endoftext|>", PLAIN: "</s>"}
_NOT_SPECIAL = {
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
}
_CORPUS = [
    "user system assistant tool wrong higher lower guess the number\n\n",
    '{"name": "guess", "arguments": {"x": 50}}\n</tool_response>',
]


def chat_tokenizer(
    template: str | None, *, added: str | None = None, end: str | None = None, **options: Any
) -> Any:
    """A tokenizer of bytes with a few merges, so that borders in a text could be merged over."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    strings = (added or _ADDED.get(template, _ADDED[CHATML])).split()
    end = end or _ENDS.get(template, "</s>" if "</s>" in strings else "<|im_end|>")
    special = [each for each in {*strings, end} if each not in _NOT_SPECIAL]
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in sorted(special)])
    backend.add_tokens(
        [AddedToken(each, normalized=False) for each in strings if each in _NOT_SPECIAL]
    )
    beginning = next((each for each in ("<s>", "<|begin_of_text|>") if each in strings), None)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=beginning, eos_token=end, pad_token=end, **options
    )
    tokenizer.chat_template = template
    return tokenizer
