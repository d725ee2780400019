"""What a row of a public dataset means: which part is the prompt, the completion, the label.

Explicit keys win. Without them the forms of verl, TRL and AReaL are recognised, row by row, so that sources of
different forms can be blended. ``docs/data.md`` holds the rules for users. Nothing here tokenises or reads files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightppo.errors import BadRowError, DataError

logger = logging.getLogger(__name__)

ORIGIN_COLUMN = "__origin__"  # hidden column: the file and line a row came from

DEFAULT_INPUT_KEY = "input"
PROMPT_KEYS = (DEFAULT_INPUT_KEY, "prompt", "messages", "question", "query", "problem", "instruction")
TEXT_KEYS = (DEFAULT_INPUT_KEY, "text", "content")  # plain documents, for pretraining
COMPLETION_KEYS = ("output", "completion", "response", "answer", "solution")
LABEL_KEYS = ("reward_model.ground_truth", "ground_truth", "label", "answer", "solution", "solutions", "input_output")
PREFERENCE_KEYS = ("chosen", "rejected")

Chat = list[dict[str, Any]]
_MISSING = object()


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """Value of a column, or of a field inside one by a dotted key (``reward_model.ground_truth``); None if absent."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _column_of(key: str, columns: Iterable[str]) -> str | None:
    """The column that holds ``key``: itself, or the one before the first dot."""
    columns = set(columns)
    if key in columns:
        return key
    head = key.split(".")[0]
    return head if head in columns else None


@dataclass(frozen=True)
class RowFields:
    """The keys that are tried, in order, for each part of a row.

    Attributes:
        prompt: keys of the prompt; the first one with a value in the row counts.
        completion: keys of the answer to learn (supervised training).
        label: keys of the ground truth.
        label_required: an explicit label key: a row without it is bad.
        completion_required: an explicit output key: a row without it is bad.
        preference: the prompt may be the common beginning of ``chosen`` and ``rejected``.
        documents: text columns are whole documents, without a completion.
    """

    prompt: tuple[str, ...]
    completion: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    label_required: bool = False
    completion_required: bool = False
    preference: bool = False
    documents: bool = False

    def columns_in(self, columns: Iterable[str]) -> list[str]:
        """Those of the data's columns that are needed to render a row."""
        keys = [*self.prompt, *self.completion, *self.label, *(PREFERENCE_KEYS if self.preference else ())]
        used = {_column_of(key, columns) for key in keys}
        return [c for c in columns if c in used]


def _explicit(key: str, columns: Sequence[str], flag: str) -> tuple[str, ...]:
    if _column_of(key, columns) is None:
        raise DataError(f"{flag} {key!r} is not a column of the data; its columns: {_listed(columns)}")
    return (key,)


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(c for c in columns if c != ORIGIN_COLUMN) or "(none)"


def resolve_fields(
    columns: Sequence[str],
    *,
    input_key: str = DEFAULT_INPUT_KEY,
    label_key: str | None = None,
    output_key: str | None = None,
    supervised: bool = False,
    documents: bool = False,
) -> RowFields:
    """Decide which keys are read from data with these columns.

    Args:
        columns: names of the columns.
        input_key: the prompt's key. The default name falls back on the known forms where no such column exists.
        label_key: the ground truth's key; None tries the known names.
        output_key: the completion's key; None tries the known names (``supervised`` only).
        supervised: rows need a completion too.
        documents: rows may be plain text (pretraining); the prompt's key then holds all of it, unless ``output_key``
            says otherwise or the row has one of the forms with a completion.

    Raises:
        DataError: an explicit key is no column, or no known form fits; the message lists the columns.
    """
    label = _explicit(label_key, columns, "--label_key") if label_key else _known(LABEL_KEYS, columns)
    preference = set(PREFERENCE_KEYS) <= set(columns)
    if documents and _column_of(input_key, columns) is None and (known := _known(TEXT_KEYS, columns)):
        # --input_key names the prompts' column; the pretraining data beside them has its own
        logger.info("--input_key %r is not a column of the text data; reading %r", input_key, known[0])
        input_key = DEFAULT_INPUT_KEY
    if input_key != DEFAULT_INPUT_KEY:
        prompt = _explicit(input_key, columns, "--input_key")
        preference = supervised and preference
    else:
        prompt = _known(((*TEXT_KEYS, *PROMPT_KEYS) if documents else PROMPT_KEYS), columns)
    if not prompt and not preference:
        raise DataError(
            f"no column with a prompt: set --input_key to one of the columns: {_listed(columns)} "
            f"(recognised without it: {', '.join(PROMPT_KEYS)}, or chosen and rejected)"
        )
    completion: tuple[str, ...] = ()
    if output_key:
        completion = _explicit(output_key, columns, "--output_key")
    elif supervised and not (documents and input_key != DEFAULT_INPUT_KEY):
        completion = tuple(k for k in _known(COMPLETION_KEYS, columns) if k not in prompt)
    return RowFields(
        prompt=prompt,
        completion=completion,
        label=label,
        label_required=label_key is not None,
        completion_required=output_key is not None,
        preference=preference,
        documents=documents,
    )


def _known(keys: Iterable[str], columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(k for k in dict.fromkeys(keys) if _column_of(k, columns))


def _first_value(row: Mapping[str, Any], keys: Iterable[str]) -> tuple[str | None, Any]:
    for key in keys:
        value = lookup(row, key)
        if value is not None:
            return key, value
    return None, None


def read_chat(value: Sequence[Any], where: str) -> Chat:
    """Check a list of chat messages and return it without the None fields that Arrow adds.

    Raises:
        BadRowError: not messages of ``role`` and text ``content``, or nothing in it.
    """
    if not value:
        raise BadRowError("empty", f"{where} is an empty list of messages")
    chat: Chat = []
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRowError(
                "wrong_type", f"{where}[{i}] is {_shown(message)}; a message has a role (text) and a content"
            )
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise BadRowError("wrong_type", f"{where}[{i}].content is {_shown(content)}; only text is read")
        chat.append({k: v for k, v in message.items() if v is not None or k == "content"})
    last = chat[-1].get("content")
    if last is not None and not last.strip():
        raise BadRowError("empty", f"{where}: the last message is empty")
    return chat


def _text_or_chat(value: Any, where: str) -> str | Chat:
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError("empty", f"{where} is empty")
        return value
    if isinstance(value, list | tuple):
        return read_chat(value, where)
    raise BadRowError("wrong_type", f"{where} is {_shown(value)}; text or a list of chat messages is needed")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _common_prompt(chosen: Any, rejected: Any) -> tuple[str | Chat, str | Chat]:
    """Prompt and chosen answer of a preference row without a prompt: what both answers begin with."""
    if isinstance(chosen, list) and isinstance(rejected, list):
        chosen, rejected = read_chat(chosen, "'chosen'"), read_chat(rejected, "'rejected'")
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        if 0 < shared < len(chosen):
            return chosen[:shared], chosen[shared:]
    elif isinstance(chosen, str) and isinstance(rejected, str):
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        turn = "\n\nAssistant:"  # the form of hh-rlhf, the one public set of such texts
        cut = chosen.rfind(turn, 0, shared)
        if cut >= 0 and chosen[:cut].strip() and chosen[cut + len(turn) :].strip():
            return chosen[: cut + len(turn)], chosen[cut + len(turn) :]
    else:
        kinds = f"{type(chosen).__name__} and {type(rejected).__name__}"
        raise BadRowError("wrong_type", f"'chosen' and 'rejected' are {kinds}; both must be text, or both chats")
    raise BadRowError("missing", "'chosen' and 'rejected' share no prompt; set --input_key to the column that holds it")


def read_prompt(row: Mapping[str, Any], fields: RowFields) -> tuple[str | Chat, str | None]:
    """The prompt of a row, and the key it was found under (None: from ``chosen`` and ``rejected``).

    A chat under ``messages`` that ends with an assistant turn is a finished conversation: the prompt is what comes
    before.

    Raises:
        BadRowError: nothing there, of the wrong type, or empty.
    """
    key, value = _first_value(row, fields.prompt)
    if key is None:
        if fields.preference and all(row.get(k) is not None for k in PREFERENCE_KEYS):
            return _common_prompt(row["chosen"], row["rejected"])[0], None
        raise BadRowError("missing", f"no prompt: {' and '.join(repr(k) for k in fields.prompt)} missing or null")
    prompt = _text_or_chat(value, repr(key))
    if key == "messages" and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        if len(prompt) == 1:
            raise BadRowError("missing", "'messages' has an answer but no prompt")
        prompt = prompt[:-1]
    return prompt, key


def read_label(row: Mapping[str, Any], fields: RowFields) -> Any:
    """The ground truth of a row, any JSON value; None where the data has none.

    Raises:
        BadRowError: an explicit label key without a value.
    """
    key, value = _first_value(row, fields.label)
    if key is None and fields.label_required:
        raise BadRowError("missing", f"no label: {fields.label[0]!r} missing or null")
    return value


def read_example(row: Mapping[str, Any], fields: RowFields) -> tuple[str | Chat, str | Chat | None]:
    """Prompt and completion of a supervised row; the completion is None for plain text.

    Raises:
        BadRowError: a part is missing, of the wrong type, or empty.
    """
    key, value = _first_value(row, fields.prompt)
    if key is None:
        if fields.preference and all(row.get(k) is not None for k in PREFERENCE_KEYS):
            return _common_prompt(row["chosen"], row["rejected"])
        raise BadRowError("missing", f"no prompt: {' and '.join(repr(k) for k in fields.prompt)} missing or null")
    prompt = _text_or_chat(value, repr(key))
    output, answer = _first_value(row, fields.completion)
    if output is None and fields.completion_required:
        raise BadRowError("missing", f"no completion: {fields.completion[0]!r} missing or null")
    if output is None and fields.preference and row.get("chosen") is not None:
        output, answer = "chosen", row["chosen"]
    # A conversation holds its own answer; a column beside it (AReaL's `answer`) is then a label.
    finished = isinstance(prompt, list) and len(prompt) > 1 and prompt[-1]["role"] == "assistant"
    if finished and not fields.completion_required:
        return prompt[:-1], prompt[-1:]
    if output is None or (key in TEXT_KEYS and fields.documents and not fields.completion_required):
        return prompt, None
    completion = _text_or_chat(answer, repr(output))
    if isinstance(prompt, list) and isinstance(completion, str):
        return prompt, [{"role": "assistant", "content": completion}]
    if isinstance(completion, list):
        chat = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        if len(completion) > len(chat) and completion[: len(chat)] == chat:  # TRL: `chosen` may repeat the prompt
            completion = completion[len(chat) :]
        return chat, completion
    return prompt, completion
