"""Strings that end a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampling import StopCriteria

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL_MARGIN = 4  # tokens without text (skipped special tokens) that may lie inside a stop string


def split_stops(
    tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]
) -> tuple[tuple[str, ...], list[int]]:
    """The strings that a text can have, and the ids of those that are special tokens, which texts leave out.

    Raises:
        ValueError: a string has a special token and more.
    """
    if not strings:
        return (), []
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids))
    for i, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special[token.content] = i
    for string in strings:
        inside = [token for token in special if token in string]
        if inside and string not in special:
            raise ValueError(
                f"stop {string!r} has the special token {inside[0]!r}, which texts leave out, and more: give the token "
                "alone, or text without it"
            )
    return (
        tuple(string for string in strings if string not in special),
        [special[string] for string in strings if string in special],
    )


class StopStrings(StopCriteria):
    """Also ends responses at stop strings, and cuts these off; they count behind ``min_new_tokens`` tokens.

    A string that is a special token is a stop id.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        *,
        eos_ids: list[int],
        vocab_size: int,
    ) -> None:
        self.strings, ids = split_stops(tokenizer, sampling.stop)
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ids))
        super().__init__(tokenizer, sampling, eos_ids=eos_ids, vocab_size=vocab_size)
        self._offset = sampling.min_new_tokens
        self._tokenizer = tokenizer
        # A token that is not special has at least one byte of text.
        longest = max((len(stop_string.encode()) for stop_string in self.strings), default=0)
        self._tail = longest + _TAIL_MARGIN

    def ended(self, responses: Tensor, rows: Tensor, length: int | Tensor) -> Tensor:
        ended = super().ended(responses, rows, length)
        if not self.strings:
            return ended
        ends = torch.as_tensor(length, device=rows.device).expand(len(rows))
        # (b, tail)
        columns = ends.unsqueeze(1) - torch.arange(self._tail, 0, -1, device=rows.device)
        ids = responses[rows.unsqueeze(1), columns.clamp(min=0)].tolist()
        # How many ids of each tail do not count: those before the minimum length, or before the response.
        hidden = (self._offset - columns[:, 0]).clamp(min=0).tolist()
        tails = [tail[skip:] for tail, skip in zip(ids, hidden)]
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=True)
        has_string = [any(string in text for string in self.strings) for text in texts]
        return ended | torch.tensor(has_string, device=ended.device)

    def trim(self, response_ids: list[int], text: str) -> str:
        """Cuts ``text`` before the first stop string."""
        if not self.strings:
            return text
        start = len(self._tokenizer.decode(response_ids[: self._offset], skip_special_tokens=True))
        cuts = [cut for cut in (text.find(string, start) for string in self.strings) if cut >= 0]
        return text[: min(cuts)] if cuts else text
