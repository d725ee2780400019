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


def after_thinking(response: str) -> str | None:
    """Return what stands behind the last ``</think>``; ``None`` while the thinking goes on."""
    answer = response.rpartition(_CLOSER)[2]
    if _OPENER in answer:
        return None
    return answer


class Thinking:
    """Writes responses with their thinking in ``<think>…</think>``.

    Args:
        tokenizer: the model's. Without it, marks that are special tokens are not seen.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None)
        added_tokens = added.values() if isinstance(added, Mapping) else ()
        self._special_tokens = [
            token.content for token in added_tokens if token.special and token.content
        ]

    def shown(self, rollout: Rollout) -> str:
        """Return the response in the common form; it begins with ``<think>`` where the prompt opens the thinking."""
        response = rollout.response_text
        if rollout.turns is not None:  # of an episode: its last turn, without thinking
            return response
        prompt = rollout.prompt.text.rstrip()
        opened = next((pair for pair in THINKING if prompt.endswith(pair[0])), None)
        for opener, closer in THINKING:
            is_open = (opener, closer) == opened
            text = response
            if any(token in opener for token in self._special_tokens):
                text = self._tokenizer.decode(rollout.response_ids, skip_special_tokens=False)
            if opener in text or (is_open and closer in text):
                response = self._without_special(_in_common_form(text, opener, closer, is_open))
                break
        if opened and not response.lstrip().startswith(_OPENER):
            return _OPENER + response
        return response

    def _without_special(self, text: str) -> str:
        for token in self._special_tokens:
            if token not in (_OPENER, _CLOSER):
                text = text.replace(token, "")
        return text


def _in_common_form(response: str, opener: str, closer: str, is_open: bool) -> str:
    is_open = is_open or closer in response.partition(opener)[0]  # the opening was left out
    pieces = []
    while response:
        family_mark, common_mark = (closer, _CLOSER) if is_open else (opener, _OPENER)
        piece, matched, response = response.partition(family_mark)
        pieces.append(piece)
        if matched:
            pieces.append(common_mark)
            is_open = not is_open
    if opener == CHANNELS[0]:
        return CHANNEL_HEADER.sub("", "".join(pieces))
    return "".join(pieces)
