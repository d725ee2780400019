"""Which tokens of a rollout an algorithm singles out, over all ranks.

Tensors are 1-d and hold this rank's N trained tokens; ΣN counts all ranks'. Every rank must call these functions, even
without tokens. The choice depends neither on the tokens' order nor on their ranks: random numbers that belong to the
tokens break ties.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

import torch
from torch import Tensor

from lightppo.algorithms.masking import AllReduceSum, at_least_float32, identity, require_same_shape


@torch.no_grad()
def top_share(values: Tensor, ratio: float, all_reduce_sum: AllReduceSum = identity) -> Tensor:
    """(N,) bool: the ceil(ratio·ΣN) largest values over all ranks, and all values equal to the smallest of them."""
    if (total := _rankable(values, all_reduce_sum)) == 0:  # the same on every rank
        return torch.zeros_like(values, dtype=torch.bool)
    # rounded, because 0.07 · 100 is 7.000000000000001
    return values >= _kth_largest(
        values, max(1, math.ceil(round(ratio * total, 6))), all_reduce_sum
    )


@torch.no_grad()
def first_above_mean(values: Tensor, most: float, all_reduce_sum: AllReduceSum = identity) -> float:
    """The smallest number ≥ 0 of all ranks up to which, itself included, the mean is above ``most``; inf: none is."""
    values = values[~values.isnan()].double()
    keys = values.view(torch.int64)  # whole numbers in the order of the values

    def is_above(key: int) -> bool:
        inside = values[keys <= key]
        count, total = all_reduce_sum(
            torch.stack([inside.new_tensor(len(inside)), inside.sum()])
        ).tolist()
        return total > most * count

    infinite = 0x7FF << 52  # the key of inf
    return torch.tensor(bisect_left(range(infinite), True, key=is_above)).view(torch.float64).item()


@torch.no_grad()
def select_clip_cov(
    log_probs: Tensor,
    advantages: Tensor,
    uniforms: Tensor,
    *,
    options: Mapping[str, float],
    all_reduce_sum: AllReduceSum = identity,
) -> Tensor:
    """max(1, ⌊clip_cov_ratio·ΣN⌋) random tokens (or fewer) with clip_cov_low < covariance < clip_cov_high.

    Source: Cui et al. 2025 (arXiv:2505.22617), Clip-Cov, and its code for the rounding.
    """
    covariances = covariance(log_probs, advantages, all_reduce_sum)
    candidate = (covariances > options["clip_cov_low"]) & (covariances < options["clip_cov_high"])
    count = _floor_share(options["clip_cov_ratio"], _total(log_probs, all_reduce_sum))
    chosen = torch.zeros_like(candidate)
    chosen[candidate] = _first(-uniforms[candidate], covariances[candidate], count, all_reduce_sum)
    return chosen


@torch.no_grad()
def select_kl_cov(
    log_probs: Tensor,
    advantages: Tensor,
    uniforms: Tensor,
    *,
    options: Mapping[str, float],
    all_reduce_sum: AllReduceSum = identity,
) -> Tensor:
    """The max(1, ⌊kl_cov_ratio·ΣN⌋) tokens of the largest covariance (KL-Cov of the same paper)."""
    covariances = covariance(log_probs, advantages, all_reduce_sum)
    count = _floor_share(options["kl_cov_ratio"], _total(log_probs, all_reduce_sum))
    return _first(covariances, -uniforms, count, all_reduce_sum)


@torch.no_grad()
def covariance(
    log_probs: Tensor, advantages: Tensor, all_reduce_sum: AllReduceSum = identity
) -> Tensor:
    """(log_prob - mean)·(advantage - mean) of each token (N,), over all ranks; high values make the entropy fall.

    In float64, so that the number of ranks does not change the rounding. Source: Cui et al. 2025 (arXiv:2505.22617).
    """
    require_same_shape(log_probs=log_probs, advantages=advantages)
    exact_log_probs = log_probs.double()
    exact_advantages = advantages.double()
    sums = all_reduce_sum(torch.stack([exact_log_probs.sum(), exact_advantages.sum()]))
    if not sums.isfinite().all():  # the same on every rank
        raise ValueError(
            f"log probs or advantages are not finite: their sums over all ranks are {sums.tolist()}"
        )
    means = sums / max(1, _total(log_probs, all_reduce_sum))
    product = (exact_log_probs - means[0]) * (exact_advantages - means[1])
    return product.to(at_least_float32(log_probs).dtype)


def _total(tokens: Tensor, all_reduce_sum: AllReduceSum) -> int:
    return int(
        all_reduce_sum(torch.tensor(tokens.numel(), dtype=torch.float64, device=tokens.device))
    )


def _floor_share(ratio: float, total: int) -> int:
    # rounded, because 0.29 · 100 is 28.999999999999996
    return max(1, math.floor(round(ratio * total, 6)))


def _rankable(values: Tensor, all_reduce_sum: AllReduceSum) -> int:
    """ΣN; refuses NaN on every rank at once, so that no rank is left waiting in a collective."""
    counts = torch.stack(
        [values.new_tensor(values.numel(), dtype=torch.float64), values.isnan().sum().double()]
    )
    total, missing = map(int, all_reduce_sum(counts).tolist())
    if missing:
        raise ValueError(f"{missing} of {total} tokens are NaN: cannot rank them")
    return total


def _kth_largest(values: Tensor, k: int, all_reduce_sum: AllReduceSum) -> Tensor:
    """Over all ranks: its bytes one by one, the highest first, so that only counts travel."""
    values = at_least_float32(values) + 0.0  # -0.0 is 0.0
    kind, bits = (torch.int64, 64) if values.dtype == torch.float64 else (torch.int32, 32)
    most = torch.iinfo(kind).max
    raw = values.view(kind)
    found = 0
    keys = raw ^ ((raw >> (bits - 1)) & most)  # whole numbers in the order of the values
    inside = torch.ones_like(keys, dtype=torch.bool)
    for shift in range(bits - 8, -1, -8):
        # 128: negative ones are the smaller
        digits = ((keys >> shift) & 255) ^ (128 if shift == bits - 8 else 0)
        counts = all_reduce_sum(torch.bincount(digits[inside], minlength=256)).tolist()
        digit = 255
        while counts[digit] < k:
            k = k - counts[digit]
            digit = digit - 1
        inside = inside & (digits == digit)
        found = found << 8 | digit
    key = found - most - 1
    return torch.tensor(key ^ ((key >> (bits - 1)) & most), dtype=kind, device=values.device).view(
        values.dtype
    )


def _first(keys: Tensor, tie_keys: Tensor, count: int, all_reduce_sum: AllReduceSum) -> Tensor:
    """Return which of this rank's tokens are among the ``count`` with the largest (key, tie key) over all ranks."""
    total, _ = (_rankable(values, all_reduce_sum) for values in (keys, tie_keys))
    if total <= count:
        return torch.ones_like(keys, dtype=torch.bool)
    threshold = _kth_largest(keys, count, all_reduce_sum)
    # 1 or more of the tokens at the threshold
    rest = count - int(all_reduce_sum((keys > threshold).sum()))
    tie_threshold = _kth_largest(tie_keys[keys == threshold], rest, all_reduce_sum)
    return (keys > threshold) | ((keys == threshold) & (tie_keys >= tie_threshold))
