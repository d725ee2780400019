"""Formats of calls of tools, as models write them: the table behind ``--tool_format``."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightppo.errors import ConfigError
from lightppo.suggestions import nearest
from lightppo.table import Entry, Table

TEMPLATE_FORMAT = "response_template"
_MAX_REASON = 300  # characters of another parser's message


@dataclass(frozen=True)
class Call:
    """Hold a call of a tool, as the model wrote it."""

    name: str
    arguments: dict[str, Any]
    # What is wrong with it, as text for the model. Such a call is not executed.
    problem: str | None = None
    id: str | None = None  # that the model gave it; most formats have none


@dataclass(frozen=True)
class ToolFormat(Entry):
    """Read calls of one format.

    The entry's function ``(text, *, tools, tokenizer, end)`` returns the text without calls, and a list of
    :class:`Call`. ``text`` is a complete turn without its thinking, with control tokens as strings; ``end`` is the
    string of the token that ended it. The function must not raise: a call that cannot be read has a ``problem``.
    """

    # Strings of the format that an observation may not contain.
    markers: tuple[str, ...] = ()


def find_format(name: str) -> ToolFormat:
    """Return the format of a name in the table, of ``path.py:name``, or of one of vLLM's parsers.

    Raises:
        ConfigError: there is none of that name.
    """
    if name in TOOL_FORMATS or ".py" in name:
        return TOOL_FORMATS.find(name)
    known_names = ["auto", *TOOL_FORMATS]
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"--tool_format: unknown name {name!r}{nearest(name, known_names, 'tool_format')}; known: "
            f"{', '.join(known_names)}. Names of vLLM's parsers need vLLM, which is not installed"
        )
    from vllm.tool_parsers import ToolParserManager

    vllm_names = ToolParserManager.list_registered()
    if name not in vllm_names:
        raise ConfigError(
            f"--tool_format: unknown name {name!r}{nearest(name, known_names + vllm_names, 'tool_format')}; "
            f"known: {', '.join(known_names)}, and of vLLM: {', '.join(vllm_names)}"
        )
    return ToolFormat(functools.partial(read_by_vllm, name))


# What a call begins with in formats that only vLLM reads, and the names of its parsers.
_VLLM_FAMILIES = (
    ("<arg_key>", "glm45"),
    ("<|tool_call>call:", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<｜tool▁call▁begin｜>", "deepseek_v31"),
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),
    ("<｜DSML｜", "deepseek_v32"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tools_prefix|>", "apertus"),
    ("<|function_call|>", "gigachat3"),
    ("<atem:", "muse_glimmer"),
)


def vllm_formats(written_call: str) -> Iterator[ToolFormat]:
    """Return formats of vLLM's parsers that a written call looks like; vLLM is imported only then."""
    if importlib.util.find_spec("vllm") is None:
        return
    for beginning, name in _VLLM_FAMILIES:
        if beginning in written_call:
            yield find_format(name)


def read_by_template(
    text: str, *, tools: Sequence[dict], tokenizer: Any, end: str, **_: Any
) -> tuple[str, list[Call]]:
    """Read a turn with the tokenizer's ``response_template``."""
    options: dict[str, Any] = {"prefix": ""}
    # transformers 5.14 has none
    if "tools" in inspect.signature(tokenizer.parse_response).parameters:
        options["tools"] = list(tools) or None
    try:
        message = tokenizer.parse_response(text + end, **options)
    except Exception as error:
        return "", [_unreadable(" ".join(str(error).split())[:_MAX_REASON])]
    tool_calls = [
        make_call(
            parsed_call.get("function", parsed_call).get("name"),
            parsed_call.get("function", parsed_call).get("arguments"),
            parsed_call.get("id"),
        )
        for parsed_call in message.get("tool_calls") or ()
    ]
    return message.get("content") or "", tool_calls


def read_by_vllm(
    name: str, text: str, *, tools: Sequence[dict], tokenizer: Any, **_: Any
) -> tuple[str, list[Call]]:
    """Read a turn with one of vLLM's parsers. Most of them take a call that they cannot read for text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    chat_request = ChatCompletionRequest(messages=[], model="", tools=list(tools) or None)
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, chat_request.tools)
        extraction = parser.extract_tool_calls(text, request=chat_request)
    except Exception as error:
        return "", [_unreadable(" ".join(str(error).split())[:_MAX_REASON])]
    tool_calls = [
        make_call(parsed_call.function.name, parsed_call.function.arguments)
        for parsed_call in extraction.tool_calls
    ]
    return extraction.content or "", tool_calls


def read_hermes(text: str, **_: Any) -> tuple[str, list[Call]]:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes, Qwen2.5 and Qwen3 write."""
    return _read_blocks(text, "<tool_call>", "</tool_call>", _json_call)


def read_qwen_xml(text: str, *, tools: Sequence[dict] = (), **_: Any) -> tuple[str, list[Call]]:
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

    Qwen3-Coder and Nemotron 3 write so. A value is text where the tool's schema says so, otherwise JSON.
    """
    schemas = {tool.get("function", tool).get("name"): tool for tool in tools}
    if "<tool_call>" in text:
        read_call = functools.partial(_xml_call, schemas=schemas)
        return _read_blocks(text, "<tool_call>", "</tool_call>", read_call)

    def read_bare(call_text: str) -> Call:
        return _xml_call(f"<function={call_text}", schemas=schemas)

    return _read_blocks(text, "<function=", "</function>", read_bare)


def read_mistral(text: str, **_: Any) -> tuple[str, list[Call]]:
    """``[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]``, or ``[TOOL_CALLS]name[ARGS]{…}`` of later ones."""
    text_before, *call_texts = text.split("[TOOL_CALLS]")
    tool_calls: list[Call] = []
    for call_text in call_texts:
        call_text = call_text.strip()
        if call_text.startswith(("[", "{")):
            tool_calls += _json_calls(call_text)
            continue
        name_match = re.fullmatch(
            r"([^\[{\s]+)\s*(?:\[CALL_ID\]\s*([^\[{\s]+)\s*)?(?:\[ARGS\])?\s*(\{.*)",
            call_text,
            re.DOTALL,
        )
        if name_match is None:
            tool_calls.append(_unreadable("there is no name with a JSON object behind it"))
        else:
            tool_calls.append(make_call(name_match[1], name_match[3], name_match[2]))
    return text_before, tool_calls


def read_llama3(text: str, **_: Any) -> tuple[str, list[Call]]:
    """Return a turn that is ``{"name": …, "parameters": {…}}``, several of them between semicolons, or these behind a
    ``<|python_tag|>``."""
    text_before, tag, call_text = text.partition("<|python_tag|>")
    if not tag:
        text_before = ""
        call_text = text
    call_text = call_text.strip()
    if not tag and not (
        call_text.startswith("{")
        and '"name"' in call_text
        and re.search(r'"(parameters|arguments)"', call_text)
    ):
        return text, []
    tool_calls: list[Call] = []
    position = 0
    while position < len(call_text):
        try:
            json_value, position = _DECODER.raw_decode(call_text, position)
        except (ValueError, RecursionError) as error:
            tool_calls.append(_unreadable(_reason(error)))
            break
        tool_calls.append(_call_of_value(json_value))
        position += len(call_text[position:]) - len(call_text[position:].lstrip(" \n\t;,"))
    return text_before, tool_calls


def make_call(name: Any, arguments: Any, call_id: Any = None) -> Call:
    """Return a call of what a parser found: a name, and arguments as a mapping or as JSON text."""
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments.strip() or "{}")
        except (ValueError, RecursionError) as error:
            return _unreadable(_reason(error), name)
    if not isinstance(name, str) or not name.strip():
        return _unreadable("it has no name")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        type_name = type(arguments).__name__
        return _unreadable(f"the arguments are not a JSON object but of type {type_name}", name)
    return Call(name.strip(), dict(arguments), id=call_id if isinstance(call_id, str) else None)


def _unreadable(reason: str, name: Any = None) -> Call:
    name = name.strip() if isinstance(name, str) else ""
    return Call(name, {}, problem=f"The call cannot be read: {reason}. Nothing was executed.")


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is not valid JSON: {error.msg} at character {error.pos}"
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    return f"it is not valid JSON: {error}"


def _json_calls(text: str) -> list[Call]:
    """Return the calls of a JSON object, or of a list of them."""
    try:
        json_value = _DECODER.decode(text.strip())
    except (ValueError, RecursionError) as error:
        return [_unreadable(_reason(error))]
    return [
        _call_of_value(call_value)
        for call_value in (json_value if isinstance(json_value, list) else [json_value])
    ]


def _json_call(text: str) -> Call:
    try:
        return _call_of_value(_DECODER.decode(text.strip()))
    except (ValueError, RecursionError) as error:
        return _unreadable(_reason(error))


def _call_of_value(call_value: Any) -> Call:
    if not isinstance(call_value, dict):
        return _unreadable(f"it is not a JSON object but of type {type(call_value).__name__}")
    return make_call(
        call_value.get("name"),
        call_value.get("arguments", call_value.get("parameters")),
        call_value.get("id"),
    )


def _read_blocks(
    text: str, opening: str, closing: str, read_call: Callable[[str], Call]
) -> tuple[str, list[Call]]:
    """Return the text outside of blocks, and a call of each block. The last block may lack its end, as in vLLM."""
    text_before, *blocks = text.split(opening)
    outside_texts = [text_before]
    tool_calls = []
    for block in blocks:
        call_text, _, text_behind = block.partition(closing)
        tool_calls.append(read_call(call_text))
        outside_texts.append(text_behind)
    return "".join(outside_texts), tool_calls


def _xml_call(text: str, *, schemas: Mapping[Any, dict]) -> Call:
    function_match = re.fullmatch(
        r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", text, re.DOTALL
    )
    if function_match is None:
        return _unreadable("there is no <function=name> with </function> behind it")
    function_name = function_match[1].strip()
    schema = schemas.get(function_name, {})
    parameters = schema.get("function", schema).get("parameters") or {}
    properties = parameters.get("properties") or {}
    parameter_matches = re.finditer(
        r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)",
        function_match[2],
        re.DOTALL,
    )
    arguments = {
        parameter_match[1].strip(): _typed(
            _without_frame(parameter_match[2]), properties.get(parameter_match[1].strip())
        )
        for parameter_match in parameter_matches
    }
    return make_call(function_name, arguments)


def _without_frame(value_text: str) -> str:
    """Return a value without the line breaks that the format puts around it."""
    return value_text.removeprefix("\n").removesuffix("\n")


def _kinds(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows; empty where it says nothing."""
    if not isinstance(schema, Mapping):
        return set()
    declared_types = schema.get("type")
    allowed_types = (
        {declared_types} if isinstance(declared_types, str) else set(declared_types or ())
    )
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            allowed_types |= _kinds(choice)
    return allowed_types | ({"null"} if schema.get("nullable") else set())


def _typed(value_text: str, schema: Any) -> Any:
    """Return a value of the XML format, by its parameter's schema; what does not fit stays text."""
    allowed_types = _kinds(schema)
    if not allowed_types - {"string", "null"}:
        if "null" in allowed_types and value_text.strip() in ("null", "None"):
            return None
        return value_text
    json_text = {"True": "true", "False": "false", "None": "null"}.get(
        value_text.strip(), value_text
    )
    try:
        return _DECODER.decode(json_text.strip())
    except (ValueError, RecursionError):
        return value_text


# -- the table ---------------------------------------------------------------------------------------------------------

TOOL_FORMATS: Table[ToolFormat] = Table(
    "--tool_format",
    {
        TEMPLATE_FORMAT: ToolFormat(read_by_template),
        "hermes": ToolFormat(read_hermes, markers=("<tool_call>", "</tool_call>")),
        "qwen_xml": ToolFormat(
            read_qwen_xml,
            markers=("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter="),
        ),
        "mistral": ToolFormat(read_mistral, markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
        "llama3": ToolFormat(read_llama3, markers=("<|python_tag|>",)),
    },
    kind=ToolFormat,
    files=True,
)
"""Formats of calls, by the names that ``--tool_format`` takes beside ``auto`` and the names of vLLM's parsers. ``auto``
takes the first one that reads what the tokenizer's chat template writes."""
