"""A critic that works in normalised returns: the statistics, and the way there and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightppo.algorithms.masking import AllReduceSum, at_least_float32, identity
from lightppo.algorithms.running import Moments, batch_moments
from lightppo.algorithms.tables import lookup


def _exponential(weight: float, count: float, beta: float) -> tuple[float, float]:
    """A rollout fades by beta with each one after it; dividing by the sum of the weights is the debiasing."""
    weight = beta * weight + (1.0 - beta)
    return weight, (1.0 - beta) / weight


def _moving_average(weight: float, count: float, beta: float) -> tuple[float, float]:
    """All returns ever, each the same."""
    return weight + count, count / (weight + count)


# (weight so far, returns in the batch, beta) → (weight with the batch, share of the batch in the new statistics)
VALUE_NORM_KINDS: dict[str, Callable[[float, float, float], tuple[float, float]]] = {
    "exp": _exponential,
    "ma": _moving_average,
}


class ValueNorm:
    """Statistics of the returns, so that the critic's outputs stay near mean 0 and variance 1 whatever the rewards.

    Per rollout: ``denormalize`` the critic's outputs to values and compute advantages and returns from them; then
    ``update`` with the returns; then ``normalize`` the returns as the critic's targets, and ``normalize_old`` the
    values as what the value clip compares with. Before the first update the mean is 0 and the standard deviation 1.
    All three are elementwise: what lies at masked positions is mapped like the rest.

    The critic's last layer is not rescaled when the statistics move. Source: the value normalisation of MAPPO, Yu et
    al. 2022 (arXiv:2103.01955), after van Hasselt et al. 2016 (arXiv:1602.07714), without the latter's rescaling.

    Args:
        kind: ``--value_norm``, one of ``VALUE_NORM_KINDS``.
        beta: ``--value_norm_beta``: what a rollout's weight is multiplied by per later rollout; of ``exp`` only.
        eps: ``--value_norm_eps``: the variance is never taken to be less, in units of the return squared.

    Raises:
        ValueError: unknown kind, beta not in [0, 1), or eps not above 0.
    """

    def __init__(self, kind: str = "exp", beta: float = 0.99995, eps: float = 1e-5) -> None:
        self._add = lookup(VALUE_NORM_KINDS, kind, "--value_norm")
        if not 0 <= beta < 1:
            raise ValueError(f"--value_norm_beta must be at least 0 and below 1, got {beta}")
        if not eps > 0:
            raise ValueError(f"--value_norm_eps must be above 0, got {eps}")
        self.kind, self.beta, self.eps = kind, beta, eps
        self._moments = Moments()
        self._old = (0.0, 1.0)  # mean and std before the last update

    @property
    def mean(self) -> float:
        """Mean of the returns, 0 before the first."""
        return self._moments.mean

    @property
    def std(self) -> float:
        """Standard deviation of the returns, at least sqrt(eps); 1 before the first."""
        return math.sqrt(max(self._moments.variance, self.eps)) if self._moments.weight else 1.0

    def update(self, returns: Tensor, mask: Tensor | None = None, all_reduce_sum: AllReduceSum = identity) -> None:
        """Once per rollout batch, on every rank, also one without returns.

        Args:
            returns: (B, A), not normalised.
            mask: (B, A), True = trained token; ``None``: all are.
            all_reduce_sum: sums a small tensor over all ranks.

        Raises:
            ValueError: shapes differ, or a return on any rank is NaN or infinite; nothing is changed then.
        """
        batch = batch_moments(returns, mask, all_reduce_sum, name="returns")
        self._old = (self.mean, self.std)
        if batch.weight:
            weight, share = self._add(self._moments.weight, batch.weight, self.beta)
            self._moments = self._moments.mixed_with(batch, share, weight)

    def denormalize(self, values: Tensor) -> Tensor:
        """The critic's outputs as returns: x · std + mean, with the statistics as they are now. Any shape."""
        return _affine(values, self.std, self.mean)

    def normalize(self, returns: Tensor) -> Tensor:
        """(x - mean) / std with the statistics as they are now. Any shape; nothing is clipped."""
        return _affine(returns, 1.0 / self.std, -self.mean / self.std)

    def normalize_old(self, values: Tensor) -> Tensor:
        """The same with the statistics before the last update: what ``denormalize`` was given before it."""
        mean, std = self._old
        return _affine(values, 1.0 / std, -mean / std)

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "weight": self._moments.weight,
            "mean": self._moments.mean,
            "variance": self._moments.variance,
            "old_mean": self._old[0],
            "old_std": self._old[1],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the statistics on; beta and eps are flags.

        Raises:
            ValueError: the state is of another kind.
        """
        if state["kind"] != self.kind:
            raise ValueError(
                f"the value statistics of the checkpoint are of kind {state['kind']}, those of this run {self.kind}: "
                "set --value_norm as it was, or start a new run"
            )
        self._moments = Moments(float(state["weight"]), float(state["mean"]), float(state["variance"]))
        self._old = (float(state["old_mean"]), float(state["old_std"]))


def _affine(values: Tensor, scale: float, shift: float) -> Tensor:
    """values · scale + shift, in float64 because shift may be large against the values' differences."""
    values = at_least_float32(values)
    return (values.double() * scale + shift).to(values.dtype)
