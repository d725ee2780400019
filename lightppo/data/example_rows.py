"""How rows say a prompt and an answer to it, a pair of answers, or a whole text; imports nothing heavy."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightppo.data.rows import (
    DEFAULT_INPUT_KEY,
    PREFERENCE_KEYS,
    PROMPT_KEYS,
    Chat,
    RowFields,
    as_chat,
    column_of,
    first_value,
    known_keys,
    lookup,
    no_prompt,
    pair_of,
    read_label,
    require_column,
    resolve_fields,
    shown_value,
    split_pair,
    text_or_chat,
)
from lightppo.errors import BadRowError

logger = logging.getLogger(__name__)

TEXT_KEYS = (DEFAULT_INPUT_KEY, "text", "content")  # plain documents, for pretraining
COMPLETION_KEYS = ("output", "completion", "response", "answer", "solution")


@dataclass(frozen=True)
class ExampleFields(RowFields):
    """The keys of rows to learn from."""

    completion: tuple[str, ...] = ()
    completion_required: bool = False  # a row without a completion is bad
    preference: bool = False  # the prompt may be the common beginning of the pair
    pair: tuple[str, ...] = PREFERENCE_KEYS
    documents: bool = False  # text columns are whole documents, without a completion

    @property
    def rendered(self) -> tuple[str, ...]:
        keys = (*self.prompt, *self.completion)
        if self.preference:
            keys += self.pair
        return keys


def resolve_example_fields(
    columns: Sequence[str],
    *,
    input_key: str | None = None,
    label_key: str | None = None,
    output_key: str | None = None,
    documents: bool = False,
    pairs: bool = False,
    chosen_key: str | None = None,
    rejected_key: str | None = None,
) -> ExampleFields:
    """Decide which keys are read, as :func:`lightppo.data.rows.resolve_fields` does, with those of the completion.

    ``documents`` may be plain text (pretraining), unless a completion is found; ``pairs`` need both answers instead of
    a completion, and their label is the margin.
    """
    pair = (chosen_key or "chosen", rejected_key or "rejected")
    if pairs:
        require_column(pair[0], columns, "--chosen_key")
        require_column(pair[1], columns, "--rejected_key")
    input_key = input_key or DEFAULT_INPUT_KEY
    text_keys = known_keys(TEXT_KEYS, columns)
    if documents and column_of(input_key, columns) is None and text_keys:
        # --input_key names the prompts' column; the pretraining data beside them has its own
        logger.info(
            "--input_key %r is not a column of the text data; reading %r", input_key, text_keys[0]
        )
        input_key = DEFAULT_INPUT_KEY
    preference = all(column_of(key, columns) for key in pair)
    fields = resolve_fields(
        columns,
        input_key=input_key,
        label_key=label_key,
        label_flag="--margin_key" if pairs else "--label_key",
        prompt_keys=(*TEXT_KEYS, *PROMPT_KEYS) if documents else PROMPT_KEYS,
        has_prompt=preference,
    )
    completion: tuple[str, ...] = ()
    if output_key:
        require_column(output_key, columns, "--output_key")
        completion = (output_key,)
    elif not pairs and not (documents and input_key != DEFAULT_INPUT_KEY):
        keys = known_keys(COMPLETION_KEYS, columns)
        completion = tuple(key for key in keys if key not in fields.prompt)
    return ExampleFields(
        **vars(fields),
        completion=completion,
        completion_required=output_key is not None,
        preference=preference,
        pair=pair,
        documents=documents,
    )


def read_example(
    row: Mapping[str, Any], fields: ExampleFields
) -> tuple[str | Chat, str | Chat | None]:
    """Return prompt and completion of a supervised row; the completion is None for plain text."""
    prompt, prompt_key, chosen = prompt_and_chosen(row, fields)
    if prompt_key is None:
        return prompt, chosen
    completion_key, completion = first_value(row, fields.completion)
    if completion_key is None and fields.completion_required:
        raise BadRowError("missing", f"no completion: {fields.completion[0]!r} missing or null")
    if completion_key is None and fields.preference and row.get("chosen") is not None:
        completion_key = "chosen"
        completion = row["chosen"]
    if not fields.completion_required:
        # A conversation holds its own answer, so another column (AReaL's `answer`) is a label.
        if isinstance(prompt, list) and len(prompt) > 1 and prompt[-1]["role"] == "assistant":
            return prompt[:-1], prompt[-1:]
        if prompt_key in TEXT_KEYS and fields.documents:
            return prompt, None
    if completion_key is None:
        return prompt, None
    return after_prompt(prompt, text_or_chat(completion, repr(completion_key)))


def prompt_and_chosen(
    row: Mapping[str, Any], fields: ExampleFields
) -> tuple[str | Chat, str | None, str | Chat | None]:
    """Return (prompt, its key, None), or from a preference pair (common beginning, None, rest of the chosen answer)."""
    prompt_key, prompt_value = first_value(row, fields.prompt)
    if prompt_key is not None:
        return text_or_chat(prompt_value, repr(prompt_key)), prompt_key, None
    if not fields.preference or any(row.get(answer_key) is None for answer_key in PREFERENCE_KEYS):
        raise no_prompt(fields)
    prompt, chosen, _ = pair_of(row)
    return prompt, None, chosen


def after_prompt(prompt: str | Chat, answer: str | Chat) -> tuple[str | Chat, str | Chat]:
    """Return prompt and answer as two texts or two chats; TRL: a chat may repeat the prompt."""
    if isinstance(prompt, str) and isinstance(answer, str):
        return prompt, answer
    prompt_chat = as_chat(prompt, "user")
    answer = as_chat(answer, "assistant")
    if len(answer) > len(prompt_chat) and answer[: len(prompt_chat)] == prompt_chat:
        answer = answer[len(prompt_chat) :]
    return prompt_chat, answer


def read_pair(
    row: Mapping[str, Any], fields: ExampleFields
) -> tuple[str | Chat, str | Chat, str | Chat]:
    """Return prompt, chosen and rejected answer of a row; the prompt of two whole chats is their beginning."""
    for prompt_key in fields.pair:
        if lookup(row, prompt_key) is None:
            raise BadRowError("missing", f"{prompt_key!r} is missing or null")
    chosen, rejected = (
        text_or_chat(lookup(row, prompt_key), repr(prompt_key)) for prompt_key in fields.pair
    )
    if chosen == rejected:
        raise BadRowError(
            "equal",
            f"{' and '.join(map(repr, fields.pair))} are the same: there is nothing to prefer",
        )
    answers = (chosen, rejected)
    prompt_key, prompt_value = first_value(row, fields.prompt)
    have_prompts = all(
        isinstance(answer, list) and answer[0]["role"] != "assistant" for answer in answers
    )
    if prompt_key is None or have_prompts:
        return split_pair(chosen, rejected)
    prompt = text_or_chat(prompt_value, repr(prompt_key))
    if isinstance(prompt, str) and all(
        isinstance(answer, str) and answer.startswith(prompt) for answer in answers
    ):
        chosen = chosen[len(prompt) :]
        rejected = rejected[len(prompt) :]
    _, chosen = after_prompt(prompt, chosen)
    prompt, rejected = after_prompt(prompt, rejected)
    if type(chosen) is not type(rejected):
        raise BadRowError("wrong_type", "one of 'chosen' and 'rejected' is text, the other a chat")
    return prompt, chosen, rejected


def read_margin(row: Mapping[str, Any], fields: ExampleFields) -> float | None:
    """Return the margin of a pair, a number at least 0; ``None`` where no --margin_key is given."""
    if not fields.label_required:
        return None
    value = read_label(row, fields)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise BadRowError(
            "margin",
            f"--margin_key {fields.label[0]!r} is {shown_value(value)}; a number ≥ 0 is needed",
        )
    return float(value)
