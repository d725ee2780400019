"""How a token is drawn (random numbers, filters, penalties, log probs), and when a response ends."""

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
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightppo.errors import ConfigError
from lightppo.models.loading import valid_vocab_size
from lightppo.rollout.engine import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TOKEN = -1  # fills left padding in token histories: no filter takes it for a token
_BLOCK = 128  # tokens of a large vocabulary that race together
_TO_UNIT = -(2.0**-63) * (1 - 2.0**-24)  # of 1 … 2^63 to -u, above -1 in float32

# -- drawing tokens ---------------------------------------------------------------------------------------------------


@contextmanager
def in_any_order() -> Iterator[None]:
    """Lift --full_determinism, which on GPUs refuses cumulated sums of numbers.

    Sums over the rows of a table are always the same there; those of a single row are not.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if was_deterministic:
        torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        if was_deterministic:
            torch.use_deterministic_algorithms(True, warn_only=warns_only)


def token_seeds(seed: int, prompt_index: int, sample_index: int, count: int) -> np.ndarray:
    """Return the seeds of one request's tokens, (count,) odd int64; a longer request begins with the same seeds."""
    return _random_words(f"lightppo/{seed}/{prompt_index}/{sample_index}", count)


def request_seed(seed: int, prompt_index: int, sample_index: int, turn: int = 0) -> int:
    """Return the seed of one request in [0, 2^63), for engines that take a seed rather than uniforms."""
    key = f"lightppo/{seed}/{prompt_index}/{sample_index}"
    return _hashed(f"{key}/turn {turn}" if turn else key)


def joint_seed(seeds: Sequence[int]) -> int:
    """Return one seed of these, in their order, also in [0, 2^63)."""
    return _hashed(f"lightppo/{list(seeds)}")


def _hashed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


def runner_factors(vocab_size: int) -> Tensor:
    """Return an odd number for each runner of :func:`draw_tokens`, (N,) int64: tokens, then blocks if there are any."""
    block_count = -(-vocab_size // _BLOCK)
    count = vocab_size if block_count == 1 else _BLOCK + block_count
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
    block_sums = probs.unfold(1, _BLOCK, _BLOCK).sum(dim=-1)
    remainder = vocab_size % _BLOCK
    if remainder:
        block_sums = torch.cat([block_sums, probs[:, -remainder:].sum(dim=-1, keepdim=True)], dim=1)
    winning_blocks = (block_sums / minus_times[:, _BLOCK:]).min(dim=-1, keepdim=True).indices
    tokens = torch.arange(_BLOCK, device=probs.device) + winning_blocks * _BLOCK  # (B, block)
    block_probs = probs.gather(1, tokens.clamp(max=vocab_size - 1))
    if remainder:
        block_probs.masked_fill_(tokens >= vocab_size, 0)
    winners = (block_probs / minus_times[:, :_BLOCK]).min(dim=-1, keepdim=True).indices
    return tokens.gather(1, winners).squeeze(1)


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
        self, logits: Tensor, seeds: Tensor, step: int | Tensor, history: Tensor | None
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
        scaled_logits = logits if self.temperature == 1.0 else logits / self.temperature
        scores = logits[:, : self.valid_vocab_size]
        for process in self._processors:
            scores = process(scores, step, history)
        if self.min_new_tokens:
            self._suppressed = self._suppressed.to(scores.device)  # once
            # (B or 1, 1)
            is_early = torch.as_tensor(step, device=scores.device).view(-1, 1) < self.min_new_tokens
            scores = scores.masked_fill(is_early & self._suppressed, -torch.inf)
        if self.greedy:
            tokens = scores.argmax(dim=-1)
        else:
            is_first_token = isinstance(step, int) and step == 0
            temperature = self.first_temperature if is_first_token else self.temperature
            if temperature != 1.0:
                scores = scores / temperature
            if self._needs_rows and len(scores) == 1:
                scores = scores.expand(2, -1)
            scores = self._filters(history, scores)[: len(logits)]
            self._factors = self._factors.to(scores.device)  # once
            tokens = draw_tokens(scores.softmax(dim=-1), seeds, self._factors)
        # Computed as in training, so that they are equal to the last bit.
        log_probs = scaled_logits.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        return tokens, log_probs.masked_fill(scores.amax(dim=-1) == -torch.inf, torch.nan)


# -- the end of a response: at ids and at strings ---------------------------------------------------------------------

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
    special_tokens = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids))
    for i, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special_tokens[token.content] = i
    for string in strings:
        inner_tokens = [token for token in special_tokens if token in string]
        if inner_tokens and string not in special_tokens:
            raise ValueError(
                f"stop {string!r} has the special token {inner_tokens[0]!r}, which texts leave out, and more: give the "
                "token alone, or text without it"
            )
    return (
        tuple(string for string in strings if string not in special_tokens),
        [special_tokens[string] for string in strings if string in special_tokens],
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
        self.strings: tuple[str, ...] = ()
        special_ids: list[int] = []
        if sampling.stop:
            self.strings, special_ids = split_stops(tokenizer, sampling.stop)
        stop_ids = (*sampling.stop_token_ids, *special_ids)
        unknown_ids = [i for i in stop_ids if i >= vocab_size]
        if unknown_ids:
            raise ValueError(
                f"stop_token_ids {unknown_ids} are beyond the model's vocabulary of {vocab_size} ids"
            )
        eos_ids = [] if sampling.ignore_eos else eos_ids
        self.ids = sorted({*stop_ids, *(i for i in eos_ids if i < vocab_size)})
        self.is_stop = torch.zeros(vocab_size, dtype=torch.bool)  # of each id
        self.is_stop[self.ids] = True
        self._offset = sampling.min_new_tokens
        self._tokenizer = tokenizer
        # A token that is not special has at least one byte of text.
        longest_string = max((len(string.encode()) for string in self.strings), default=0)
        self._tail = longest_string + _TAIL_MARGIN

    def ended(self, responses: Tensor, rows: Tensor, length: int | Tensor) -> Tensor:
        """Return which ``rows`` (b,) of ``responses`` (B, max_new_tokens) end with their newest token; (b,) bool.

        ``length`` counts the tokens of each row, the newest one included; (b,) if the rows differ.
        """
        ended = self.is_stop[responses[rows, length - 1]]
        if self.strings:
            ended = ended | self._have_strings(responses, rows, length)
        return ended

    def _have_strings(self, responses: Tensor, rows: Tensor, length: int | Tensor) -> Tensor:
        """Return which rows have a stop string in the text of their last tokens."""
        end_positions = torch.as_tensor(length, device=rows.device).expand(len(rows))
        # (b, tail)
        columns = end_positions.unsqueeze(1) - torch.arange(self._tail, 0, -1, device=rows.device)
        ids = responses[rows.unsqueeze(1), columns.clamp(min=0)].tolist()
        # How many ids of each tail do not count: those before the minimum length, or before the response.
        hidden_counts = (self._offset - columns[:, 0]).clamp(min=0).tolist()
        tail_ids = [row_ids[hidden_count:] for row_ids, hidden_count in zip(ids, hidden_counts)]
        tail_texts = self._tokenizer.batch_decode(tail_ids, skip_special_tokens=True)
        has_string = [
            any(string in tail_text for string in self.strings) for tail_text in tail_texts
        ]
        return torch.tensor(has_string, device=rows.device)

    def trim(self, response_ids: list[int], text: str) -> str:
        """Cut ``text``, the decoded ids, before the first stop string."""
        search_start = len(
            self._tokenizer.decode(response_ids[: self._offset], skip_special_tokens=True)
        )
        cut_positions = [
            cut_position
            for cut_position in (text.find(string, search_start) for string in self.strings)
            if cut_position >= 0
        ]
        return text[: min(cut_positions)] if cut_positions else text


# -- penalties of tokens that are there already, and words that are never completed -----------------------------------


def penalties_of(
    sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> Penalties | None:
    """Return the processor of logits that ``sampling`` needs; None: it changes none."""
    word_ids = bad_word_ids(tokenizer, sampling.bad_words) if sampling.bad_words else []
    completable = [ids for ids in word_ids if max(ids) < vocab_size]
    counts_tokens = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    if not counts_tokens and not completable and sampling.repetition_penalty == 1.0:
        return None
    return Penalties(sampling, completable)


class Penalties:
    """Change raw logits as ``sampling`` says; ``bad_words`` are sequences of ids."""

    def __init__(self, sampling: SamplingParams, bad_words: Sequence[list[int]]) -> None:
        penalty = sampling.repetition_penalty
        self.repetition = None
        if penalty != 1.0:
            self.repetition = RepetitionPenaltyLogitsProcessor(penalty)
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        self.bad_words = NoBadWordsLogitsProcessor(bad_words) if bad_words else None

    def __call__(self, logits: Tensor, step: int | Tensor, history: Any) -> Tensor:
        """Return logits (B, V); ``step`` and ``history`` as of :class:`lightppo.rollout.sampling.TokenSampler`."""
        if self.repetition is not None:
            # Padding repeats the last id (always a real one), which is penalised once anyhow.
            seen_ids = torch.where(history == NO_TOKEN, history[:, -1:], history)
            logits = self.repetition(seen_ids, logits)
        if self.presence or self.frequency:
            token_counts = _response_counts(history, step, logits)
            logits = logits - self.frequency * token_counts - self.presence * (token_counts > 0)
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
        plain_ids, spaced_ids = (
            tokenizer.encode(prefix + word.strip(), add_special_tokens=False)
            for prefix in ("", " ")
        )
        if not plain_ids or tokenizer.unk_token_id in plain_ids:
            raise ValueError(
                f"bad_words: the tokenizer has no tokens for {word!r} (got ids {plain_ids}); remove it"
            )
        sequences.append(plain_ids)
        if len(spaced_ids) == len(plain_ids) and spaced_ids[0] != plain_ids[0]:
            sequences.append(spaced_ids)
    return sequences


def check_sampled_tokens(building: Any) -> None:
    """Refuse ids and words that no sampled answer can have."""
    options = building.config.flat()
    vocab_size = valid_vocab_size(building.tokenizer)
    if unknown_ids := [i for i in options.get("stop_token_ids", ()) if i >= vocab_size]:
        raise ConfigError(
            f"--stop_token_ids {' '.join(map(str, unknown_ids))}: the tokenizer has no such id, its largest is "
            f"{vocab_size - 1}: leave it out, or give the text to --stop"
        )
    try:
        bad_word_ids(building.tokenizer, options.get("bad_words", ()))
        if stops := options.get("stop"):
            split_stops(building.tokenizer, stops)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
