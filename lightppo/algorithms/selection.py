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
    """Return the ceil(ratio·ΣN) largest values over all ranks, (N,) bool, and all equal to the smallest of them."""
    total = _count_rankable(values, all_reduce_sum)
    if total == 0:  # the same on every rank
        return torch.zeros_like(values, dtype=torch.bool)
    count = math.ceil(round(ratio * total, 6))  # rounded, because 0.07 · 100 is 7.000000000000001
    return values >= _kth_largest(values, max(1, count), all_reduce_sum)


@torch.no_grad()
def first_above_mean(values: Tensor, most: float, all_reduce_sum: AllReduceSum = identity) -> float:
    """Return the smallest number ≥ 0 of all ranks up to which, itself included, the mean is above ``most``; inf: none."""
    values = values[~values.isnan()].double()
    keys = values.view(torch.int64)  # whole numbers in the order of the values

    def is_above(key: int) -> bool:
        below = values[keys <= key]
        sums = torch.stack([below.new_tensor(len(below)), below.sum()])
        count, total = all_reduce_sum(sums).tolist()
        return total > most * count

    infinite = 0x7FF << 52  # the key of inf
    first_key = bisect_left(range(infinite), True, key=is_above)
    return torch.tensor(first_key).view(torch.float64).item()


@torch.no_grad()
def select_clip_cov(
    log_probs: Tensor,
    advantages: Tensor,
    uniforms: Tensor,
    *,
    options: Mapping[str, float],
    all_reduce_sum: AllReduceSum = identity,
) -> Tensor:
    """Select max(1, ⌊clip_cov_ratio·ΣN⌋) random tokens (or fewer) with clip_cov_low < covariance < clip_cov_high.

    Source: Cui et al. 2025 (arXiv:2505.22617), Clip-Cov, and its code for the rounding.
    """
    covariances = covariance(log_probs, advantages, all_reduce_sum)
    candidates = (covariances > options["clip_cov_low"]) & (covariances < options["clip_cov_high"])
    count = _floor_share(options["clip_cov_ratio"], _count_tokens(log_probs, all_reduce_sum))
    selected = torch.zeros_like(candidates)
    selected[candidates] = _largest(
        -uniforms[candidates], covariances[candidates], count, all_reduce_sum
    )
    return selected


@torch.no_grad()
def select_kl_cov(
    log_probs: Tensor,
    advantages: Tensor,
    uniforms: Tensor,
    *,
    options: Mapping[str, float],
    all_reduce_sum: AllReduceSum = identity,
) -> Tensor:
    """Select the max(1, ⌊kl_cov_ratio·ΣN⌋) tokens of the largest covariance (KL-Cov of the same paper)."""
    covariances = covariance(log_probs, advantages, all_reduce_sum)
    count = _floor_share(options["kl_cov_ratio"], _count_tokens(log_probs, all_reduce_sum))
    return _largest(covariances, -uniforms, count, all_reduce_sum)


@torch.no_grad()
def covariance(
    log_probs: Tensor, advantages: Tensor, all_reduce_sum: AllReduceSum = identity
) -> Tensor:
    """Return (log_prob - mean)·(advantage - mean) of each token (N,), over all ranks; high values lower the entropy.

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
    means = sums / max(1, _count_tokens(log_probs, all_reduce_sum))
    product = (exact_log_probs - means[0]) * (exact_advantages - means[1])
    return product.to(at_least_float32(log_probs).dtype)


def _count_tokens(tokens: Tensor, all_reduce_sum: AllReduceSum) -> int:
    count = torch.tensor(tokens.numel(), dtype=torch.float64, device=tokens.device)
    return int(all_reduce_sum(count))


def _floor_share(ratio: float, total: int) -> int:
    # rounded, because 0.29 · 100 is 28.999999999999996
    return max(1, math.floor(round(ratio * total, 6)))


def _count_rankable(values: Tensor, all_reduce_sum: AllReduceSum) -> int:
    """Return ΣN; refuse NaN on every rank at once, so that no rank is left waiting in a collective."""
    count = values.new_tensor(values.numel(), dtype=torch.float64)
    counts = torch.stack([count, values.isnan().sum().double()])
    total, missing = map(int, all_reduce_sum(counts).tolist())
    if missing:
        raise ValueError(f"{missing} of {total} tokens are NaN: cannot rank them")
    return total


def _kth_largest(values: Tensor, k: int, all_reduce_sum: AllReduceSum) -> Tensor:
    """Find it over all ranks, its bytes one by one, the highest first, so that only counts travel."""
    values = at_least_float32(values) + 0.0  # -0.0 is 0.0
    dtype = torch.int64 if values.dtype == torch.float64 else torch.int32
    limits = torch.iinfo(dtype)
    bits = limits.bits
    raw = values.view(dtype)
    keys = raw ^ ((raw >> (bits - 1)) & limits.max)  # whole numbers in the order of the values
    prefix = 0  # the bytes so far
    has_prefix = torch.ones_like(keys, dtype=torch.bool)
    for shift in range(bits - 8, -1, -8):
        # 128: negative ones are the smaller
        digits = ((keys >> shift) & 255) ^ (128 if shift == bits - 8 else 0)
        counts = all_reduce_sum(torch.bincount(digits[has_prefix], minlength=256)).tolist()
        digit = 255
        while counts[digit] < k:
            k -= counts[digit]
            digit -= 1
        has_prefix = has_prefix & (digits == digit)
        prefix = prefix << 8 | digit
    key = prefix + limits.min
    raw_key = key ^ ((key >> (bits - 1)) & limits.max)
    return torch.tensor(raw_key, dtype=dtype, device=values.device).view(values.dtype)


def _largest(keys: Tensor, tie_keys: Tensor, count: int, all_reduce_sum: AllReduceSum) -> Tensor:
    """Return which of this rank's tokens are among the ``count`` with the largest (key, tie key) over all ranks."""
    total = _count_rankable(keys, all_reduce_sum)
    _count_rankable(tie_keys, all_reduce_sum)
    if total <= count:
        return torch.ones_like(keys, dtype=torch.bool)
    threshold = _kth_largest(keys, count, all_reduce_sum)
    above = keys > threshold
    tied = keys == threshold
    places = count - int(all_reduce_sum(above.sum()))  # for 1 or more of the tied tokens
    tie_threshold = _kth_largest(tie_keys[tied], places, all_reduce_sum)
    return above | (tied & (tie_keys >= tie_threshold))
