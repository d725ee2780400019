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
from lightppo.algorithms.more_entries import Norm
from lightppo.experience.batching import ReplayBuffer
from lightppo.ranks import Ranks


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


@torch.no_grad()
def group_normalize(
    advantages: Tensor,
    action_mask: Tensor,
    group_ids: Tensor | None,
    eps: float = 1e-5,
    *,
    min_size: int = 1,
) -> Tensor:
    """x ← (x - μ_G) / (σ_G + eps), with μ_G and σ_G (biased) over the trained tokens of all samples of the group.

    A group whose trained tokens are all equal gets exactly 0.
    Source: ``group_adv_norm`` of AReaL (Fu et al. 2025, arXiv:2505.24298).
    """
    require_same_shape(advantages=advantages, action_mask=action_mask)
    index, count = number_groups(group_ids, action_mask, min_size)
    mask = action_mask.bool()
    groups = Groups(index.unsqueeze(1).expand_as(mask)[mask], count)  # one value per trained token
    tokens = at_least_float32(advantages)[mask].double()
    ones = torch.ones_like(tokens)
    deviation = groups.deviation(tokens, ones)
    std = (groups.sum(deviation.square()) / groups.sum(ones)).sqrt()
    normalized = deviation / (std + eps).clamp(min=torch.finfo(std.dtype).tiny)  # 0/0 with eps 0
    result = torch.zeros_like(at_least_float32(advantages))
    return result.masked_scatter(mask, normalized.to(result.dtype))


def normalisation(config: Any, of: Literal["scores", "advantages"]) -> Callable[..., Tensor] | None:
    """``--reward_norm_by`` and ``--adv_norm_by``, as :data:`lightppo.plugin.NORMALISATIONS` describes it."""
    words = {"scores": config.reward.reward_norm_by, "advantages": config.algorithm.adv_norm_by}[of]
    if not words:
        return None
    norm = Norm.parse(words)

    def normalise(values: Tensor, mask: Tensor, group_ids: Tensor, **more: Any) -> Tensor:
        return normalize_by(values, mask, group_ids, norm, **more)

    return normalise


# -- whitening -------------------------------------------------------------------------------------------------------


def whitening(config: Any) -> Callable[..., None] | None:
    """``--adv_norm`` over the batch, with its options; see :data:`lightppo.plugin.BUFFER_STEPS`."""
    algorithm = config.algorithm
    if not algorithm.adv_norm or algorithm.adv_norm_scope != "batch":
        return None
    options = {
        "divide_std": algorithm.adv_std_norm,
        "shift_mean": algorithm.adv_shift_mean,
        "unbiased": algorithm.adv_std_unbiased,
        "eps": algorithm.adv_norm_eps,
    }

    def whiten(buffer: ReplayBuffer, loss: Any, ranks: Ranks, seed: int) -> None:
        buffer.whiten(ranks, **options)

    return whiten


def whitening_of_groups(
    config: Any, of: Literal["scores", "advantages"]
) -> Callable[..., Tensor] | None:
    """``--adv_norm_scope group``, as :data:`lightppo.plugin.NORMALISATIONS` describes it."""
    algorithm = config.algorithm
    is_asked = algorithm.adv_norm and algorithm.adv_norm_scope == "group"
    if of != "advantages" or not is_asked:
        return None

    def normalise(values: Tensor, mask: Tensor, group_ids: Tensor, **_: Any) -> Tensor:
        return group_normalize(values, mask, group_ids, algorithm.adv_norm_eps)

    return normalise


def clipping(config: Any) -> Callable[..., None] | None:
    """``--advantage_clip``, a step on the buffer."""
    limit = config.algorithm.advantage_clip
    if limit is None:
        return None

    def clip(buffer: ReplayBuffer, loss: Any, ranks: Ranks, seed: int) -> None:
        for item in buffer.items:
            item.advantages = item.advantages.clamp(-limit, limit)

    return clip
