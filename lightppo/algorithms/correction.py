"""Off-policy correction: constant weights for tokens that a policy other than the trained one has sampled.

The rollout engine samples with π_rollout; the trainer scores the same tokens with π_old before its first update. They
differ by kernels, precision and age. A weight w(ρ) on each token's loss, ρ = π_old / π_rollout, corrects for this
or drops tokens that are too far off; a rejection only drops. The policy loss still takes its ratio to π_old.
Notation: d = log ρ = log_probs - rollout_log_probs of a token, limited to ±20 before it is exponentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.entries import CORRECTIONS, KL_ESTIMATORS
from lightppo.algorithms.kl import k3, limited, log_ratio_of, row_mean, row_product
from lightppo.algorithms.masking import (
    AllReduceSum,
    identity,
    masked_mean,
    require_same_shape,
    zero_where_masked,
)
from lightppo.algorithms.option_values import Rejection
from lightppo.algorithms.selection import first_above_mean

CorrectionFn = Callable[..., Tensor]
"""``(log_ratio, *, action_mask, low, high)`` → weight of each token, (B, A), or (B, 1) if the tokens of a row share it.
``log_ratio`` is d (B, A) float64 within ±20, 0 at masked positions, where the weight is ignored."""


def none(log_ratio: Tensor, **_) -> Tensor:
    """1: no correction."""
    return torch.ones_like(log_ratio)


def tis(log_ratio: Tensor, *, low: float, high: float, **_) -> Tensor:
    """ρ of each token, within low (0) and high: truncated importance sampling. Biased, bounded variance; drops nothing.

    Source: Yao et al. 2025 (fengyao.notion.site/off-policy-rl), after Ionides 2008, "Truncated Importance Sampling".
    """
    return log_ratio.exp().clamp(low, high)


def seq_tis(log_ratio: Tensor, *, low: float, high: float, **_) -> Tensor:
    """Π ρ of the row, within low (0) and high, on each token: unbiased up to this; long rows drift to 0 or high.

    Source: Liu, Li et al. 2025, "When Speed Kills Stability" (richardli.xyz/rl-collapse).
    """
    return row_product(log_ratio).clamp(low, high)


def geo_tis(
    log_ratio: Tensor, *, action_mask: Tensor, low: float, high: float, agg: str = "mean"
) -> Tensor:
    """Return the geometric mean of the row's ρ, within low (0) and high where :func:`row_within` says that the row is not.

    Source: level ``sequence`` of AReaL (arXiv:2505.24298).
    """
    mean = row_mean(log_ratio, action_mask)
    within = row_within(log_ratio, action_mask, low, high, agg)
    return torch.where(within, mean, mean.clamp(low, high))


def row_within(log_ratio: Tensor, mask: Tensor, low: float, high: float, agg: str) -> Tensor:
    """Return the rows (B, 1) with a mean (geometric), product (``sum``) or largest one (``max``) of ρ in [low, high]."""
    ratio = {
        "mean": lambda: row_mean(log_ratio, mask),
        "sum": lambda: row_product(log_ratio),
        "max": lambda: log_ratio.masked_fill(~mask, -math.inf).amax(1, keepdim=True).exp(),
    }[agg]()
    return (ratio >= low) & (ratio <= high)


def icepop(log_ratio: Tensor, *, low: float, high: float, **_) -> Tensor:
    """ρ if low ≤ ρ ≤ high, else 0: IcePop of Ling Team 2025, Ring-1T (arXiv:2510.18855), with α = low and β = high.

    ``decoupled`` is the same, with bounds 0 and 5: ρ = π_prox / π_behave times the clipped loss is decoupled PPO.
    Sources: Hilton et al. 2021 (arXiv:2110.00641), §2; AReaL (arXiv:2505.24298), whose code adds the bound.
    """
    return _masked(log_ratio.exp(), low, high)


def seq_mis(log_ratio: Tensor, *, low: float, high: float, **_) -> Tensor:
    """Π ρ of the row if it is in [low, high], else 0, on each token: masked importance sampling (rl-collapse-3)."""
    return _masked(row_product(log_ratio), low, high)


def geo_mis(
    log_ratio: Tensor, *, action_mask: Tensor, low: float, high: float, agg: str = "mean"
) -> Tensor:
    """Return the geometric mean of the row's ρ if :func:`row_within`, else 0, on each token: as :func:`geo_tis`."""
    within = row_within(log_ratio, action_mask, low, high, agg)
    return torch.where(within, row_mean(log_ratio, action_mask), 0.0)


def _masked(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def seq_mask(log_ratio: Tensor, *, action_mask: Tensor, low: float, high: float, **_) -> Tensor:
    """1 if the geometric mean of the row's ρ is in [low, high], else 0: rows are dropped, not reweighted.

    Source: geometric rejection of Liu, Li et al. 2025, part 3 (richardli.xyz/rl-collapse-3).
    """
    mean = row_mean(log_ratio, action_mask)
    return ((mean >= low) & (mean <= high)).to(log_ratio.dtype)


def seq_mask_tis(log_ratio: Tensor, *, action_mask: Tensor, low: float, high: float, **_) -> Tensor:
    """ρ of each token, untruncated, in the rows that :func:`seq_mask` keeps; else 0 (``seq-mask-tis`` in OpenRLHF)."""
    return seq_mask(log_ratio, action_mask=action_mask, low=low, high=high) * log_ratio.exp()


@torch.no_grad()
def correction_weights(
    name: str,
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    action_mask: Tensor,
    *,
    low: float | None = None,
    high: float | None = None,
    veto: float | None = None,
    agg: str | None = None,
) -> Tensor:
    """Return the constant factor (B, A) on each token's loss, 0 at masked positions.

    Args:
        log_probs: (B, A), under the trainer's policy before its first update (decoupled PPO: the proximal policy).
        rollout_log_probs: (B, A), under the policy that sampled, as the engine returned them.
        low, high: bounds of the ratio; ``None``: the correction's default.
        veto: rows with a token of ρ < veto get weight 0; ``None``: no veto.
        agg: what of a row is bounded, mean, sum or max, for corrections that bound rows; ``None``: the mean.
    """
    correction = CORRECTIONS.find(name)
    mask = action_mask.bool()
    bounds = {
        "low": correction.low if low is None else low,
        "high": correction.high if high is None else high,
    }
    if agg is not None:
        bounds["agg"] = agg
    log_ratio = log_ratio_of(log_probs, rollout_log_probs, mask)
    weights = correction.fn(limited(log_ratio), action_mask=mask, **bounds)
    if veto is not None:
        mask = mask & ~(log_ratio < math.log(veto)).any(dim=1, keepdim=True)
    dtype = torch.promote_types(log_probs.dtype, rollout_log_probs.dtype)
    return torch.where(mask, weights, 0.0).to(torch.promote_types(dtype, torch.float32))


RejectionFn = Callable[..., Tensor]
"""``(values, *, action_mask, low, high, advantages, all_reduce_sum)`` → which tokens stay, (B, A) or (B, 1) bool.
``values`` (B, A) float64: what is bounded, of each token, 0 at masked positions. NaN stays, so that its loss shows."""


def of_tokens(values: Tensor, *, low: float | None, high: float | None, **_) -> Tensor:
    """Return the tokens whose value is in [low, high]."""
    outside = torch.zeros_like(values, dtype=torch.bool)
    if low is not None:
        outside = values < low
    if high is not None:
        outside = outside | (values > high)
    return ~outside


def of_sums(values: Tensor, **bounds: Any) -> Tensor:
    """Return the rows whose sum of values is within the bounds: of log ρ, the ratio of whole responses."""
    return of_tokens(values.sum(dim=1, keepdim=True), **bounds)


def of_means(values: Tensor, *, action_mask: Tensor, **bounds: Any) -> Tensor:
    """Return the rows whose mean value is within the bounds: of log ρ, the geometric mean of the ratios."""
    return of_tokens(masked_mean(values, action_mask, dim=1).unsqueeze(1), **bounds)


def of_worst_tokens(values: Tensor, *, action_mask: Tensor, **bounds: Any) -> Tensor:
    """Return the rows whose tokens are all within the bounds."""
    return (of_tokens(values, **bounds) | ~action_mask).all(dim=1, keepdim=True)


def opsm(values: Tensor, *, advantages: Tensor, **options: Any) -> Tensor:
    """Return all but tokens of A < 0 in rows whose mean log(π_rollout / π) is above high: off-policy sequence masking.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), §3.1.
    """
    return (advantages >= 0) | of_means(values, **options)


def m2po(
    values: Tensor, *, action_mask: Tensor, high: float, all_reduce_sum: AllReduceSum, **_
) -> Tensor:
    """Return the tokens of the smallest d², as many as have a mean of at most high over all ranks; equal ones together.

    ``values`` are d²/2. Source: Zheng et al. 2025 (arXiv:2510.01161), whose threshold is 0.04; AReaL.
    """
    return ~(2 * values >= first_above_mean(2 * values[action_mask], high, all_reduce_sum))


@torch.no_grad()
def rejection_mask(
    rejections: Sequence[Rejection],
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    action_mask: Tensor,
    *,
    advantages: Tensor | None = None,
    all_reduce_sum: AllReduceSum = identity,
) -> Tensor:
    """Return the trained tokens (B, A) that stay in the policy loss: those which every rejection keeps.

    A token's measure is ρ, or an estimate of KL(π_rollout ‖ π) from -d: k1 = -d, k2 = d²/2, k3 = ρ - 1 - d; or the
    other direction, k3r = 1/ρ - 1 + d. Source of measures and levels: Liu, Li et al. 2025, part 3
    (richardli.xyz/rl-collapse-3), and verl's ``rollout_rs``; k3r: ``kl_k3`` of AReaL.

    Args:
        log_probs: (B, A), of the policy before the update; of the one in training for rejections judged there.
        advantages: (B, A), as trained on; for rejections judged in training.
        all_reduce_sum: for rejections that compare all tokens of the rollout.
    """
    require_same_shape(
        log_probs=log_probs, rollout_log_probs=rollout_log_probs, action_mask=action_mask
    )
    mask = action_mask.bool()
    log_ratio = limited((log_probs.double() - rollout_log_probs.double()).masked_fill(~mask, 0.0))
    accepted = mask
    for rejection in rejections:
        measure = rejection.entry.measure
        bounds = {"low": rejection.low, "high": rejection.high}
        if measure == "ratio":  # compared as logs, which add up
            values = log_ratio
            bounds = {side: None if x is None else math.log(x) for side, x in bounds.items()}
        elif measure == "k3r":
            values = k3(log_ratio)
        else:
            values = KL_ESTIMATORS[measure].fn(-log_ratio)
        accepted = accepted & rejection.entry.fn(
            values, action_mask=mask, advantages=advantages, all_reduce_sum=all_reduce_sum, **bounds
        )
    return accepted


@torch.no_grad()
def normalize_weights(
    weights: Tensor, mask: Tensor, all_reduce_sum: AllReduceSum = identity
) -> Tensor:
    """Divide weights (B, A) by their mean over the trained tokens of all ranks, to keep the step size the same."""
    require_same_shape(weights=weights, mask=mask)
    weights = zero_where_masked(weights, mask)
    exact = weights.double()
    sums = torch.stack([exact.sum(), mask.bool().sum().double()])
    total, count = all_reduce_sum(sums).tolist()
    if total == 0:
        return weights
    return (exact * (count / total)).to(weights.dtype)
