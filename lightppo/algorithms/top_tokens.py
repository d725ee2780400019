"""Log probs of several tokens at each place: of a teacher's most likely ones, and of a student at these."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightppo.algorithms.logprobs import in_chunks, log_softmax, rows_per_chunk
from lightppo.algorithms.masking import at_least_float32, require_same_shape


@torch.no_grad()
def top_log_probs(logits: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The k largest log softmax(logits / temperature), and their ids: (N, V) -> (N, k) each, largest first."""

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
            slope = (-p * upstream[rows].sum(1, keepdim=True)).scatter_add(
                1, ids[rows], upstream[rows]
            )
            gradient[rows] = (slope / ctx.temperature).to(logits.dtype)
        return gradient, None, None, None
