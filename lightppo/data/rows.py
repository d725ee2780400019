"""Rows: which columns are read, and the prompt, the label and the options of a row. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightppo.config.rules import template_kwargs
from lightppo.errors import BadRowError, ConfigError, DataError

Chat = list[dict[str, Any]]

ORIGIN_COLUMN = "__origin__"  # hidden column: the file and line a row came from
DEFAULT_INPUT_KEY = "input"
PROMPT_KEYS = (
    DEFAULT_INPUT_KEY,
    "prompt",
    "messages",
    "question",
    "query",
    "problem",
    "instruction",
)
PREFERENCE_KEYS = ("chosen", "rejected")
LABEL_KEYS = (
    "reward_model.ground_truth",
    "ground_truth",
    "label",
    "answer",
    "solution",
    "solutions",
    "input_output",
)
MEDIA_KEYS = ("images", "image", "videos", "video", "audios", "audio")
TEMPLATE_KEYS = ("tools", "chat_template_kwargs", *MEDIA_KEYS)
"""Columns beside the messages that a chat template may take, and those that nothing here takes."""

# -- which columns are read ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowFields:
    """The keys to try, in order, for each part of a row; the first key with a value in the row counts."""

    prompt: tuple[str, ...]
    label: tuple[str, ...] = ()
    label_required: bool = False  # a row without a label is bad
    # The prompt of a row without such a key is the common beginning of ``PREFERENCE_KEYS``.
    prompt_of_pair: bool = False

    @property
    def rendered(self) -> tuple[str, ...]:
        """The keys of what a model reads."""
        if self.prompt_of_pair:
            return self.prompt + PREFERENCE_KEYS
        return self.prompt

    def columns_in(self, columns: Iterable[str]) -> list[str]:
        """Return the columns that are needed to render and label a row."""
        return _columns_of((*self.rendered, *self.label, *TEMPLATE_KEYS), columns)

    def rendered_in(self, columns: Iterable[str]) -> list[str]:
        """Return those of them that a model reads."""
        return _columns_of((*self.rendered, *TEMPLATE_KEYS), columns)


def _columns_of(field_keys: Iterable[str], columns: Iterable[str]) -> list[str]:
    needed = {column_of(field_key, columns) for field_key in field_keys}
    return [column for column in columns if column in needed]


def resolve_fields(
    columns: Sequence[str],
    *,
    input_key: str | None = None,
    label_key: str | None = None,
    label_flag: str = "--label_key",
    prompt_keys: Iterable[str] = PROMPT_KEYS,
    has_prompt: bool = False,
) -> RowFields:
    """Decide which keys are read from data with these columns; DataError lists the columns if none fits.

    None, or a default name without a column, tries the known names; ``has_prompt``: rows have one without them, too.
    """
    label = known_keys(LABEL_KEYS, columns)
    if label_key:
        require_column(label_key, columns, label_flag)
        label = (label_key,)
    if input_key and input_key != DEFAULT_INPUT_KEY:
        require_column(input_key, columns, "--input_key")
        return RowFields((input_key,), label, label_key is not None)
    prompt_of_pair = set(PREFERENCE_KEYS) <= set(columns)
    prompt = known_keys(prompt_keys, columns)
    if not prompt and not prompt_of_pair and not has_prompt:
        raise DataError(
            f"no column with a prompt: set --input_key to one of the columns: {_listed(columns)} (recognised without "
            f"it: {', '.join(PROMPT_KEYS)}, or {' and '.join(PREFERENCE_KEYS)})"
        )
    return RowFields(prompt, label, label_key is not None, prompt_of_pair)


def known_keys(candidate_keys: Iterable[str], columns: Sequence[str]) -> tuple[str, ...]:
    """Return those that are columns, or fields of one."""
    return tuple(key for key in dict.fromkeys(candidate_keys) if column_of(key, columns))


def require_column(key: str, columns: Sequence[str], flag: str) -> None:
    """Raise DataError unless ``key`` is a column, or a field of one."""
    if column_of(key, columns) is None:
        raise DataError(
            f"{flag} {key!r} is not a column of the data; its columns: {_listed(columns)}"
        )


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(column for column in columns if column != ORIGIN_COLUMN) or "(none)"


def column_of(key: str, columns: Iterable[str]) -> str | None:
    """Return the column that holds ``key``: itself, or the part before the first dot."""
    parent = key.split(".")[0]
    columns = set(columns)
    if key in columns:
        return key
    return parent if parent in columns else None


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """Return a column, or a field inside one by a dotted key (``reward_model.ground_truth``); None if absent."""
    if key in row:
        return row[key]
    nested_value: Any = row
    for field_name in key.split("."):
        if not isinstance(nested_value, Mapping):
            return None
        nested_value = nested_value.get(field_name)
    return nested_value


def first_value(row: Mapping[str, Any], keys: Iterable[str]) -> tuple[str | None, Any]:
    """Return the first of the keys that has a value, and the value; (None, None) if none has."""
    for key in keys:
        if (value := lookup(row, key)) is not None:
            return key, value
    return None, None


# -- the parts of a row; BadRowError where one is missing, of the wrong type, or empty -------------------------------


def read_prompt(row: Mapping[str, Any], fields: RowFields) -> tuple[str | Chat, str | None]:
    """Return a row's prompt (without a chat's final answer) and its key (None: it is in no column of its own)."""
    key, value = first_value(row, fields.prompt)
    if key is None:
        if not fields.prompt_of_pair or any(row.get(name) is None for name in PREFERENCE_KEYS):
            raise no_prompt(fields)
        return pair_of(row)[0], None
    prompt = text_or_chat(value, repr(key))
    if key == "messages" and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        if len(prompt) == 1:
            raise BadRowError("missing", "'messages' has an answer but no prompt")
        prompt = prompt[:-1]
    return prompt, key


def no_prompt(fields: RowFields) -> BadRowError:
    """Make the error of a row without a prompt."""
    return BadRowError(
        "missing", f"no prompt: {' and '.join(map(repr, fields.prompt))} missing or null"
    )


def other_columns(row: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """Return what reward functions get of a row whose prompt is in column ``key``.

    A conversation's own column stays: its last turn is not in the prompt.
    """
    hidden = {ORIGIN_COLUMN, key} - {"messages"}
    return {column: value for column, value in row.items() if column not in hidden}


def read_label(row: Mapping[str, Any], fields: RowFields) -> Any:
    """Return the ground truth of a row, any JSON value or None."""
    key, value = first_value(row, fields.label)
    if key is None and fields.label_required:
        raise BadRowError("missing", f"no label: {fields.label[0]!r} missing or null")
    return value


def as_chat(prompt: str | Chat, role: str) -> Chat:
    """Return a chat as it is, a text as one message."""
    if isinstance(prompt, list):
        return prompt
    return [{"role": role, "content": prompt}]


def text_or_chat(value: Any, location: str) -> str | Chat:
    """Return a checked text or chat; errors call it by its ``location`` in the row."""
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError("empty", f"{location} is empty")
        return value
    if isinstance(value, list | tuple):
        return checked_chat(value, location)
    raise BadRowError(
        "wrong_type",
        f"{location} is {shown_value(value)}; text or a list of chat messages is needed",
    )


def checked_chat(messages: Sequence[Any], location: str) -> Chat:
    """Return checked messages of ``role`` and text ``content``, without the None fields that Arrow adds.

    Arguments of calls are objects: OpenAI's form, a text of JSON, would be written as a text in a text.
    """
    if not messages:
        raise BadRowError("empty", f"{location} is an empty list of messages")
    chat: Chat = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            needed = "a message has a role (text) and a content"
            raise BadRowError("wrong_type", f"{location}[{i}] is {shown_value(message)}; {needed}")
        content = message.get("content")
        calls = message.get("tool_calls")
        if not isinstance(content, str) and not (content is None and calls):
            raise BadRowError(
                "wrong_type",
                f"{location}[{i}].content is {shown_value(content)}; only text is read",
            )
        checked_message = {key: value for key, value in message.items() if value is not None}
        if calls:
            # transformers before 5.24 writes a None, later ones leave it out: an empty text is alike in all
            checked_message["content"] = content or ""
            checked_message["tool_calls"] = _checked_calls(calls, f"{location}[{i}].tool_calls")
        chat.append(checked_message)
    if not chat[-1]["content"].strip() and not chat[-1].get("tool_calls"):
        raise BadRowError("empty", f"{location}: the last message is empty")
    return chat


def _checked_calls(tool_calls: Any, location: str) -> list[dict[str, Any]]:
    tool_calls = _from_json(tool_calls, location)
    if not isinstance(tool_calls, list) or not all(
        isinstance(tool_call, Mapping) for tool_call in tool_calls
    ):
        raise BadRowError(
            "wrong_type", f"{location} is {shown_value(tool_calls)}; a list is needed"
        )
    checked = []
    for i, tool_call in enumerate(tool_calls):
        tool_call = {key: value for key, value in tool_call.items() if value is not None}
        is_nested = isinstance(tool_call.get("function"), Mapping)
        function = dict(tool_call["function"]) if is_nested else tool_call
        if not isinstance(function.get("name"), str):
            raise BadRowError("wrong_type", f"{location}[{i}] has no name of a function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _from_json(arguments.strip() or "{}", f"{location}[{i}].arguments")
        if not isinstance(arguments, Mapping | None):
            raise BadRowError(
                "wrong_type",
                f"{location}[{i}].arguments is {shown_value(arguments)}; an object is needed",
            )
        function["arguments"] = arguments or {}
        checked.append(tool_call | {"function": function} if is_nested else function)
    return checked


def _from_json(value: Any, location: str) -> Any:
    """Return what a text of JSON means; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRowError("wrong_type", f"{location} is not JSON: {error}") from error


def without_nulls(value: Any, feature: Any) -> Any:
    """Return a value of a table without the fields that are null, which Arrow adds to each struct that lacks them.

    ``feature`` is of ``datasets``; within columns of JSON a null was written, and stays.
    """
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        return {
            key: without_nulls(field_value, feature.get(key))
            for key, field_value in value.items()
            if field_value is not None
        }
    element_feature = _feature_of_elements(feature)
    if isinstance(value, list) and element_feature is not None:
        return [without_nulls(element, element_feature) for element in value]
    return value


def chat_without_nulls(value: Any, feature: Any) -> Any:
    """Do the same to a column: what the messages of a chat have themselves is left to :func:`checked_chat`."""
    message_feature = _feature_of_elements(feature)
    if isinstance(value, list) and isinstance(message_feature, Mapping):
        return [
            {
                key: without_nulls(field_value, message_feature.get(key))
                for key, field_value in (message or {}).items()
            }
            for message in value
        ]
    return without_nulls(value, feature)


def _feature_of_elements(feature: Any) -> Any:
    """Return the feature of a list's values; None: it is no list."""
    if isinstance(feature, list):
        return feature[0]
    return getattr(feature, "feature", None)


def pair_of(row: Mapping[str, Any]) -> tuple[str | Chat, str | Chat, str | Chat]:
    """Return the common beginning of ``chosen`` and ``rejected``, and the rest of both."""
    chosen = row["chosen"]
    rejected = row["rejected"]
    if isinstance(chosen, list) and isinstance(rejected, list):
        chosen = checked_chat(chosen, "'chosen'")
        rejected = checked_chat(rejected, "'rejected'")
    return split_pair(chosen, rejected)


def split_pair(chosen: Any, rejected: Any) -> tuple[str | Chat, str | Chat, str | Chat]:
    """Return the common beginning, and the rest of both: messages, or texts in the form of hh-rlhf."""
    are_chats = isinstance(chosen, list) and isinstance(rejected, list)
    if not are_chats and not (isinstance(chosen, str) and isinstance(rejected, str)):
        type_names = f"{type(chosen).__name__} and {type(rejected).__name__}"
        raise BadRowError(
            "wrong_type",
            f"'chosen' and 'rejected' are {type_names}; both must be text, or both chats",
        )
    length = shared_length(chosen, rejected)
    if are_chats and 0 < length < min(len(chosen), len(rejected)):
        return chosen[:length], chosen[length:], rejected[length:]
    if are_chats and length:  # one has no message of its own
        pair_names = ["chosen", "rejected"]
        if length < len(chosen):
            pair_names.reverse()
        raise BadRowError(
            "missing",
            f"{pair_names[0]!r} is the beginning of {pair_names[1]!r}, so it has no answer of its own: end both at the "
            "answers that differ",
        )
    if not are_chats:
        marker = "\n\nAssistant:"  # as in hh-rlhf, the one public data set of this kind
        marker_start = chosen.rfind(marker, 0, length)
        prompt_length = marker_start + len(marker)
        if marker_start >= 0 and chosen[:marker_start].strip() and chosen[prompt_length:].strip():
            return chosen[:prompt_length], chosen[prompt_length:], rejected[prompt_length:]
    raise BadRowError(
        "missing",
        "'chosen' and 'rejected' share no prompt; set --input_key to the column that holds it",
    )


def shared_length(sequence: Sequence[Any], other_sequence: Sequence[Any]) -> int:
    """Return the length of the common beginning."""
    for i, (element, other_element) in enumerate(zip(sequence, other_sequence)):
        if element != other_element:
            return i
    return min(len(sequence), len(other_sequence))


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row gives the chat template beside its messages: ``tools``, and all of ``chat_template_kwargs``."""
    for key in MEDIA_KEYS:
        media_value = row.get(key)
        if media_value is not None and (not hasattr(media_value, "__len__") or len(media_value)):
            raise BadRowError(
                "wrong_type",
                f"{key!r} is {shown_value(media_value)}; models read text alone here: take the column out, or its rows",
            )
    try:
        options = template_kwargs(row.get("chat_template_kwargs"), "'chat_template_kwargs'")
    except ConfigError as error:
        raise BadRowError("wrong_type", str(error)) from error
    tools = row.get("tools")
    if not tools:
        return options
    tools = _from_json(tools, "'tools'")
    if not isinstance(tools, list) or not all(map(name_of_tool, tools)):
        raise BadRowError(
            "wrong_type",
            f"'tools' is {shown_value(tools)}; a list of JSON schemas with a name each is needed, or rename the column",
        )
    if tools:
        options = options | {
            "tools": [
                {key: value for key, value in tool_schema.items() if value is not None}
                for tool_schema in tools
            ]
        }
    return options


def name_of_tool(tool_schema: Any) -> str | None:
    """Return the name in a schema of a tool; None if it has none."""
    if not isinstance(tool_schema, Mapping):
        return None
    function = tool_schema.get("function") or tool_schema
    function_name = function.get("name") if isinstance(function, Mapping) else None
    return function_name if isinstance(function_name, str) and function_name else None


def shown_value(value: Any) -> str:
    """Return a value's type and the start of its text, for messages."""
    value_text = repr(value)
    if len(value_text) > 60:
        value_text = value_text[:57] + "..."
    return f"{type(value).__name__} {value_text}"
