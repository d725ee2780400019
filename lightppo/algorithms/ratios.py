"""Ratios of the trainer's probabilities to those of the rollout engine, which sampled the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from lightppo.algorithms.kl import k3, limited
from lightppo.algorithms.masking import masked_mean, require_same_shape


@torch.no_grad()
def mismatch_terms(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Measure how far engine and trainer are apart: float64 vectors of trained tokens (N,), or of rows that have any (R,).

    The engine samples with π_rollout; the trainer scores the same tokens with π_old before its first update. Here
    d = log ρ = log_probs - rollout_log_probs.
    """
    mask = mask.bool()
    log_ratio = log_ratio_of(log_probs, rollout_log_probs, mask)
    rows = mask.any(dim=1)
    of_tokens, within = log_ratio[mask], limited(log_ratio)  # (N,), (B, A)
    return {
        "kl": -of_tokens,  # mean: KL(π_rollout ‖ π_old), unbiased
        # e^d - d - 1; mean: the same KL, never negative (joschu.net/blog/kl-approx.html)
        "k3_kl": k3(-of_tokens),
        "logp_diff": of_tokens.abs(),
        "ratio": within[mask].exp(),  # ρ
        "ppl_ratio": 1 / row_mean(within, mask)[rows, 0],  # e^(-mean d) = ppl_old / ppl_rollout
        "seq_ratio": row_product(within)[rows, 0],  # Π ρ
    }


def log_ratio_of(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """d (B, A) in float64, where differences of float32 numbers are exact; 0 at masked positions."""
    require_same_shape(log_probs=log_probs, rollout_log_probs=rollout_log_probs, action_mask=mask)
    log_ratio = (log_probs.double() - rollout_log_probs.double()).masked_fill(~mask, 0.0)
    if broken := int(log_ratio.isnan().sum()):  # a bound would drop these tokens without a word
        raise ValueError(
            f"{broken} of {int(mask.sum())} trained tokens have a NaN log prob: of the actor or the engine"
        )
    return log_ratio


def row_product(log_ratio: Tensor) -> Tensor:
    """Π ρ over the row, (B, 1)."""
    return limited(log_ratio.sum(dim=1, keepdim=True)).exp()


def row_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Geometric mean of ρ over the row's trained tokens, (B, 1); 1 for a row without any."""
    return masked_mean(log_ratio, mask).unsqueeze(1).exp()
