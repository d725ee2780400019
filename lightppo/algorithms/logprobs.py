"""Log probs and entropy, from logits chunk by chunk.

Softmax, sums and results are in float32 (float64 for float64 input). V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightppo.algorithms.masking import at_least_float32, require_same_shape

CHUNK_ELEMENTS = 1 << 26  # numbers in a float32 chunk: 256 MB, whatever the vocabulary
# products of the head are multiples of this wide: a GPU takes far longer where rows begin at odd
# addresses
EVEN = 128


def rows_per_chunk(vocab_size: int, chunk_size: int | None, temperature: float) -> int:
    """Return ``chunk_size``, or for ``None`` how many rows make up ``CHUNK_ELEMENTS`` numbers, a multiple of ``EVEN``."""
    if not temperature > 0:
        raise ValueError(
            f"--temperature must be above 0 for log probs, got {temperature}; greedy decoding has none"
        )
    return chunk_size or max(1, evened(CHUNK_ELEMENTS // max(1, vocab_size)))


def evened(count: int) -> int:
    """Round down to a multiple of ``EVEN``; fewer stay as they are."""
    return count - count % EVEN if count > EVEN else count


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = at_least_float32(logits)
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def token_log_probs(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, chunk_size: int | None = None
) -> Tensor:
    """log softmax(logits / temperature) at ``labels``: logits (..., V) of any float type, labels (...) in [0, V).

    Without gradients only one chunk is in float32 at a time; ``chunk_size``, in tokens, does not change the result.
    """

    def at_labels(chunk: Tensor, ids: Tensor) -> Tensor:
        return gather(log_softmax(chunk, temperature), ids)

    check_labels(logits, labels)
    return in_chunks(
        at_labels, rows_per_chunk(logits.shape[-1], chunk_size, temperature), logits, labels
    )


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`token_log_probs`, and the entropy of the same distribution in nats: (...) each, one softmax per chunk."""

    def both(chunk: Tensor, ids: Tensor) -> Tensor:
        log_probs = log_softmax(chunk, temperature)
        entropy = _Entropy.apply(log_probs if entropy_grad else log_probs.detach())
        return torch.stack([gather(log_probs, ids), entropy], dim=-1)

    check_labels(logits, labels)
    chunk_size = rows_per_chunk(logits.shape[-1], chunk_size, temperature)
    log_probs, entropy = in_chunks(both, chunk_size, logits, labels).unbind(-1)
    entropy = entropy.contiguous()
    return log_probs.contiguous(), entropy if entropy_grad else entropy.detach()


@torch.no_grad()
def score_norms(logits: Tensor, log_probs: Tensor, temperature: float = 1.0) -> Tensor:
    """1 - 2π_y + Σ_v π_v², (N, V) and (N,) -> (N,): ‖∂ log π_y / ∂z‖² of a token y for z = logits / temperature."""

    def collision(chunk: Tensor) -> Tensor:
        return (2 * log_softmax(chunk, temperature)).exp().sum(-1)

    squares = in_chunks(collision, rows_per_chunk(logits.shape[-1], None, temperature), logits)
    return (1 - 2 * log_probs.exp() + squares).clamp(min=0.0)


def check_labels(logits: Tensor, labels: Tensor) -> None:
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have one entry per row of {tuple(logits.shape)}"
        )


def gather(log_probs: Tensor, ids: Tensor) -> Tensor:
    return log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


class _Entropy(torch.autograd.Function):
    """-Σ e^x·x of log probs x (..., V); its gradient -e^x·(x + 1) needs only x, which log_softmax keeps anyway."""

    @staticmethod
    def forward(ctx, log_probs: Tensor) -> Tensor:
        ctx.save_for_backward(log_probs)
        return -(log_probs.exp() * log_probs.clamp(min=lowest(log_probs))).sum(-1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (log_probs,) = ctx.saved_tensors
        slope = log_probs.exp() * (log_probs.clamp(min=lowest(log_probs)) + 1)
        return -grad.unsqueeze(-1) * slope


def lowest(log_probs: Tensor) -> float:
    """Return a floor that prevents 0 · -inf = NaN for a forbidden token."""
    return torch.finfo(log_probs.dtype).min


def in_chunks(
    function: Callable[..., Tensor], chunk_size: int, logits: Tensor, *aligned: Tensor
) -> Tensor:
    """Apply it to chunks of at most ``chunk_size`` tokens; the result has the leading shape of ``logits``."""
    shape = logits.shape[:-1]
    if shape.numel() <= chunk_size:
        return function(logits, *aligned)
    # Along the first dimension nothing is copied, whatever the strides (logits[:, :-1] cannot be flattened for free).
    # split, not slices: its backward concatenates once instead of filling a whole gradient per chunk.
    row_tokens = shape[1:].numel()
    chunk_rows = max(1, chunk_size // row_tokens)
    chunks = zip(*(tensor.split(chunk_rows) for tensor in (logits, *aligned)))
    if row_tokens <= chunk_size:
        return torch.cat([function(*chunk) for chunk in chunks])
    rows = ([tensor.squeeze(0) for tensor in chunk] for chunk in chunks)
    return torch.stack([in_chunks(function, chunk_size, *row) for row in rows])


# -- several tokens at each place -------------------------------------------------------------------------------------


@torch.no_grad()
def top_log_probs(logits: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the k largest log softmax(logits / temperature), and their ids: (N, V) -> (N, k) each, largest first."""

    def largest(chunk: Tensor) -> Tensor:
        values, ids = log_softmax(chunk, temperature).topk(k)
        return torch.stack([values, ids.to(values.dtype)], dim=-1)

    chunk_size = rows_per_chunk(logits.shape[-1], None, temperature)
    values, ids = in_chunks(largest, chunk_size, logits).unbind(-1)
    return values, ids.long()


def log_probs_at(
    logits: Tensor, ids: Tensor, temperature: float = 1.0, chunk_size: int | None = None
) -> Tensor:
    """log softmax(logits / temperature) at several ids: (N, V), (N, k) -> (N, k).

    Only one chunk of rows is in float32 at a time; the backward pass computes the softmax again.
    """
    require_same_shape(logits=logits[:, :0], ids=ids[:, :0])
    chunk_size = rows_per_chunk(logits.shape[1], chunk_size, temperature)
    return _LogProbsAt.apply(logits, ids, temperature, chunk_size)


class _LogProbsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor, temperature: float, chunk_size: int) -> Tensor:
        ctx.save_for_backward(logits, ids)
        ctx.temperature = temperature
        ctx.chunk_size = chunk_size
        log_probs = at_least_float32(logits.new_empty(ids.shape))
        for start in range(0, len(logits), chunk_size):
            rows = slice(start, start + chunk_size)
            log_probs[rows] = log_softmax(logits[rows], temperature).gather(1, ids[rows])
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        logits, ids = ctx.saved_tensors
        gradient = torch.empty_like(logits)  # (N, V)
        for start in range(0, len(logits), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            p = log_softmax(logits[rows], ctx.temperature).exp()
            slope = -p * upstream[rows].sum(1, keepdim=True)
            slope = slope.scatter_add(1, ids[rows], upstream[rows])
            gradient[rows] = (slope / ctx.temperature).to(logits.dtype)
        return gradient, None, None, None
