"""KL divergence from the reference policy: estimators from sampled tokens, and controllers of its coefficient."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightppo.algorithms.masking import at_least_float32, require_same_shape
from lightppo.algorithms.tables import lookup

logger = logging.getLogger(__name__)

LOG_RATIO_LIMIT = 20.0  # e^20 = 4.9e8: far outside any sane update, far inside float32


def k1(log_ratio: Tensor) -> Tensor:
    """d: unbiased under the policy, high variance, may be negative. Its expected gradient as a loss is 0."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """½d²: biased in value, never negative; its gradient is the gradient of the KL."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """e^{-d} + d - 1 with d in ±20: unbiased, never negative, low variance near 0."""
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (-log_ratio).expm1() + log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def approx_kl(log_probs: Tensor, ref_log_probs: Tensor, estimator: str = "k1") -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, from d = log_probs - ref_log_probs.

    Source: Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html).

    Args:
        log_probs: (B, A), log probs of the sampled tokens under the policy; has a gradient where they have one.
        ref_log_probs: (B, A), under the reference.
        estimator: one of ``KL_ESTIMATORS``.

    Returns:
        (B, A), float32 or float64, in nats.

    Raises:
        ValueError: unknown estimator, or shapes differ.
    """
    fn = lookup(KL_ESTIMATORS, estimator, "--kl_estimator")
    require_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    return fn(at_least_float32(log_probs) - at_least_float32(ref_log_probs))


class FixedKLController:
    """A coefficient that stays what the flag says.

    Args:
        coef: the KL coefficient, at least 0.
    """

    def __init__(self, coef: float) -> None:
        self.value = _checked_coef(coef)

    def update(self, current_kl: float, n_samples: int) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "fixed", "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The flag wins over the checkpoint, and a difference is logged.

        Raises:
            ValueError: the state is an adaptive controller's.
        """
        _check_kind(state, "fixed")
        if state["value"] != self.value:
            logger.warning("--init_kl_coef is %g; the checkpoint was made with %g", self.value, state["value"])


class AdaptiveKLController:
    """Steers the coefficient so that the measured KL stays near a target.

    value *= 1 + clip(kl / target - 1, ±0.2) · n / horizon. Source: Ziegler et al. 2019 (arXiv:1909.08593), §2.2.

    Args:
        init_coef: the first coefficient, at least 0.
        target: wanted KL per update, in the unit of what ``update`` is given; above 0.
        horizon: samples over which an error of 20% or more changes the coefficient by about 20%; above 0.
    """

    MAX_ERROR = 0.2

    def __init__(self, init_coef: float, target: float, horizon: float) -> None:
        if not (target > 0 and horizon > 0):
            raise ValueError(f"--kl_target ({target}) and --kl_horizon ({horizon}) must be above 0")
        self.value = _checked_coef(init_coef)
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, n_samples: int) -> None:
        """Call once per rollout batch, on every rank with the same numbers.

        Args:
            current_kl: KL of the rollout to the reference, over all ranks, before any update on it.
            n_samples: samples of the rollout batch over all ranks.

        Raises:
            ValueError: the KL is not finite, or the batch is so large against the horizon that the coefficient could
                fall to 0 or below in one update.
        """
        if not math.isfinite(current_kl):
            raise ValueError(
                f"the KL of this rollout is {current_kl}: the policy or the reference gives broken log probs"
            )
        if self.MAX_ERROR * n_samples >= self.horizon:
            least = math.ceil(n_samples * self.MAX_ERROR) + 1
            raise ValueError(
                f"--kl_horizon {self.horizon} is too short for {n_samples} samples per rollout: one update could make "
                f"the KL coefficient 0 or negative; set it to at least {least}"
            )
        error = min(max(current_kl / self.target - 1.0, -self.MAX_ERROR), self.MAX_ERROR)
        self.value *= 1.0 + error * n_samples / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "adaptive", "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the coefficient on; target and horizon are flags.

        Raises:
            ValueError: the state is a fixed controller's.
        """
        _check_kind(state, "adaptive")
        self.value = _checked_coef(state["value"])


KLController = FixedKLController | AdaptiveKLController


def make_kl_controller(init: float, target: float | None, horizon: float) -> KLController:
    """Adaptive where ``--kl_target`` is set, fixed otherwise."""
    return FixedKLController(init) if target is None else AdaptiveKLController(init, target, horizon)


def _checked_coef(coef: float) -> float:
    if not (math.isfinite(coef) and coef >= 0):
        raise ValueError(f"the KL coefficient (--init_kl_coef) must be finite and at least 0, got {coef}")
    return float(coef)


def _check_kind(state: Mapping[str, Any], kind: str) -> None:
    if state.get("kind") != kind:
        raise ValueError(
            f"the KL controller of the checkpoint is {state.get('kind')}, that of this run is {kind}: "
            "set --kl_target as it was, or start a new run"
        )
