"""When a response ends: end-of-text ids, stop ids, stop strings; and which token sequences a bad word is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightppo.rollout.engine import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL_MARGIN = 4  # tokens without text (skipped special tokens) that may lie inside a stop string


def end_of_text_ids(tokenizer: PreTrainedTokenizerBase, generation_config: Any | None) -> list[int]:
    """The ids that end a text: the tokenizer's and those of the model's generation config (an id or a list)."""
    ids = {tokenizer.eos_token_id}
    configured = getattr(generation_config, "eos_token_id", None)
    ids.update(configured if isinstance(configured, list | tuple) else [configured])
    return sorted(i for i in ids if i is not None)


def bad_word_ids(tokenizer: PreTrainedTokenizerBase, words: tuple[str, ...]) -> list[list[int]]:
    """Token sequences of bad words, at the start of a text and behind a space (as vLLM has it).

    Raises:
        ValueError: the tokenizer has no tokens for a word.
    """
    sequences: list[list[int]] = []
    for word in words:
        plain, spaced = (tokenizer.encode(prefix + word.strip(), add_special_tokens=False) for prefix in ("", " "))
        if not plain or tokenizer.unk_token_id in plain:
            raise ValueError(f"bad_words: the tokenizer has no tokens for {word!r} (got ids {plain}); remove it")
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return sequences


class StopCriteria:
    """Tells which rows of a batch have ended, and cuts stop strings off their texts.

    A stop string must lie behind the first ``min_new_tokens`` tokens as a whole.

    Args:
        tokenizer: decodes the tails that stop strings are looked for in.
        sampling: ``stop``, ``stop_token_ids``, ``ignore_eos`` and ``min_new_tokens`` are read.
        eos_ids: the end-of-text ids.
        vocab_size: number of logits of the model.

    Raises:
        ValueError: a stop id that is no id of the model.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams, *, eos_ids: list[int], vocab_size: int
    ) -> None:
        unknown = [i for i in sampling.stop_token_ids if i >= vocab_size]
        if unknown:
            raise ValueError(f"stop_token_ids {unknown} are beyond the model's vocabulary of {vocab_size} ids")
        ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ids.update(i for i in eos_ids if i < vocab_size)
        self.ids = sorted(ids)
        self._is_stop = torch.zeros(vocab_size, dtype=torch.bool)
        self._is_stop[self.ids] = True
        self._strings = sampling.stop
        self._offset = sampling.min_new_tokens
        self._tokenizer = tokenizer
        # A token that is not special has at least one byte of text.
        self._tail = max((len(s.encode()) for s in self._strings), default=0) + _TAIL_MARGIN

    def to(self, device: torch.device) -> StopCriteria:
        self._is_stop = self._is_stop.to(device)
        return self

    def ended(self, responses: Tensor, rows: Tensor, length: int | Tensor) -> Tensor:
        """Which rows end with their newest token.

        Args:
            responses: (B, max_new_tokens) the ids of the whole batch.
            rows: (b,) the rows asked about.
            length: tokens that each of these has, the newest one included; (b,) where they differ.

        Returns:
            (b,) bool.
        """
        ended = self._is_stop[responses[rows, length - 1]]
        if self._strings:
            ends = torch.as_tensor(length, device=rows.device).expand(len(rows))
            columns = ends.unsqueeze(1) - torch.arange(self._tail, 0, -1, device=rows.device)  # (b, tail)
            ids = responses[rows.unsqueeze(1), columns.clamp(min=0)].tolist()
            hidden = (self._offset - columns[:, 0]).clamp(min=0).tolist()  # before the minimum, or before the response
            tails = [tail[skip:] for tail, skip in zip(ids, hidden)]
            texts = self._tokenizer.batch_decode(tails, skip_special_tokens=True)
            found = [any(string in text for string in self._strings) for text in texts]
            ended = ended | torch.tensor(found, device=ended.device)
        return ended

    def trim(self, response_ids: list[int], text: str) -> str:
        """Cuts ``text`` (the decoded ids) before the first stop string."""
        if not self._strings:
            return text
        start = len(self._tokenizer.decode(response_ids[: self._offset], skip_special_tokens=True))
        cuts = [cut for cut in (text.find(string, start) for string in self._strings) if cut >= 0]
        return text[: min(cuts)] if cuts else text
