"""How far the rollout engine, which samples, and the trainer are apart, and summaries of many numbers.

The engine samples with π_rollout; the trainer scores the same tokens with π_old before its first update.
Notation: d = log ρ = log_probs - rollout_log_probs of a token, limited to ±20 before it is exponentiated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightppo.algorithms.kl import k3, limited
from lightppo.algorithms.masking import masked_mean, require_same_shape


@torch.no_grad()
def mismatch_terms(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far engine and trainer are apart: float64 vectors of trained tokens (N,), or of rows that have any (R,)."""
    mask = mask.bool()
    log_ratio = log_ratio_of(log_probs, rollout_log_probs, mask)
    rows = mask.any(dim=1)
    d, within = log_ratio[mask], limited(log_ratio)  # (N,), (B, A)
    return {
        "kl": -d,  # mean: KL(π_rollout ‖ π_old), unbiased
        # e^d - d - 1; mean: the same KL, never negative (joschu.net/blog/kl-approx.html)
        "k3_kl": k3(-d),
        "logp_diff": d.abs(),
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


@dataclass
class Summary:
    """Count, sum, sum of squares, minimum and maximum of numbers; can be merged over ranks."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Tensor) -> Summary:
        """Summary of all entries of a tensor; NaN marks a missing number and is skipped."""
        values = values.double()
        values = values[~values.isnan()]
        if values.numel() == 0:
            return cls()
        sums = torch.stack([values.sum(), values.square().sum(), values.min(), values.max()])
        return cls(values.numel(), *sums.tolist())

    def __add__(self, other: Summary) -> Summary:
        return Summary(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def variance(self) -> float:
        """Biased."""
        return max(0.0, self.squares / self.count - self.mean**2) if self.count else math.nan


def chi_square(ratios: Summary) -> float:
    """E[ρ²] - 1, the χ² divergence of π_old from π_rollout, from the ratios of tokens that π_rollout sampled."""
    return ratios.squares / ratios.count - 1 if ratios.count else math.nan


def effective_share(weights: Summary) -> float:
    """(Σw)² / (n·Σw²): Kish's effective sample size (1965) as a share of the n samples; 1 if all weigh the same."""
    if not weights.count:
        return math.nan
    return weights.total**2 / (weights.count * weights.squares) if weights.squares else 0.0


def mismatch_metrics(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """The metrics, from a summary over all ranks of each vector of :func:`mismatch_terms`."""
    tokens, rows, difference = summaries["ratio"], summaries["seq_ratio"], summaries["logp_diff"]
    return {
        "kl": summaries["kl"].mean,
        "k3_kl": summaries["k3_kl"].mean,
        "logp_diff_max": difference.high if difference.count else math.nan,
        "ppl_ratio": summaries["ppl_ratio"].mean,
        "chi2_token": chi_square(tokens),
        "chi2_seq": chi_square(rows),
        "ess_token": effective_share(tokens),
        "ess_seq": effective_share(rows),
    }
