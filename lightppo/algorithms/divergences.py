"""How far the student is from its teacher: over the vocabulary, or over the teacher's most likely tokens.

Notation: p the student, q the teacher, d = log p - log q.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from lightppo.algorithms.kl import Divergence, kl_of_rows, mean_log_ratio
from lightppo.algorithms.masking import at_least_float32, require_same_shape

REST_FLOOR = 1e-8  # least probability of the tokens beside the k, so that its log is finite


def divergence_of(beta: float) -> Divergence:
    """The generalised Jensen-Shannon divergence (1 - β) KL(p || m) + β KL(q || m) of m = (1 - β) p + β q.

    With β = 1 it is KL(p || q), with β = 0 KL(q || p). Source: GKD, Agarwal et al. 2023 (arXiv:2306.13649), eq. 1.
    """
    if beta == 1:
        return kl_of_rows
    if beta == 0:
        return reverse_kl
    return partial(jensen_shannon, beta=beta)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(q || p), a :data:`Divergence`."""
    p = log_p.exp()
    q = log_q.exp()
    return mean_log_ratio(q, log_q, log_p)[0], p - q, torch.ones_like(p)


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """The generalised divergence for 0 < β < 1, a :data:`Divergence`."""
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    p = log_p.exp()
    of_p, d = mean_log_ratio(p, log_p, log_m)
    of_q, _ = mean_log_ratio(log_q.exp(), log_q, log_m)
    return (1 - beta) * of_p + beta * of_q, (1 - beta) * p, d - of_p.unsqueeze(-1)


def top_divergence(
    log_probs: Tensor, top_log_probs: Tensor, beta: float = 1.0, tail: str = "rest"
) -> Tensor:
    """The divergence of :func:`divergence_of` over a teacher's k best tokens alone, (N, k) -> (N,).

    ``tail`` says what becomes of all other tokens:

    - ``rest``: they count as one more token, of probability 1 - Σp and 1 - Σq, at least 1e-8. The divergence is at most
      that over the vocabulary, and 0 only where both models agree on the k.
    - ``renormalise``: p and q are divided by their sums, so that how much the policy gives to the k has no gradient.
    - ``drop``: Σ q (log q - log p), for beta 0.

    Args:
        log_probs: of the policy, with a gradient; ``top_log_probs``: of the teacher.
    """
    require_same_shape(log_probs=log_probs, top_log_probs=top_log_probs)
    log_p = log_probs
    log_q = at_least_float32(top_log_probs)
    if tail == "rest":
        log_p = _with_rest(log_p)
        log_q = _with_rest(log_q)
    elif tail == "renormalise":
        log_p = log_p.log_softmax(1)
        log_q = log_q.log_softmax(1)
    # Autograd makes the gradient here, so the factors are not used.
    return divergence_of(beta)(log_p, log_q)[0]


def _with_rest(log_probs: Tensor) -> Tensor:
    """Append ln(1 - Σ e^x): (N, k) -> (N, k + 1)."""
    rest = (1 - log_probs.exp().sum(1, keepdim=True)).clamp(min=REST_FLOOR).log()
    return torch.cat([log_probs, rest], dim=1)
