"""KL estimators beside those of the core, in the same notation: ``lightppo.algorithms.kl``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightppo.algorithms.kl import k2, limited
from lightppo.algorithms.logprobs import log_softmax, rows_per_chunk
from lightppo.algorithms.masking import at_least_float32, require_same_shape
from lightppo.experience.experience import Experience
from lightppo.models.actor import ActionScores


def absolute(log_ratio: Tensor) -> Tensor:
    """|d|: in expectation at least the KL. As a loss, its expected gradient is the gradient of Σ_v |p - q|."""
    return log_ratio.abs()


def with_gradient_of_k2(kl: Tensor, log_ratio: Tensor, change: Tensor | None) -> Tensor:
    """Straight-through: the value is the estimate's, the gradient k2's."""
    carrier = k2(log_ratio)
    return kl.detach() + (carrier - carrier.detach())  # the bracket is an exact 0


def times_ratio(kl: Tensor, log_ratio: Tensor, change: Tensor | None) -> Tensor:
    """The estimate times π / π_old, through which it has a gradient, too."""
    return kl if change is None else kl * limited(change).exp()


# -- over the vocabulary ---------------------------------------------------------------------------------------------

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Of log p and log q, (n, V) each: the divergence (n,), and two factors (n, V) of its gradient in log p's logits."""


def mean_log_ratio(p: Tensor, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Σ p d and d; d is 0 where p is 0, so that 0 · log 0 counts as 0 instead of NaN."""
    d = (log_p - log_q).masked_fill(p == 0, 0.0)
    return (p * d).sum(-1), d


def kl_of_rows(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(p || q), a :data:`Divergence`."""
    p = log_p.exp()
    kl, d = mean_log_ratio(p, log_p, log_q)
    return kl, p, d - kl.unsqueeze(-1)


def full_kl(
    logits: Tensor,
    ref_logits: Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    divergence: Divergence = kl_of_rows,
) -> Tensor:
    """Σ_v p_v (log p_v - log q_v) with p, q = softmax(logits / temperature), (N, V) -> (N,): the exact KL.

    Its gradient is (p_v / temperature)(d_v - KL); ``ref_logits`` get none. Only one chunk of rows is in float32 at a
    time; the backward pass recomputes the distributions. p > 0 where q = 0 gives inf, and NaN gradients. Another
    ``divergence`` may stand in place of the KL.
    """
    require_same_shape(logits=logits, ref_logits=ref_logits)
    # Half the rows of a chunk of log probs: there are two distributions.
    chunk_size = rows_per_chunk(2 * logits.shape[1], chunk_size, temperature)
    return _FullKL.apply(logits, ref_logits, temperature, chunk_size, divergence)


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ref_logits: Tensor,
        temperature: float,
        chunk_size: int,
        divergence: Divergence,
    ) -> Tensor:
        kl = at_least_float32(logits.new_empty(logits.shape[0]))  # (N,)
        for start in range(0, len(logits), chunk_size):
            rows = slice(start, start + chunk_size)
            log_q = log_softmax(ref_logits[rows], temperature)
            kl[rows] = divergence(log_softmax(logits[rows], temperature), log_q)[0]
        ctx.save_for_backward(logits, ref_logits)
        ctx.temperature, ctx.chunk_size, ctx.divergence = temperature, chunk_size, divergence
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, ref_logits = ctx.saved_tensors
        gradient = torch.empty_like(logits)  # (N, V)
        for start in range(0, len(logits), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            log_q = log_softmax(ref_logits[rows], ctx.temperature)
            _, p, change = ctx.divergence(log_softmax(logits[rows], ctx.temperature), log_q)
            scale = (upstream[rows] / ctx.temperature).unsqueeze(-1)  # (n, 1)
            # Rows that the loss leaves out stay at 0 where the KL is inf or NaN.
            gradient[rows] = (scale * p * change).masked_fill(scale == 0, 0.0).to(logits.dtype)
        return gradient, None, None, None, None


def divergence_of_models(
    actor: Any,
    frozen: Any,
    scores: ActionScores,
    experience: Experience,
    divergence: Divergence = kl_of_rows,
) -> tuple[Tensor, Tensor]:
    """From a frozen model over the whole vocabulary, with gradient; and the frozen model's log probs: (B, A) each."""
    with torch.no_grad():
        other = frozen.score_actions(
            experience.sequences, experience.num_actions, experience.attention_mask, logits=True
        )
    per_token = full_kl(
        scores.logits, other.logits, actor.temperature, divergence=divergence
    )  # (K,)
    spread = torch.zeros_like(scores.log_probs).masked_scatter(scores.real, per_token)
    return spread, other.log_probs


def kl_of_models(
    actor: Any, reference: Any, scores: ActionScores, experience: Experience, clip: float | None
) -> tuple[Tensor, Tensor]:
    """``--kl_estimator full``: :func:`full_kl` from the reference, within ±clip; and the reference's log probs."""
    kl, of_reference = divergence_of_models(actor, reference, scores, experience)
    return kl if clip is None else kl.clamp(-clip, clip), of_reference
