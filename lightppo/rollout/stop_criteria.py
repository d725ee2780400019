"""When a response ends: at ids and at strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightppo.rollout.engine import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL_MARGIN = 4  # tokens without text (skipped special tokens) that may lie inside a stop string


def end_of_text_ids(tokenizer: PreTrainedTokenizerBase, generation_config: Any | None) -> list[int]:
    """Return the ids that end a text, from the tokenizer and the model's generation config (an id or a list)."""
    ids = {tokenizer.eos_token_id}
    configured = getattr(generation_config, "eos_token_id", None)
    ids.update(configured if isinstance(configured, list | tuple) else [configured])
    return sorted(i for i in ids if i is not None)


def split_stops(
    tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]
) -> tuple[tuple[str, ...], list[int]]:
    """Return the strings that a text can have, and the ids of those that are special tokens, which texts leave out.

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


class StopCriteria:
    """Tell which responses have ended, by ids or by strings, and cut stop strings off.

    Strings count behind ``min_new_tokens`` tokens. A string that is a special token is a stop id.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        *,
        eos_ids: list[int],
        vocab_size: int,
    ) -> None:
        self.strings, special_ids = split_stops(tokenizer, sampling.stop)
        stop_ids = (*sampling.stop_token_ids, *special_ids)
        unknown = [i for i in stop_ids if i >= vocab_size]
        if unknown:
            raise ValueError(
                f"stop_token_ids {unknown} are beyond the model's vocabulary of {vocab_size} ids"
            )
        eos_ids = [] if sampling.ignore_eos else eos_ids
        self.ids = sorted({*stop_ids, *(i for i in eos_ids if i < vocab_size)})
        self.is_stop = torch.zeros(vocab_size, dtype=torch.bool)  # of each id
        self.is_stop[self.ids] = True
        self._offset = sampling.min_new_tokens
        self._tokenizer = tokenizer
        # A token that is not special has at least one byte of text.
        longest = max((len(string.encode()) for string in self.strings), default=0)
        self._tail = longest + _TAIL_MARGIN

    def to(self, device: torch.device) -> StopCriteria:
        """Move to a device, in place."""
        self.is_stop = self.is_stop.to(device)
        return self

    def ended(self, responses: Tensor, rows: Tensor, length: int | Tensor) -> Tensor:
        """Return which ``rows`` (b,) of ``responses`` (B, max_new_tokens) end with their newest token; (b,) bool.

        ``length`` counts the tokens of each row, the newest one included; (b,) if the rows differ.
        """
        ended = self.is_stop[responses[rows, length - 1]]
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
        """Cut ``text``, the decoded ids, before the first stop string."""
        if not self.strings:
            return text
        start = len(self._tokenizer.decode(response_ids[: self._offset], skip_special_tokens=True))
        cuts = [cut for cut in (text.find(string, start) for string in self.strings) if cut >= 0]
        return text[: min(cuts)] if cuts else text
