"""Log probs of given tokens, and entropy, from logits: float32, in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightppo.algorithms.masking import at_least_float32

CHUNK_SIZE = 512  # tokens; at V = 150k one float32 chunk takes 300 MB


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0, chunk_size: int = CHUNK_SIZE) -> Tensor:
    """log softmax(logits / temperature) at ``labels``.

    Without gradients only one chunk of logits is ever held in float32. With gradients autograd keeps one float32 copy.

    Args:
        logits: (..., V), any float type.
        labels: (...), integer ids in [0, V).
        temperature: the sampling temperature, above 0.
        chunk_size: tokens per chunk; it does not change the result.

    Returns:
        (...), float32 (float64 for float64 logits).

    Raises:
        ValueError: shapes that do not fit, temperature or chunk_size not above 0.
    """
    _check(logits, temperature, chunk_size)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} do not fit logits {tuple(logits.shape)}")

    def gather(chunk: Tensor, ids: Tensor) -> Tensor:
        return _log_softmax(chunk, temperature).gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    return _in_chunks(gather, chunk_size, logits, labels)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0, chunk_size: int = CHUNK_SIZE) -> Tensor:
    """Entropy of softmax(logits / temperature), in nats; logits of -inf (forbidden tokens) add 0.

    Args:
        logits: (..., V), any float type.
        temperature: the sampling temperature, above 0.
        chunk_size: tokens per chunk; it does not change the result.

    Returns:
        (...), float32 (float64 for float64 logits).

    Raises:
        ValueError: temperature or chunk_size not above 0.
    """
    _check(logits, temperature, chunk_size)

    def entropy(chunk: Tensor) -> Tensor:
        log_probs = _log_softmax(chunk, temperature)
        # A finite floor keeps 0 * -inf, and its gradient, from being NaN.
        return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)

    return _in_chunks(entropy, chunk_size, logits)


def _check(logits: Tensor, temperature: float, chunk_size: int) -> None:
    if not temperature > 0:
        raise ValueError(f"--temperature must be above 0 for log probs, got {temperature}; greedy decoding has none")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if logits.dim() < 1:
        raise ValueError("logits need a vocabulary dimension")


def _log_softmax(chunk: Tensor, temperature: float) -> Tensor:
    chunk = at_least_float32(chunk)
    return torch.log_softmax(chunk if temperature == 1.0 else chunk / temperature, dim=-1)


def _in_chunks(fn: Callable[..., Tensor], chunk_size: int, logits: Tensor, *aligned: Tensor) -> Tensor:
    """Apply ``fn`` to chunks of tokens and put the results back into the leading shape of ``logits``."""
    if logits.dim() > 2 and not logits.is_contiguous():
        # A slice such as logits[:, :-1] cannot be flattened without copying it; its rows can.
        rows = zip(logits.unbind(0), *(tensor.unbind(0) for tensor in aligned))
        return torch.stack([_in_chunks(fn, chunk_size, *row) for row in rows])
    flat = logits.reshape(-1, logits.shape[-1])  # (T, V)
    # split, not slices: its backward concatenates once instead of filling a whole (T, V) gradient per chunk.
    pieces = [flat.split(chunk_size), *(tensor.reshape(-1).split(chunk_size) for tensor in aligned)]
    return torch.cat([fn(*piece) for piece in zip(*pieces)]).reshape(logits.shape[:-1])
