"""How far apart two policies are: KL from the reference, its controllers, and the mismatch with the rollout engine.

Notation: p the policy, q the reference, d = log p - log q at the sampled token, KL = KL(p || q).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightppo.algorithms.entries import KL_ESTIMATORS
from lightppo.algorithms.masking import (
    at_least_float32,
    require_same_shape,
    zero_where_masked,
)
from lightppo.table import load

logger = logging.getLogger(__name__)

LOG_RATIO_LIMIT = 20.0  # e^20 = 4.9e8: far outside any sane update, far inside float32


def limited(log_ratio: Tensor) -> Tensor:
    """A log ratio limited to ±20, safe to exponentiate."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k1(log_ratio: Tensor) -> Tensor:
    """d: unbiased under the policy, high variance, may be negative. Its expected gradient as a loss is 0."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """½d²: biased, never negative. As a loss, its expected gradient is the gradient of the KL."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """e^{-d} + d - 1, d in ±20: unbiased, never negative, low variance. As a loss, its gradient is KL(q || p)'s."""
    log_ratio = limited(log_ratio)
    return (-log_ratio).expm1() + log_ratio


def token_log_ratio(log_probs: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
    """d (B, A) in float32 or float64, 0 at masked positions."""
    log_ratio = at_least_float32(log_probs) - at_least_float32(others)
    return log_ratio if mask is None else zero_where_masked(log_ratio, mask)


class KLEstimate:
    """A KL estimator and its limit, looked up once; called as :func:`approx_kl`."""

    def __init__(self, estimator: str = "k1", clip: float | None = None) -> None:
        entry = KL_ESTIMATORS.find(estimator)
        if entry.over_vocabulary:
            raise ValueError(
                f"--kl_estimator {estimator} needs the logits of both models: call full_kl"
            )
        self.value, self.clip = entry.fn, clip
        self.as_loss = None if entry.as_loss is None else load(entry.as_loss)

    def __call__(
        self,
        log_probs: Tensor,
        ref_log_probs: Tensor,
        action_mask: Tensor | None = None,
        old_log_probs: Tensor | None = None,
    ) -> Tensor:
        require_same_shape(
            log_probs=log_probs,
            ref_log_probs=ref_log_probs,
            action_mask=action_mask,
            old_log_probs=old_log_probs,
        )
        log_ratio = token_log_ratio(log_probs, ref_log_probs, action_mask)  # (B, A)
        kl = self.value(log_ratio)
        if self.clip is not None:
            kl = kl.clamp(-self.clip, self.clip)
        if self.as_loss is not None:
            change = None
            if old_log_probs is not None:
                change = token_log_ratio(log_probs, old_log_probs.detach(), action_mask)
            kl = self.as_loss(kl, log_ratio, change)
        return kl


def approx_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    estimator: str = "k1",
    clip: float | None = None,
    action_mask: Tensor | None = None,
    old_log_probs: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, (B, A) in nats, from d = log_probs - ref_log_probs.

    docs/algorithms.md gives the expected gradients, as a loss and in the reward. Sources: Schulman
    (joschu.net/blog/kl-approx.html); the gradients: arXiv:2506.09477, arXiv:2510.01555.

    Args:
        clip: limits the value to ±clip; a clipped value has no gradient, except k2's in a straight-through estimator.
        action_mask: (B, A), True = trained token; the others become 0 and get no gradient.
        old_log_probs: (B, A), of the policy that sampled, for estimators that are multiplied by π / π_old
            (DeepSeek-V3.2, arXiv:2512.02556, eq. 7); ``None``: it is the policy itself, and the factor is left out.
    """
    return KLEstimate(estimator, clip)(log_probs, ref_log_probs, action_mask, old_log_probs)


# -- the coefficient of the KL ---------------------------------------------------------------------------------------


class KLController:
    """The KL coefficient, ``value``, and its state in checkpoints."""

    kind: str

    def __init__(self, coef: float) -> None:
        if not 0 <= coef < math.inf:
            raise ValueError(f"--init_kl_coef must be finite and at least 0, got {coef}")
        self.value = float(coef)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the coefficient; everything else comes from flags. ValueError for a state of another kind."""
        if state.get("kind") != self.kind:
            raise ValueError(
                f"the checkpoint's KL is {state.get('kind')}, here {self.kind}: set --kl_target as it was"
            )
        self.value = float(state["value"])


class FixedKLController(KLController):
    """A coefficient that never changes."""

    kind = "fixed"

    def update(self, current_kl: float, n_samples: int) -> None:
        """Nothing to do."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the flag's value; a different value in the checkpoint is logged."""
        flag = self.value
        super().load_state_dict(state)
        if self.value != flag:
            logger.warning(
                "--init_kl_coef is %g; the checkpoint was made with %g", flag, self.value
            )
        self.value = flag


class AdaptiveKLController(KLController):
    """Steers the coefficient so that the measured KL stays near a target, in the unit of ``update``'s ``current_kl``.

    value *= 1 + clip(kl / target - 1, ±0.2) · n / horizon. Source: Ziegler et al. 2019 (arXiv:1909.08593), §2.2.
    """

    kind = "adaptive"
    MAX_ERROR = 0.2

    def __init__(self, init_coef: float, target: float, horizon: float) -> None:
        if not (target > 0 and horizon > 0):
            raise ValueError(f"--kl_target ({target}) and --kl_horizon ({horizon}) must be above 0")
        super().__init__(init_coef)
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, n_samples: int) -> None:
        """Call once per rollout batch, with the KL before any update on it; both numbers are over all ranks."""
        if not math.isfinite(current_kl):
            raise ValueError(
                f"the KL of this rollout is {current_kl}: policy or reference gives broken log probs"
            )
        if self.MAX_ERROR * n_samples >= self.horizon:
            raise ValueError(
                f"--kl_horizon {self.horizon} must be above a fifth of a rollout's {n_samples} samples"
            )
        error = min(max(current_kl / self.target - 1.0, -self.MAX_ERROR), self.MAX_ERROR)
        self.value *= 1.0 + error * n_samples / self.horizon


def make_kl_controller(
    init: float, target: float | None, horizon: float
) -> FixedKLController | AdaptiveKLController:
    """Adaptive if ``--kl_target`` is set, fixed otherwise."""
    return (
        FixedKLController(init) if target is None else AdaptiveKLController(init, target, horizon)
    )
