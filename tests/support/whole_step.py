"""The losses of a micro batch that is a whole optimizer step, with their metrics."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightppo.algorithms import losses
from lightppo.algorithms.masking import LossNormalizer


class PolicyLoss(losses.PolicyLoss):
    """The policy loss, called with the counts of its own mask where a test gives none."""

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        normalizer: LossNormalizer | None = None,
        **inputs: Any,
    ) -> Any:
        normalizer = normalizer or LossNormalizer.from_masks([action_mask])
        return super().__call__(
            log_probs, old_log_probs, advantages, action_mask, normalizer, **inputs
        )


class ValueLoss(losses.ValueLoss):
    """The value loss, called with the counts of its own mask where a test gives none."""

    def __call__(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor,
        normalizer: LossNormalizer | None = None,
    ) -> Any:
        normalizer = normalizer or LossNormalizer.from_masks([action_mask])
        return super().__call__(values, old_values, returns, action_mask, normalizer)
