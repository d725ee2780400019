"""How models write calls of tools, and how they are read: the table behind ``--tool_format``."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightppo.errors import ConfigError
from lightppo.suggestions import nearest
from lightppo.table import Entry, Table

TEMPLATE_FORMAT = "response_template"
_SHOWN = 300  # characters of another parser's message


@dataclass(frozen=True)
class Call:
    """A call of a tool, as the model wrote it."""

    name: str
    arguments: dict[str, Any]
    # What is wrong with it, as text for the model. Such a call is not executed.
    problem: str | None = None
    id: str | None = None  # that the model gave it; most formats have none


@dataclass(frozen=True)
class ToolFormat(Entry):
    """A way to write calls.

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
    known = ["auto", *TOOL_FORMATS]
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"--tool_format: unknown name {name!r}{nearest(name, known, 'tool_format')}; known: "
            f"{', '.join(known)}. Names of vLLM's parsers need vLLM, which is not installed"
        )
    from vllm.tool_parsers import ToolParserManager

    theirs = ToolParserManager.list_registered()
    if name not in theirs:
        raise ConfigError(
            f"--tool_format: unknown name {name!r}{nearest(name, known + theirs, 'tool_format')}; "
            f"known: {', '.join(known)}, and of vLLM: {', '.join(theirs)}"
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


def vllm_formats(written: str) -> Iterator[ToolFormat]:
    """Return formats of vLLM's parsers that a written call looks like; vLLM is imported only then."""
    if importlib.util.find_spec("vllm") is None:
        return
    for beginning, name in _VLLM_FAMILIES:
        if beginning in written:
            yield find_format(name)


def read_by_template(
    text: str, *, tools: Sequence[dict], tokenizer: Any, end: str, **_: Any
) -> tuple[str, list[Call]]:
    """Read a turn with the tokenizer's ``response_template``."""
    try:
        message = tokenizer.parse_response(text + end, prefix="", tools=list(tools) or None)
    except Exception as error:
        return "", [_unreadable(" ".join(str(error).split())[:_SHOWN])]
    calls = [
        make_call(
            call.get("function", call).get("name"),
            call.get("function", call).get("arguments"),
            call.get("id"),
        )
        for call in message.get("tool_calls") or ()
    ]
    return message.get("content") or "", calls


def read_by_vllm(
    name: str, text: str, *, tools: Sequence[dict], tokenizer: Any, **_: Any
) -> tuple[str, list[Call]]:
    """Read a turn with one of vLLM's parsers. Most of them take a call that they cannot read for text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[], model="", tools=list(tools) or None)
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
        extraction = parser.extract_tool_calls(text, request=request)
    except Exception as error:
        return "", [_unreadable(" ".join(str(error).split())[:_SHOWN])]
    calls = [
        make_call(call.function.name, call.function.arguments) for call in extraction.tool_calls
    ]
    return extraction.content or "", calls


def read_hermes(text: str, **_: Any) -> tuple[str, list[Call]]:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes, Qwen2.5 and Qwen3 write."""
    return _read_blocks(text, "<tool_call>", "</tool_call>", _json_call)


def read_qwen_xml(text: str, *, tools: Sequence[dict] = (), **_: Any) -> tuple[str, list[Call]]:
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.

    Qwen3-Coder and Nemotron 3 write so. A value is text where the tool's schema says so, otherwise JSON.
    """
    schemas = {tool.get("function", tool).get("name"): tool for tool in tools}
    if "<tool_call>" in text:
        read = functools.partial(_xml_call, schemas=schemas)
        return _read_blocks(text, "<tool_call>", "</tool_call>", read)

    def read_bare(inner: str) -> Call:
        return _xml_call(f"<function={inner}", schemas=schemas)

    return _read_blocks(text, "<function=", "</function>", read_bare)


def read_mistral(text: str, **_: Any) -> tuple[str, list[Call]]:
    """``[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}]``, or ``[TOOL_CALLS]name[ARGS]{…}`` of later ones."""
    before, *written = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    for piece in written:
        piece = piece.strip()
        if piece.startswith(("[", "{")):
            calls += _json_calls(piece)
            continue
        match = re.fullmatch(
            r"([^\[{\s]+)\s*(?:\[CALL_ID\]\s*([^\[{\s]+)\s*)?(?:\[ARGS\])?\s*(\{.*)",
            piece,
            re.DOTALL,
        )
        if match is None:
            calls.append(_unreadable("there is no name with a JSON object behind it"))
        else:
            calls.append(make_call(match[1], match[3], match[2]))
    return before, calls


def read_llama3(text: str, **_: Any) -> tuple[str, list[Call]]:
    """Return a turn that is ``{"name": …, "parameters": {…}}``, several of them between semicolons, or these behind a
    ``<|python_tag|>``."""
    before, tag, written = text.partition("<|python_tag|>")
    if not tag:
        before = ""
        written = text
    written = written.strip()
    if not tag and not (
        written.startswith("{")
        and '"name"' in written
        and re.search(r'"(parameters|arguments)"', written)
    ):
        return text, []
    calls: list[Call] = []
    position = 0
    while position < len(written):
        try:
            value, position = _DECODER.raw_decode(written, position)
        except (ValueError, RecursionError) as error:
            calls.append(_unreadable(_reason(error)))
            break
        calls.append(_call_of_value(value))
        position += len(written[position:]) - len(written[position:].lstrip(" \n\t;,"))
    return before, calls


def make_call(name: Any, arguments: Any, id: Any = None) -> Call:
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
        kind = type(arguments).__name__
        return _unreadable(f"the arguments are not a JSON object but of type {kind}", name)
    return Call(name.strip(), dict(arguments), id=id if isinstance(id, str) else None)


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
        value = _DECODER.decode(text.strip())
    except (ValueError, RecursionError) as error:
        return [_unreadable(_reason(error))]
    return [_call_of_value(each) for each in (value if isinstance(value, list) else [value])]


def _json_call(text: str) -> Call:
    try:
        return _call_of_value(_DECODER.decode(text.strip()))
    except (ValueError, RecursionError) as error:
        return _unreadable(_reason(error))


def _call_of_value(value: Any) -> Call:
    if not isinstance(value, dict):
        return _unreadable(f"it is not a JSON object but of type {type(value).__name__}")
    return make_call(
        value.get("name"), value.get("arguments", value.get("parameters")), value.get("id")
    )


def _read_blocks(
    text: str, opening: str, closing: str, read: Callable[[str], Call]
) -> tuple[str, list[Call]]:
    """Return the text outside of blocks, and a call of each block. The last block may lack its end, as in vLLM."""
    before, *pieces = text.split(opening)
    outside = [before]
    calls = []
    for piece in pieces:
        inner, _, behind = piece.partition(closing)
        calls.append(read(inner))
        outside.append(behind)
    return "".join(outside), calls


def _xml_call(text: str, *, schemas: Mapping[Any, dict]) -> Call:
    match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", text, re.DOTALL)
    if match is None:
        return _unreadable("there is no <function=name> with </function> behind it")
    name = match[1].strip()
    schema = schemas.get(name, {})
    parameters = schema.get("function", schema).get("parameters") or {}
    properties = parameters.get("properties") or {}
    values = re.finditer(
        r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", match[2], re.DOTALL
    )
    arguments = {
        value[1].strip(): _typed(_without_frame(value[2]), properties.get(value[1].strip()))
        for value in values
    }
    return make_call(name, arguments)


def _without_frame(value: str) -> str:
    """Return a value without the line breaks that the format puts around it."""
    return value.removeprefix("\n").removesuffix("\n")


def _kinds(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows; empty where it says nothing."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    kinds = {declared} if isinstance(declared, str) else set(declared or ())
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            kinds |= _kinds(choice)
    return kinds | ({"null"} if schema.get("nullable") else set())


def _typed(value: str, schema: Any) -> Any:
    """Return a value of the XML format, by its parameter's schema; what does not fit stays text."""
    kinds = _kinds(schema)
    if not kinds - {"string", "null"}:
        if "null" in kinds and value.strip() in ("null", "None"):
            return None
        return value
    as_json = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)
    try:
        return _DECODER.decode(as_json.strip())
    except (ValueError, RecursionError):
        return value


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
