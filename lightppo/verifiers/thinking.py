"""What a response says beside its thinking.

Families mark thinking differently, some with special tokens, which the text of a response does not show; many templates
open the thinking in the prompt. Verifiers read one form of all: ``<think>…</think>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightppo.data.records import Rollout

CHANNELS = ("<|channel|>analysis<|message|>", "<|end|>")
CHANNEL_HEADER = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>[^<]*<\|message\|>")

THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    CHANNELS,
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
"""What stands around thinking, by families. The first pair is for templates and vocabularies that have none of them."""

_OPENER, _CLOSER = THINKING[0]


def after_thinking(text: str) -> str | None:
    """Return what stands behind the last ``</think>``; ``None`` while the thinking goes on."""
    start = text.rfind(_OPENER)
    end = text.rfind(_CLOSER)
    if start > end:
        return None
    return text[end + len(_CLOSER) :] if end >= 0 else text


class Thinking:
    """Writes responses with their thinking in ``<think>…</think>``.

    Args:
        tokenizer: the model's. Without it, marks that are special tokens are not seen.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None)
        special = added.values() if isinstance(added, Mapping) else ()
        self._special = [token.content for token in special if token.special and token.content]

    def shown(self, rollout: Rollout) -> str:
        """Return the response in the common form; it begins with ``<think>`` where the prompt opens the thinking."""
        text = rollout.response_text
        if (
            rollout.turns is not None
        ):  # an episode's text is that of its last turn, without thinking
            return text
        prompt = rollout.prompt.text.rstrip()
        opened = next((pair for pair in THINKING if prompt.endswith(pair[0])), None)
        for pair in THINKING:
            whole = text
            if any(token in pair[0] for token in self._special):
                whole = self._tokenizer.decode(rollout.response_ids, skip_special_tokens=False)
            if pair[0] in whole or (pair == opened and pair[1] in whole):
                text = self._without_special(_marked(whole, *pair, is_open=pair == opened))
                break
        begins = opened is None or text.lstrip().startswith(_OPENER)
        return text if begins else _OPENER + text

    def _without_special(self, text: str) -> str:
        for token in self._special:
            if token not in (_OPENER, _CLOSER):
                text = text.replace(token, "")
        return text


def _marked(text: str, opener: str, closer: str, is_open: bool) -> str:
    is_open = is_open or closer in text.partition(opener)[0]  # the opening was left out
    parts = []
    while text:
        piece, mark, text = text.partition(closer if is_open else opener)
        parts.append(piece)
        if mark:
            parts.append(_CLOSER if is_open else _OPENER)
            is_open = not is_open
    whole = "".join(parts)
    if opener == CHANNELS[0]:
        return CHANNEL_HEADER.sub("", whole)
    return whole
