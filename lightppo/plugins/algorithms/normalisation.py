"""Scores and advantages less a mean and over a deviation, each of all samples or of each group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from lightppo.algorithms.advantages import Groups, number_groups
from lightppo.algorithms.masking import (
    AllReduceSum,
    at_least_float32,
    identity,
    require_same_shape,
)
from lightppo.plugins.algorithms.tables import Norm


@torch.no_grad()
def normalize_by(
    values: Tensor,
    mask: Tensor,
    group_ids: Tensor | None,
    norm: Norm,
    *,
    all_reduce_sum: AllReduceSum = identity,
) -> Tensor:
    """(x - mean) / (std + eps) of the unmasked values (B, A); masked positions become 0. In float64.

    Mean and deviation are of all ranks, of each group, or left out; the deviation is around this mean, or around 0
    without one. With ``norm.leave_one_out`` a value is not in its own mean. Of a single value, a mean that leaves it
    out is 0, and an unbiased deviation 1. Source: ``Normalization`` of AReaL (arXiv:2505.24298).

    Args:
        group_ids: (B,), equal for the samples of one prompt, which are all on this rank.
    """
    require_same_shape(values=values, mask=mask)
    mask = mask.bool()
    index, count = number_groups(group_ids, mask)
    groups = Groups(index.unsqueeze(1).expand_as(mask)[mask], count)
    kept = values[mask].double()  # (N,)
    sums = {"group": groups.sum, "batch": lambda numbers: all_reduce_sum(numbers.sum())}
    ones = torch.ones_like(kept)
    if norm.mean is not None:
        total, number = sums[norm.mean](kept), sums[norm.mean](ones)
        if norm.leave_one_out:
            others = (total - kept) / (number - 1).clamp(min=1)
            kept = kept - torch.where(number > 1, others, 0.0)
        else:
            kept = kept - total / number.clamp(min=1)
    if norm.std is not None:
        squares, number = sums[norm.std](kept.square()), sums[norm.std](ones)
        std = (squares / (number - int(norm.unbiased)).clamp(min=1)).sqrt()
        if norm.unbiased:
            std = torch.where(number > 1, std, 1.0)
        kept = kept / (std + norm.eps)
    result = torch.zeros_like(at_least_float32(values))
    return result.masked_scatter(mask, kept.to(result.dtype))


def normalisation(config: Any, of: Literal["scores", "advantages"]) -> Callable[..., Tensor] | None:
    """``--reward_norm_by`` and ``--adv_norm_by``, as :data:`lightppo.plugin.NORMALISATIONS` describes it."""
    words = {"scores": config.reward.reward_norm_by, "advantages": config.algorithm.adv_norm_by}[of]
    if not words:
        return None
    norm = Norm.parse(words)

    def normalise(values: Tensor, mask: Tensor, group_ids: Tensor, **more: Any) -> Tensor:
        return normalize_by(values, mask, group_ids, norm, **more)

    return normalise
