"""Penalties of tokens that are there already, and words that are never completed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from lightppo.errors import ConfigError
from lightppo.models.loading import valid_vocab_size
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampling import NO_TOKEN
from lightppo.rollout.stop_criteria import split_stops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def penalties_of(
    sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> Penalties | None:
    """Return the processor of logits that ``sampling`` needs; None: it changes none."""
    words = bad_word_ids(tokenizer, sampling.bad_words)
    completable = [ids for ids in words if max(ids) < vocab_size]
    counts = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    if not counts and not completable and sampling.repetition_penalty == 1.0:
        return None
    return Penalties(sampling, completable)


class Penalties:
    """Change raw logits as ``sampling`` says; ``bad_words`` are sequences of ids."""

    def __init__(self, sampling: SamplingParams, bad_words: Sequence[list[int]]) -> None:
        penalty = sampling.repetition_penalty
        self.repetition = RepetitionPenaltyLogitsProcessor(penalty) if penalty != 1.0 else None
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        self.bad_words = NoBadWordsLogitsProcessor(bad_words) if bad_words else None

    def __call__(self, logits: Tensor, step: int | Tensor, history: Tensor) -> Tensor:
        """Return logits (B, V); ``step`` and ``history`` as of :class:`lightppo.rollout.sampling.TokenSampler`."""
        if self.repetition is not None:
            # Padding repeats the last id (always a real one), which is penalised once anyhow.
            seen = torch.where(history == NO_TOKEN, history[:, -1:], history)
            logits = self.repetition(seen, logits)
        if self.presence or self.frequency:
            counts = _response_counts(history, step, logits)
            logits = logits - self.frequency * counts - self.presence * (counts > 0)
        if self.bad_words is not None:
            logits = self.bad_words(history, logits)
        return logits


def _response_counts(history: Tensor, step: int | Tensor, scores: Tensor) -> Tensor:
    """Count how often each id is in the response, the last ``step`` ids of ``history`` (B, S); (B, V) as ``scores``."""
    ages = torch.as_tensor(step, device=history.device).view(-1, 1)  # (B or 1, 1)
    # (B or 1, S)
    in_response = torch.arange(history.shape[1], 0, -1, device=history.device) <= ages
    in_response = in_response.expand_as(history)
    return torch.zeros_like(scores).scatter_add_(
        1, history.where(in_response, 0), in_response.to(scores.dtype)
    )


def bad_word_ids(tokenizer: PreTrainedTokenizerBase, words: tuple[str, ...]) -> list[list[int]]:
    """Return the token sequences of bad words, at the start of a text and behind a space (as in vLLM)."""
    sequences: list[list[int]] = []
    for word in words:
        plain, spaced = (
            tokenizer.encode(prefix + word.strip(), add_special_tokens=False)
            for prefix in ("", " ")
        )
        if not plain or tokenizer.unk_token_id in plain:
            raise ValueError(
                f"bad_words: the tokenizer has no tokens for {word!r} (got ids {plain}); remove it"
            )
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return sequences


def check_sampled_tokens(building: Any) -> None:
    """Refuse ids and words that no sampled answer can have."""
    options, size = building.config.flat(), valid_vocab_size(building.tokenizer)
    if beyond := [i for i in options.get("stop_token_ids", ()) if i >= size]:
        raise ConfigError(
            f"--stop_token_ids {' '.join(map(str, beyond))}: the tokenizer has no such id, its largest is {size - 1}: "
            "leave it out, or give the text to --stop"
        )
    try:
        bad_word_ids(building.tokenizer, options.get("bad_words", ()))
        split_stops(building.tokenizer, options.get("stop", ()))
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
