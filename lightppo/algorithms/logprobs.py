"""Log probs of given tokens, and entropy, from logits: float32, in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightppo.algorithms.masking import at_least_float32

CHUNK_ELEMENTS = 1 << 26  # of a float32 chunk: 256 MB, whatever the vocabulary


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0, chunk_size: int | None = None) -> Tensor:
    """log softmax(logits / temperature) at ``labels``.

    Without gradients only one chunk of logits is ever held in float32. With gradients autograd keeps one float32 copy.

    Args:
        logits: (..., V), any float type.
        labels: (...), integer ids in [0, V).
        temperature: the sampling temperature, above 0.
        chunk_size: tokens per chunk, ``None`` = ``CHUNK_ELEMENTS`` / V; it does not change the result.

    Returns:
        (...), float32 (float64 for float64 logits).

    Raises:
        ValueError: shapes that do not fit, temperature or chunk_size not above 0.
    """
    chunk_size = _checked_chunk_size(logits, temperature, chunk_size)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} do not fit logits {tuple(logits.shape)}")

    def gather(chunk: Tensor, ids: Tensor) -> Tensor:
        return _log_softmax(chunk, temperature).gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    return _in_chunks(gather, chunk_size, logits, labels)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0, chunk_size: int | None = None) -> Tensor:
    """Entropy of softmax(logits / temperature), in nats; logits of -inf (forbidden tokens) add 0.

    Args:
        logits: (..., V), any float type.
        temperature: the sampling temperature, above 0.
        chunk_size: tokens per chunk, ``None`` = ``CHUNK_ELEMENTS`` / V; it does not change the result.

    Returns:
        (...), float32 (float64 for float64 logits).

    Raises:
        ValueError: temperature or chunk_size not above 0.
    """
    chunk_size = _checked_chunk_size(logits, temperature, chunk_size)

    def entropy(chunk: Tensor) -> Tensor:
        log_probs = _log_softmax(chunk, temperature)
        # A finite floor keeps 0 * -inf, and its gradient, from being NaN.
        return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)

    return _in_chunks(entropy, chunk_size, logits)


def _checked_chunk_size(logits: Tensor, temperature: float, chunk_size: int | None) -> int:
    if not temperature > 0:
        raise ValueError(f"--temperature must be above 0 for log probs, got {temperature}; greedy decoding has none")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if logits.dim() < 1:
        raise ValueError("logits need a vocabulary dimension")
    return chunk_size or max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))


def _log_softmax(chunk: Tensor, temperature: float) -> Tensor:
    chunk = at_least_float32(chunk)
    return torch.log_softmax(chunk if temperature == 1.0 else chunk / temperature, dim=-1)


def _in_chunks(fn: Callable[..., Tensor], chunk_size: int, logits: Tensor, *aligned: Tensor) -> Tensor:
    """Apply ``fn`` to chunks of at most ``chunk_size`` tokens; the result has the leading shape of ``logits``."""
    shape = logits.shape[:-1]
    if shape.numel() <= chunk_size:
        return fn(logits, *aligned)
    # Along the first dimension nothing is copied, whatever the strides (logits[:, :-1] cannot be flattened for free).
    # split, not slices: its backward concatenates once instead of filling a whole gradient per chunk.
    per_row = shape[1:].numel()
    group = max(1, chunk_size // per_row)
    parts = zip(logits.split(group), *(tensor.split(group) for tensor in aligned))
    if per_row <= chunk_size:
        return torch.cat([fn(*part) for part in parts])
    return torch.stack([_in_chunks(fn, chunk_size, *(tensor.squeeze(0) for tensor in part)) for part in parts])
