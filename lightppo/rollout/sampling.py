"""How a token is drawn: random numbers, filters, log probs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightppo.rollout.engine import SamplingParams

NO_TOKEN = -1  # fills left padding in token histories: no filter takes it for a token
_BLOCK = 128  # tokens of a large vocabulary that race together
_TO_UNIT = -(2.0**-63) * (1 - 2.0**-24)  # of 1 … 2^63 to -u, above -1 in float32

# -- drawing tokens ---------------------------------------------------------------------------------------------------


@contextmanager
def in_any_order() -> Iterator[None]:
    """Lift --full_determinism, which on GPUs refuses cumulated sums of numbers.

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


def token_seeds(
    seed: int,
    prompt_index: int,
    sample_index: int,
    count: int,
) -> np.ndarray:
    """Return the seeds of one request's tokens, (count,) odd int64; a longer request begins with the same seeds."""
    return _random_words(f"lightppo/{seed}/{prompt_index}/{sample_index}", count)


def request_seed(seed: int, prompt_index: int, sample_index: int, turn: int = 0) -> int:
    """Return the seed of one request in [0, 2^63), for engines that take a seed rather than uniforms."""
    key = f"lightppo/{seed}/{prompt_index}/{sample_index}"
    return _hashed(f"{key}/turn {turn}" if turn else key)


def joint_seed(seeds: Sequence[int]) -> int:
    """Return one seed of these, in their order, also in [0, 2^63)."""
    return _hashed(f"lightppo/{list(seeds)}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def runner_factors(vocab_size: int) -> Tensor:
    """Return an odd number for each runner of :func:`draw_tokens`, (N,) int64: tokens, then blocks if there are any."""
    blocks = -(-vocab_size // _BLOCK)
    count = vocab_size if blocks == 1 else _BLOCK + blocks
    return torch.from_numpy(_random_words("lightppo/runners", count))


def draw_tokens(probs: Tensor, seeds: Tensor, factors: Tensor) -> Tensor:
    """Draw one token per row of ``probs`` (B, V), whose rows need not sum to 1, by ``seeds`` (B,): (B,) ids, long.

    Tokens race: token i arrives at E_i / prob_i, where the E_i are exponential, and the first one wins. E_i depends on
    the row's seed and on i alone, so rounding changes the winner only where two arrive together, while it shifts every
    border of a cumulated sum. Of a large vocabulary, blocks race first (by their sums), then the tokens of the winner:
    one pass over ``probs``, and few random numbers. A token of probability 0 never wins.
    """
    # Seed times factor modulo 2^64 is uniform for each runner; random factors make runners independent of each other.
    products = seeds.unsqueeze(1) * factors  # (B, N)
    # Small times decide, so u is in (0, 1) with float32's relative precision near 0: E = -log1p(-u).
    minus_times = products.bitwise_and_(2**63 - 1).float().mul_(_TO_UNIT).log1p_()
    vocab_size = probs.shape[-1]
    if vocab_size <= _BLOCK:
        return (probs / minus_times).min(dim=-1).indices
    sums = probs.unfold(1, _BLOCK, _BLOCK).sum(dim=-1)
    rest = vocab_size % _BLOCK
    if rest:
        sums = torch.cat([sums, probs[:, -rest:].sum(dim=-1, keepdim=True)], dim=1)
    blocks = (sums / minus_times[:, _BLOCK:]).min(dim=-1, keepdim=True).indices
    tokens = torch.arange(_BLOCK, device=probs.device) + blocks * _BLOCK  # (B, block)
    inside = probs.gather(1, tokens.clamp(max=vocab_size - 1))
    if rest:
        inside.masked_fill_(tokens >= vocab_size, 0)
    first = (inside / minus_times[:, :_BLOCK]).min(dim=-1, keepdim=True).indices
    return tokens.gather(1, first).squeeze(1)


def _random_words(name: str, count: int) -> np.ndarray:
    """Return odd int64, (count,): the same on every machine and version, unlike a seeded generator's."""
    return np.frombuffer(hashlib.shake_128(name.encode()).digest(8 * count), dtype="<i8") | 1


# A function (raw logits (B, V), tokens that each response has, tokens so far) -> logits (B, V);
# the second and the third are the ``step`` and ``history`` of :class:`TokenSampler`.
LogitsProcessor = Callable[[Tensor, int | Tensor, Tensor | None], Tensor]


class TokenSampler:
    """Sample the next token of every row of a batch.

    Args:
        valid_vocab_size: ids from here on (which pad the model's vocabulary) are never sampled.
        log_prob_vocab_size: log probs are over so many ids, as in the trainer; None: all.
        suppressed_ids: ids that may not come before ``min_new_tokens``.
        logits_processors: change raw logits before the temperature, in this order.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        valid_vocab_size: int,
        log_prob_vocab_size: int | None = None,
        suppressed_ids: Sequence[int] = (),
        logits_processors: Sequence[LogitsProcessor] = (),
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
        self._factors = runner_factors(valid_vocab_size)
        self._processors = logits_processors
        self.needs_history = bool(logits_processors)
        self._filters = LogitsProcessorList()
        if sampling.min_p > 0:
            self._filters.append(MinPLogitsWarper(sampling.min_p))
        if sampling.top_k > 0:
            self._filters.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._filters.append(TopPLogitsWarper(sampling.top_p))

    def __call__(
        self,
        logits: Tensor,
        seeds: Tensor,
        step: int | Tensor,
        history: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Sample one token per row of raw ``logits`` (B, V): tokens (B,) long, and log_probs (B,) float32.

        Log probs are log softmax(logits / temperature) before every penalty and filter, and not finite where no token
        can be drawn (logits NaN or +inf, or every token banned).

        Args:
            seeds: (B,) of :func:`token_seeds`; unused if greedy.
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
            scores = self._filters(history, scores)[: len(logits)]
            self._factors = self._factors.to(scores.device)  # once
            tokens = draw_tokens(scores.softmax(dim=-1), seeds, self._factors)
        # Computed as in training, so that they are equal to the last bit.
        log_probs = scaled.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        return tokens, log_probs.masked_fill(scores.amax(dim=-1) == -torch.inf, torch.nan)

    def _ban(
        self,
        scores: Tensor,
        step: int | Tensor,
        history: Tensor | None,
    ) -> Tensor:
        """Apply the processors and the minimum length to raw logits (B, V)."""
        for process in self._processors:
            scores = process(scores, step, history)
        if self.min_new_tokens:
            self._suppressed = self._suppressed.to(scores.device)  # once
            # (B or 1, 1)
            early = torch.as_tensor(step, device=scores.device).view(-1, 1) < self.min_new_tokens
            scores = scores.masked_fill(early & self._suppressed, -torch.inf)
        return scores
