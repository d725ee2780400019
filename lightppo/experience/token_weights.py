"""Factors of each token's policy loss, as :class:`lightppo.plugin.TokenWeight` describes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.correction import (
    correction_weights,
    normalize_weights,
    rejection_mask,
)
from lightppo.algorithms.masking import AllReduceSum
from lightppo.algorithms.more_entries import Rejection
from lightppo.config import PPOConfig
from lightppo.experience.experience import Experience
from lightppo.experience.selection import top_share

Weigh = Callable[..., Tensor]


def correction(config: PPOConfig) -> Weigh | None:
    """``--rollout_correction``: the weights of off-policy tokens."""
    options = config.correction
    if options.rollout_correction == "none":
        return None

    def weigh(
        experience: Experience, *, log_probs: Tensor, all_reduce_sum: AllReduceSum, **_: Any
    ) -> Tensor:
        weights = correction_weights(
            options.rollout_correction,
            log_probs,
            experience.rollout_log_probs,
            experience.action_mask,
            low=options.correction_low,
            high=options.correction_high,
            veto=options.correction_veto,
            agg=options.correction_agg
            if options.rollout_correction in ("geo_tis", "geo_mis")
            else None,
        )
        if options.correction_batch_norm:
            weights = normalize_weights(weights, experience.action_mask, all_reduce_sum)
        return weights

    return weigh


def rejection(config: PPOConfig) -> Weigh | None:
    """Those of ``--rollout_rejection`` that are judged before the update."""
    rejections = rejections_of(config, in_training=False)
    if not rejections:
        return None

    def weigh(
        experience: Experience, *, log_probs: Tensor, all_reduce_sum: AllReduceSum, **_: Any
    ) -> Tensor:
        return rejection_mask(
            rejections,
            log_probs,
            experience.rollout_log_probs,
            experience.action_mask,
            all_reduce_sum=all_reduce_sum,
        )

    return weigh


def rejection_in_training(config: PPOConfig) -> Weigh | None:
    """Those of ``--rollout_rejection`` that follow the policy in training."""
    rejections = rejections_of(config, in_training=True)
    if not rejections:
        return None

    def weigh(experience: Experience, *, log_probs: Tensor, **_: Any) -> Tensor:
        if experience.rollout_log_probs is None:
            if experience.action_mask.any():
                raise ValueError(
                    f"--rollout_rejection {rejections[0].name} needs rollout_log_probs"
                )
            return experience.action_mask  # a placeholder
        return rejection_mask(
            rejections,
            log_probs,
            experience.rollout_log_probs,
            experience.action_mask,
            advantages=experience.advantages,
        )

    return weigh


def rejections_of(config: PPOConfig, in_training: bool) -> list[Rejection]:
    """``--rollout_rejection``: those judged in training, or those judged before it.

    With ``--old_log_probs rollout`` the policy before it is the one that sampled, so all are judged in training.
    """
    rejections = [Rejection.parse(text) for text in config.correction.rollout_rejection]
    bypass = config.loss.old_log_probs == "rollout"
    return [one for one in rejections if (bypass or one.entry.in_training) == in_training]


def high_entropy(config: PPOConfig) -> Weigh | None:
    """``--high_entropy_token_ratio``: only the tokens of the rollout with the highest entropy have a loss."""
    ratio = config.loss.high_entropy_token_ratio
    if ratio is None:
        return None

    def weigh(
        experience: Experience, *, entropy: Tensor, all_reduce_sum: AllReduceSum, **_: Any
    ) -> Tensor:
        mask = experience.action_mask
        kept = torch.zeros_like(mask)
        kept[mask] = top_share(entropy[mask], ratio, all_reduce_sum)
        return kept

    return weigh
