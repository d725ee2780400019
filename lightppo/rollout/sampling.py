"""How a token is drawn (random numbers, filters, log probs), and when a response ends (ids and strings)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightppo.plugin import KERNELS
from lightppo.rollout.engine import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TOKEN = -1  # fills left padding in token histories: no filter takes it for a token

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


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token of each row whose cumulated probability exceeds u · total; never one of probability 0.

    ``probs`` (B, V), whose rows need not sum to 1, and ``uniforms`` (B,) float64 in [0, 1) -> (B,) token ids, long.
    """
    # In float32 the tail of a large vocabulary would fall below the rounding of the sum.
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf, uniforms.unsqueeze(1) * cdf[:, -1:], right=True).squeeze(1)
    return tokens.clamp_(max=probs.shape[-1] - 1)  # only rows of NaN end beyond the vocabulary


# of raw logits (B, V), the number of tokens that each response has, and the tokens so far
LogitsChange = Callable[[Tensor, int | Tensor, Tensor | None], Tensor]


class TokenSampler:
    """Samples the next token of every row of a batch.

    Args:
        valid_vocab_size: ids from here on (which pad the model's vocabulary) are never sampled.
        log_prob_vocab_size: log probs are over so many ids, as in the trainer; None: all.
        suppressed_ids: ids that may not come before ``min_new_tokens``.
        changes: of raw logits, see ``lightppo.plugin.LOGITS``.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        valid_vocab_size: int,
        log_prob_vocab_size: int | None = None,
        suppressed_ids: Sequence[int] = (),
        changes: Sequence[LogitsChange] = (),
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
        self._changes = changes
        self.needs_history = bool(changes)
        self._draw = KERNELS["draw"].fn
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
            tokens = self._draw(scores.softmax(dim=-1), uniforms)[: len(logits)]
            scores = scores[: len(logits)]
        # Computed as in training, so that they are equal to the last bit.
        log_probs = scaled.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        return tokens, log_probs.masked_fill(scores.amax(dim=-1) == -torch.inf, torch.nan)

    def _ban(
        self,
        scores: Tensor,
        step: int | Tensor,
        history: Tensor | None,
    ) -> Tensor:
        """The changes of raw logits (B, V), and the minimum length."""
        for change in self._changes:
            scores = change(scores, step, history)
        if self.min_new_tokens:
            self._suppressed = self._suppressed.to(scores.device)  # once
            # (B or 1, 1)
            early = torch.as_tensor(step, device=scores.device).view(-1, 1) < self.min_new_tokens
            scores = scores.masked_fill(early & self._suppressed, -torch.inf)
        return scores


# -- ending responses -------------------------------------------------------------------------------------------------


def end_of_text_ids(tokenizer: PreTrainedTokenizerBase, generation_config: Any | None) -> list[int]:
    """The ids that end a text, from the tokenizer and from the model's generation config (an id or a list)."""
    ids = {tokenizer.eos_token_id}
    configured = getattr(generation_config, "eos_token_id", None)
    ids.update(configured if isinstance(configured, list | tuple) else [configured])
    return sorted(i for i in ids if i is not None)


class StopCriteria:
    """Tells which responses have ended. A subclass, see ``lightppo.plugin.STOPS``, may know more than ids."""

    strings: tuple[str, ...] = ()  # that end a response, beside ids

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

    def to(self, device: torch.device) -> StopCriteria:
        self.is_stop = self.is_stop.to(device)
        return self

    def ended(self, responses: Tensor, rows: Tensor, length: int | Tensor) -> Tensor:
        """Which ``rows`` (b,) of ``responses`` (B, max_new_tokens) end with their newest token; (b,) bool.

        ``length`` counts the tokens of each row, the newest one included; (b,) if the rows differ.
        """
        return self.is_stop[responses[rows, length - 1]]

    def trim(self, response_ids: list[int], text: str) -> str:
        """The text of a response, of the decoded ids."""
        return text
