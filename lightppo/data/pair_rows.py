"""How rows say pairs of a chosen and a rejected answer to a prompt; imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightppo.data.example_rows import ExampleFields, after_prompt, split_pair
from lightppo.data.rows import (
    Chat,
    first_value,
    lookup,
    read_label,
    shown_value,
    text_or_chat,
)
from lightppo.errors import BadRowError


def read_pair(
    row: Mapping[str, Any], fields: ExampleFields
) -> tuple[str | Chat, str | Chat, str | Chat]:
    """Prompt, chosen and rejected answer of a row. Of two answers that are whole chats the prompt is the beginning."""
    given = {key: lookup(row, key) for key in fields.pair}
    if missing := [key for key, value in given.items() if value is None]:
        raise BadRowError("missing", f"{missing[0]!r} is missing or null")
    chosen, rejected = (text_or_chat(lookup(row, key), repr(key)) for key in fields.pair)
    if chosen == rejected:
        raise BadRowError(
            "equal",
            f"{' and '.join(map(repr, fields.pair))} are the same: there is nothing to prefer",
        )
    key, value = first_value(row, fields.prompt)
    whole = all(
        isinstance(answer, list) and answer[0]["role"] != "assistant"
        for answer in (chosen, rejected)
    )
    if key is None or whole:
        return split_pair(chosen, rejected)
    prompt = text_or_chat(value, repr(key))
    if isinstance(prompt, str) and all(
        isinstance(x, str) and x.startswith(prompt) for x in (chosen, rejected)
    ):
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    _, chosen = after_prompt(prompt, chosen)
    prompt, rejected = after_prompt(prompt, rejected)
    if type(chosen) is not type(rejected):
        raise BadRowError("wrong_type", "one of 'chosen' and 'rejected' is text, the other a chat")
    return prompt, chosen, rejected


def read_margin(row: Mapping[str, Any], fields: ExampleFields) -> float | None:
    """The margin of a pair, a number at least 0; ``None`` where no --margin_key is given."""
    if not fields.label_required:
        return None
    value = read_label(row, fields)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise BadRowError(
            "margin",
            f"--margin_key {fields.label[0]!r} is {shown_value(value)}; a number ≥ 0 is needed",
        )
    return float(value)
