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
    _check_labels(logits, labels)

    def gather(chunk: Tensor, ids: Tensor) -> Tensor:
        return _gather(_log_softmax(chunk, temperature), ids)

    return _in_chunks(gather, chunk_size, logits, labels)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0, chunk_size: int | None = None) -> Tensor:
    """Entropy of softmax(logits / temperature), in nats; logits of -inf (forbidden tokens) add 0.

    Memory as :func:`token_log_probs`.

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
        return _Entropy.apply(_log_softmax(chunk, temperature))

    return _in_chunks(entropy, chunk_size, logits)


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`token_log_probs` and :func:`entropy_from_logits` from one log softmax per chunk; the same numbers.

    Args:
        logits: (..., V), any float type.
        labels: (...), integer ids in [0, V).
        temperature: the sampling temperature, above 0.
        chunk_size: tokens per chunk, ``None`` = ``CHUNK_ELEMENTS`` / V; it does not change the result.
        entropy_grad: False: the entropy is detached. Either way autograd keeps no more than for the log probs alone,
            one float32 copy of the logits.

    Returns:
        log probs (...) and entropy (...), float32 (float64 for float64 logits).

    Raises:
        ValueError: shapes that do not fit, temperature or chunk_size not above 0.
    """
    chunk_size = _checked_chunk_size(logits, temperature, chunk_size)
    _check_labels(logits, labels)

    def both(chunk: Tensor, ids: Tensor) -> Tensor:
        log_probs = _log_softmax(chunk, temperature)
        entropy = _Entropy.apply(log_probs if entropy_grad else log_probs.detach())
        return torch.stack([_gather(log_probs, ids), entropy], dim=-1)

    log_probs, entropy = (x.contiguous() for x in _in_chunks(both, chunk_size, logits, labels).unbind(-1))
    return log_probs, entropy if entropy_grad else entropy.detach()


def _check_labels(logits: Tensor, labels: Tensor) -> None:
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} do not fit logits {tuple(logits.shape)}")


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


def _gather(log_probs: Tensor, ids: Tensor) -> Tensor:
    return log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


class _Entropy(torch.autograd.Function):
    """-Σ e^x·x of log probs x (..., V); its gradient -e^x·(x + 1) needs x alone, which log_softmax keeps anyway.

    By plain autograd the exponential and the product would be kept too, each as large as the logits in float32.
    """

    @staticmethod
    def forward(ctx, log_probs: Tensor) -> Tensor:
        ctx.save_for_backward(log_probs)
        return -(log_probs.exp() * _finite(log_probs)).sum(-1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (log_probs,) = ctx.saved_tensors
        return -grad.unsqueeze(-1) * (log_probs.exp() * (_finite(log_probs) + 1))


def _finite(log_probs: Tensor) -> Tensor:
    """A floor that keeps 0 * -inf of a forbidden token from being NaN."""
    return log_probs.clamp(min=torch.finfo(log_probs.dtype).min)


def _in_chunks(fn: Callable[..., Tensor], chunk_size: int, logits: Tensor, *aligned: Tensor) -> Tensor:
    """Apply ``fn`` to chunks of at most ``chunk_size`` tokens; the result's leading shape is that of ``logits``."""
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
