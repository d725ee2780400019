"""Control tokens of a tokenizer, and texts that contain none of them.

Control tokens are all tokens that were added to the vocabulary, special or not: ``<tool_call>`` is often not special.
They split a text before it is tokenised, so that ids on both sides do not depend on each other.
"""

from __future__ import annotations

import copy
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")

# Stands behind the first character of what looks like a control token and is none. Only parsers see it.
MARK = "\U0010fffd"


class Strings:
    """Find many strings in a text; those of six thousand added tokens in a millisecond."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._by_beginning: dict[str, list[str]] = defaultdict(list)
        for string in set(strings):
            self._by_beginning[string[:4]].append(string)

    def broken(self, text: str, breaker: str) -> tuple[str, int]:
        """Return the text with ``breaker`` behind the first character of each string, and how many there were."""
        total_count = 0
        for _ in range(len(text) + 1):  # what stands between two halves may become whole
            matches = [
                candidate
                for beginning, candidates in self._by_beginning.items()
                if beginning in text
                for candidate in candidates
                if candidate in text
            ]
            if not matches:
                break
            matches.sort(key=len, reverse=True)
            pattern = "|".join(map(re.escape, matches))
            text, count = re.subn(pattern, lambda occurrence: _broken(occurrence[0], breaker), text)
            total_count += count
        return text, total_count


def _broken(string: str, breaker: str) -> str:
    # A single character has no middle: the breaker takes its place.
    if len(string) > 1:
        return string[0] + breaker + string[1:]
    return breaker


class ControlTokens:
    """Encode and decode, and tell control tokens from text.

    What any text may become steers nothing: white space and single bytes that were added to a vocabulary, and the token
    of unknown characters.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = _own(tokenizer)
        unknown_id = getattr(tokenizer, "unk_token_id", None)
        added_tokens = getattr(tokenizer, "added_tokens_decoder", None)
        if not isinstance(added_tokens, Mapping):  # tokenizers without templates have none
            added_tokens = {}
        self.strings = {
            token_id: token.content
            for token_id, token in added_tokens.items()
            if token_id != unknown_id
            and token.content.strip()
            and (token.special or len(token.content) > 1)
            and not _BYTE.fullmatch(token.content)
        }
        self.special = {token_id for token_id in self.strings if added_tokens[token_id].special}
        self._all = Strings(self.strings.values())

    def encode(self, text: str) -> list[int]:
        """Return its ids; strings of control tokens become control tokens, and nothing is added."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def among(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the control tokens in ids, in their order."""
        return tuple(token_id for token_id in token_ids if token_id in self.strings)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return their text. Only true control tokens read as such: what only spells one has a ``MARK`` in it."""
        pieces: list[str] = []
        ordinary_ids: list[int] = []
        for token_id in [*token_ids, None]:
            if token_id is not None and token_id not in self.strings:
                ordinary_ids.append(token_id)
                continue
            if ordinary_ids:
                ordinary_text = self._tokenizer.decode(
                    ordinary_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
                pieces.append(self._all.broken(ordinary_text.replace(MARK, ""), MARK)[0])
                ordinary_ids = []
            if token_id is not None:
                pieces.append(self.strings[token_id])
        return "".join(pieces)

    def without_special(self, text: str) -> str:
        """Return a decoded text without its special tokens."""
        for token_id in self.special:
            text = text.replace(self.strings[token_id], "")
        return text


def _own(tokenizer: Any) -> Any:
    """Return a copy that nobody else uses: another thread that truncates or pads would do so to these texts, too."""
    with _LOCK:
        own_copy = _COPIES.get(tokenizer)
        if own_copy is None or len(own_copy) != len(tokenizer):
            own_copy = _COPIES[tokenizer] = copy.deepcopy(tokenizer)
            own_copy("", add_special_tokens=False)  # sets neither from now on
        return own_copy


_COPIES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # a copy takes seconds
_LOCK = threading.Lock()


class Breaker:
    """Make texts from outside harmless: no control token and no marker of the chat's format is left in them."""

    def __init__(self, control: ControlTokens, markers: Iterable[str]) -> None:
        self._strings = Strings([*control.strings.values(), *filter(None, markers)])

    def __call__(self, text: str) -> tuple[str, int]:
        """Return the text with a space in each such string, and how many there were."""
        # a lone surrogate is no character, and tokenizers refuse it
        text = text.encode("utf-8", "replace").decode("utf-8")
        return self._strings.broken(text, " ")


def spaced_out(text: str) -> str:
    """Return the text with a space behind each sign: for tokenizers that take others for those of a control token."""
    return re.sub(r"([^\w\s])", r"\1 ", text)


def without_marks(json_value: Any) -> Any:
    """Return a text, or JSON value, as the model wrote it."""
    if isinstance(json_value, str):
        return json_value.replace(MARK, "")
    if isinstance(json_value, dict):
        return {
            without_marks(member_name): without_marks(item)
            for member_name, item in json_value.items()
        }
    if isinstance(json_value, list | tuple):
        return [without_marks(item) for item in json_value]
    return json_value
