"""Where a chat template writes the assistant's turns of a chat, all of which are learned with ``--multiturn``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightppo.data.chat_templates import PromptTemplate, check_answer
from lightppo.data.rows import Chat, shared_length
from lightppo.errors import BadRowError

_PROBE = "qzturn"
Span = tuple[int, int]


def assistant_turns(
    template: PromptTemplate, messages: Chat, options: Mapping[str, Any]
) -> tuple[str, list[Span]]:
    """A whole chat as text, and begin and end of each turn with what ends it. A first turn answers nothing.

    Raises:
        BadRowError: the template writes a turn, or what is before it, differently once the chat goes on.
    """
    text = template.chat_text(messages, options).rstrip("\n")
    spans: list[Span] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not i:
            continue
        try:
            begin, end = _span(template, messages, i, text, options)
            check_answer(message, text[begin:end])
        except BadRowError as error:
            cure = "; without --multiturn the last turn alone is learned" * (i + 1 < len(messages))
            raise BadRowError(error.reason, f"message {i + 1}: {error}{cure}") from error
        spans.append((begin, end))
    if not spans:
        raise BadRowError("missing", "no turn of the assistant answers anything")
    return text, spans


def _span(
    template: PromptTemplate, messages: Chat, i: int, text: str, options: Mapping[str, Any]
) -> Span:
    before = template.chat_text(messages[:i], options)
    asked = template.chat_text(messages[:i], options, add_generation_prompt=True)
    probe = {"role": "assistant", "content": _PROBE}
    probed = template.chat_text([*messages[:i], probe], options)
    begin = min(shared_length(asked, text), shared_length(asked, probed))
    # A thought that was switched off stands in the last turn alone.
    is_rewritten = begin < len(asked) and not asked.rstrip().endswith("</think>")
    if begin < len(before.rstrip("\n")) or is_rewritten:
        raise BadRowError("template", differs(asked, text, begin))
    turn = template.chat_text(messages[: i + 1], options).rstrip("\n")
    if text.startswith(turn):
        return begin, len(turn)
    closing = probed.rpartition(_PROBE)[2].rstrip("\n")
    end = text.find(closing, begin)
    if not closing or end < 0:
        raise BadRowError("template", differs(turn, text, shared_length(turn, text)))
    return begin, end + len(closing)


def differs(asked: str, answered: str, at: int) -> str:
    """Where a chat template writes a chat in another way once it goes on."""
    return (
        f"the chat template writes the prompt differently once it is answered ({asked[at : at + 40]!r} becomes "
        f"{answered[at : at + 40]!r}); no loss can be placed"
    )
