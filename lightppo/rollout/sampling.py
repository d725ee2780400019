"""How a token is drawn (random numbers, filters, log probs), and when a response ends (ids and strings)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightppo.rollout.engine import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TOKEN = -1  # fills left padding in token histories: no filter takes it for a token
_BLOCK = 512  # tokens whose probabilities are summed at once where the vocabulary is large
_TAIL_MARGIN = 4  # tokens without text (skipped special tokens) that may lie inside a stop string

# -- drawing tokens ---------------------------------------------------------------------------------------------------


@contextmanager
def in_any_order() -> Iterator[None]:
    """Lifts --full_determinism, which on GPUs refuses cumulated sums of numbers.

    Sums over the rows of a table are always the same there; those of a single row are not.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if was_on:
        torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        if was_on:
            torch.use_deterministic_algorithms(True, warn_only=warns)


def request_uniforms(
    seed: int,
    prompt_index: int,
    sample_index: int,
    count: int,
) -> np.ndarray:
    """The uniforms of one request, (count,) float64 in [0, 1); a longer request begins with the same numbers."""
    # SHAKE-128 of the key is the same on every machine and version, unlike a seeded generator.
    stream = hashlib.shake_128(f"lightppo/{seed}/{prompt_index}/{sample_index}".encode()).digest(
        8 * count
    )
    # 52 bits, not 53: u * total < total then holds after rounding, for any total.
    return (np.frombuffer(stream, dtype="<u8") >> 12) * 2.0**-52


def request_seed(seed: int, prompt_index: int, sample_index: int, turn: int = 0) -> int:
    """The seed of one request in [0, 2^63), for engines that take a seed rather than uniforms."""
    key = f"lightppo/{seed}/{prompt_index}/{sample_index}"
    return _hashed(f"{key}/turn {turn}" if turn else key)


def joint_seed(seeds: Sequence[int]) -> int:
    """One seed of these, in their order, also in [0, 2^63)."""
    return _hashed(f"lightppo/{list(seeds)}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token of each row whose cumulated probability exceeds u · total; never one of probability 0.

    ``probs`` (B, V), whose rows need not sum to 1, and ``uniforms`` (B,) float64 in [0, 1) -> (B,) token ids, long.
    """
    if probs.shape[-1] > 2 * _BLOCK:
        return _inverse_cdf_by_blocks(probs, uniforms)
    # In float32 the tail of a large vocabulary would fall below the rounding of the sum.
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf, uniforms.unsqueeze(1) * cdf[:, -1:], right=True).squeeze(1)
    return tokens.clamp_(max=probs.shape[-1] - 1)  # only rows of NaN end beyond the vocabulary


def _inverse_cdf_by_blocks(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Finds the block by the blocks' sums, then the token in it: one pass over ``probs`` without a cumulated copy."""
    vocab_size = probs.shape[-1]
    whole = vocab_size // _BLOCK * _BLOCK
    sums = probs[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1)
    # the last may be empty: 0
    sums = torch.cat([sums, probs[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    cdf = sums.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms.unsqueeze(1) * cdf[:, -1:]  # (B, 1)
    blocks = torch.searchsorted(cdf, targets, right=True).clamp_(max=cdf.shape[1] - 1)
    before = cdf.gather(1, blocks) - sums.gather(1, blocks)
    tokens = blocks * _BLOCK + torch.arange(_BLOCK, device=probs.device)  # (B, block)
    inside = (
        probs.gather(1, tokens.clamp(max=vocab_size - 1))
        .double()
        .masked_fill_(tokens >= vocab_size, 0)
    )
    inner = inside.cumsum(dim=-1)
    # The sums above are rounded differently: the target must stay inside, else a token of probability 0 could be drawn.
    within = torch.minimum(
        (targets - before).clamp_(min=0), inner[:, -1:].nextafter(inner.new_zeros(1))
    )
    tokens = blocks * _BLOCK + torch.searchsorted(inner, within, right=True)
    return tokens.squeeze(1).clamp_(max=vocab_size - 1)


class TokenSampler:
    """Samples the next token of every row of a batch.

    Args:
        valid_vocab_size: ids from here on (which pad the model's vocabulary) are never sampled.
        log_prob_vocab_size: log probs are over so many ids, as in the trainer; None: all.
        suppressed_ids: ids that may not come before ``min_new_tokens``.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        valid_vocab_size: int,
        log_prob_vocab_size: int | None = None,
        suppressed_ids: Sequence[int] = (),
        bad_word_ids: Sequence[list[int]] = (),
    ) -> None:
        self.greedy = sampling.greedy
        self._needs_rows = torch.are_deterministic_algorithms_enabled()  # see in_any_order
        self.temperature = sampling.log_prob_temperature
        self.first_temperature = sampling.first_token_temperature or self.temperature
        self.min_new_tokens = sampling.min_new_tokens
        self.valid_vocab_size = valid_vocab_size
        self.log_prob_vocab_size = log_prob_vocab_size
        self._suppressed = torch.zeros(valid_vocab_size, dtype=torch.bool)
        self._suppressed[[i for i in suppressed_ids if i < valid_vocab_size]] = True
        completable = [ids for ids in bad_word_ids if max(ids) < valid_vocab_size]
        penalty = sampling.repetition_penalty
        self._filters = LogitsProcessorList()
        self._repetition = RepetitionPenaltyLogitsProcessor(penalty) if penalty != 1.0 else None
        self._bad_words = NoBadWordsLogitsProcessor(completable) if completable else None
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        counts = self.presence != 0 or self.frequency != 0
        self.needs_history = counts or self._repetition is not None or self._bad_words is not None
        if sampling.min_p > 0:
            self._filters.append(MinPLogitsWarper(sampling.min_p))
        if sampling.top_k > 0:
            self._filters.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._filters.append(TopPLogitsWarper(sampling.top_p))

    def __call__(
        self,
        logits: Tensor,
        uniforms: Tensor,
        step: int | Tensor,
        history: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Samples one token per row of raw ``logits`` (B, V): tokens (B,) long, and log_probs (B,) float32.

        Log probs are log softmax(logits / temperature) before every penalty and filter, and not finite where no token
        can be drawn (logits NaN or +inf, or every token banned).

        Args:
            uniforms: (B,) float64 in [0, 1); unused if greedy.
            step: number of tokens that each response already has; (B,), all >= 1, if they differ.
            history: (B, S) prompt and response so far, left padding ``NO_TOKEN``; None unless ``needs_history``.
        """
        logits = logits[:, : self.log_prob_vocab_size].float()
        scaled = logits if self.temperature == 1.0 else logits / self.temperature
        banned = self._ban(logits[:, : self.valid_vocab_size], step, history)
        if self.greedy:
            scores = banned
            tokens = scores.argmax(dim=-1)
        else:
            first = isinstance(step, int) and step == 0
            temperature = self.first_temperature if first else self.temperature
            scores = banned if temperature == 1.0 else banned / temperature
            if self._needs_rows and len(scores) == 1:
                scores = scores.expand(2, -1)
                uniforms = uniforms.expand(2)
            scores = self._filters(history, scores)
            tokens = inverse_cdf(scores.softmax(dim=-1), uniforms)[: len(logits)]
            scores = scores[: len(logits)]
        # as in training, to the last bit
        log_probs = scaled.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        return tokens, log_probs.masked_fill(scores.amax(dim=-1) == -torch.inf, torch.nan)

    def _ban(
        self,
        scores: Tensor,
        step: int | Tensor,
        history: Tensor | None,
    ) -> Tensor:
        """Penalties, bad words and minimum length, on raw logits (B, V)."""
        if self._repetition is not None:
            # Padding repeats the last id (always a real one), which is penalised once anyhow.
            seen = torch.where(history == NO_TOKEN, history[:, -1:], history)
            scores = self._repetition(seen, scores)
        if self.presence or self.frequency:
            counts = _response_counts(history, step, scores)
            scores = scores - self.frequency * counts - self.presence * (counts > 0)
        if self._bad_words is not None:
            scores = self._bad_words(history, scores)
        if self.min_new_tokens:
            self._suppressed = self._suppressed.to(scores.device)  # once
            # (B or 1, 1)
            early = torch.as_tensor(step, device=scores.device).view(-1, 1) < self.min_new_tokens
            scores = scores.masked_fill(early & self._suppressed, -torch.inf)
        return scores


def _response_counts(history: Tensor, step: int | Tensor, scores: Tensor) -> Tensor:
    """How often each id is in the response, the last ``step`` ids of ``history`` (B, S); (B, V) as ``scores``."""
    ages = torch.as_tensor(step, device=history.device).view(-1, 1)  # (B or 1, 1)
    # (B or 1, S)
    in_response = torch.arange(history.shape[1], 0, -1, device=history.device) <= ages
    in_response = in_response.expand_as(history)
    return torch.zeros_like(scores).scatter_add_(
        1, history.where(in_response, 0), in_response.to(scores.dtype)
    )


# -- ending responses -------------------------------------------------------------------------------------------------


def end_of_text_ids(tokenizer: PreTrainedTokenizerBase, generation_config: Any | None) -> list[int]:
    """The ids that end a text, from the tokenizer and from the model's generation config (an id or a list)."""
    ids = {tokenizer.eos_token_id}
    configured = getattr(generation_config, "eos_token_id", None)
    ids.update(configured if isinstance(configured, list | tuple) else [configured])
    return sorted(i for i in ids if i is not None)


def bad_word_ids(tokenizer: PreTrainedTokenizerBase, words: tuple[str, ...]) -> list[list[int]]:
    """Token sequences of bad words, at the start of a text and behind a space (as in vLLM)."""
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


class StopCriteria:
    """Tells which responses have ended, and cuts stop strings off; these count behind ``min_new_tokens`` tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        *,
        eos_ids: list[int],
        vocab_size: int,
    ) -> None:
        unknown = [i for i in sampling.stop_token_ids if i >= vocab_size]
        if unknown:
            raise ValueError(
                f"stop_token_ids {unknown} are beyond the model's vocabulary of {vocab_size} ids"
            )
        eos_ids = [] if sampling.ignore_eos else eos_ids
        self.ids = sorted({*sampling.stop_token_ids, *(i for i in eos_ids if i < vocab_size)})
        self.is_stop = torch.zeros(vocab_size, dtype=torch.bool)  # of each id
        self.is_stop[self.ids] = True
        self.strings = sampling.stop
        self._offset = sampling.min_new_tokens
        self._tokenizer = tokenizer
        # A token that is not special has at least one byte of text.
        self._tail = (
            max((len(stop_string.encode()) for stop_string in self.strings), default=0)
            + _TAIL_MARGIN
        )

    def to(self, device: torch.device) -> StopCriteria:
        self.is_stop = self.is_stop.to(device)
        return self

    def ended(self, responses: Tensor, rows: Tensor, length: int | Tensor) -> Tensor:
        """Which ``rows`` (b,) of ``responses`` (B, max_new_tokens) end with their newest token; (b,) bool.

        ``length`` counts the tokens of each row, the newest one included; (b,) if the rows differ.
        """
        ended = self.is_stop[responses[rows, length - 1]]
        if not self.strings:
            return ended
        ends = torch.as_tensor(length, device=rows.device).expand(len(rows))
        # (b, tail)
        columns = ends.unsqueeze(1) - torch.arange(self._tail, 0, -1, device=rows.device)
        ids = responses[rows.unsqueeze(1), columns.clamp(min=0)].tolist()
        # before the minimum, or before the response
        hidden = (self._offset - columns[:, 0]).clamp(min=0).tolist()
        tails = [tail[skip:] for tail, skip in zip(ids, hidden)]
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=True)
        has_string = [any(string in text for string in self.strings) for text in texts]
        return ended | torch.tensor(has_string, device=ended.device)

    def trim(self, response_ids: list[int], text: str) -> str:
        """Cuts ``text`` (the decoded ids) before the first stop string."""
        if not self.strings:
            return text
        start = len(self._tokenizer.decode(response_ids[: self._offset], skip_special_tokens=True))
        cuts = [cut for cut in (text.find(string, start) for string in self.strings) if cut >= 0]
        return text[: min(cuts)] if cuts else text
