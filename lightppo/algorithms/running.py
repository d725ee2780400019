"""Mean and standard deviation of a stream of numbers, over all ranks and from the first rollout on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.masking import AllReduceSum, at_least_float32, identity, require_same_shape


@dataclass(frozen=True)
class Moments:
    """Mean and variance of weighted numbers.

    Attributes:
        weight: the sum of the weights; of numbers that all weigh 1, how many there are.
        mean: 0 where there are none.
        variance: divided by the weight (n, not n - 1); 0 where there are none.
    """

    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def mixed_with(self, batch: Moments, share: float, weight: float) -> Moments:
        """The moments of 1 - share of these numbers and share of the batch's, under a new total weight.

        With share = n_batch / n this is the merge of Chan, Golub and LeVeque 1979. Unlike E[x²] - E[x]² it loses
        nothing where the mean is large against the deviation.
        """
        step = batch.mean - self.mean
        variance = (1.0 - share) * self.variance + share * batch.variance + share * (1.0 - share) * step * step
        return Moments(weight, self.mean + share * step, variance)


@torch.no_grad()
def batch_moments(
    values: Tensor, mask: Tensor | None = None, all_reduce_sum: AllReduceSum = identity, name: str = "values"
) -> Moments:
    """Moments of the unmasked values of all ranks: float64, in two passes (the mean is reduced first).

    Every rank must call it, also one without values; all get the same numbers.

    Args:
        values: any shape, any float type.
        mask: same shape, nonzero = counts; ``None``: all do.
        all_reduce_sum: sums a small tensor over all ranks.
        name: of the values, for the message.

    Raises:
        ValueError: shapes differ, or an unmasked value on any rank is NaN or infinite (on every rank).
    """
    require_same_shape(values=values, mask=mask)
    exact = values.double()
    kept = torch.ones_like(exact, dtype=torch.bool) if mask is None else mask.bool()
    exact = exact.masked_fill(~kept, 0.0)
    total, count = all_reduce_sum(torch.stack([exact.sum(), kept.sum().double()])).tolist()
    if not math.isfinite(total):
        raise ValueError(f"the {name} of this rollout hold NaN or infinite numbers: no mean of them can be taken")
    if count == 0:  # the same on every rank, so all leave here together
        return Moments()
    mean = total / count
    squares = (exact - mean).masked_fill(~kept, 0.0).square().sum()
    return Moments(count, mean, all_reduce_sum(squares).item() / count)


class RunningMeanStd:
    """Normalises scores by the mean and standard deviation of all scores ever seen (``--reward_running_norm``).

    The result depends neither on how the scores lie on the ranks nor on the order of the batches (but for the last
    bits of float64).

    Args:
        eps: added to the standard deviation, in units of the score; scores that differ by less count as equal.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        if not eps > 0:
            raise ValueError(f"RunningMeanStd: eps must be above 0, got {eps}")
        self.eps = eps
        self._moments = Moments()

    @property
    def count(self) -> float:
        """Numbers seen."""
        return self._moments.weight

    @property
    def mean(self) -> float:
        return self._moments.mean

    @property
    def std(self) -> float:
        """Divided by n, not n - 1."""
        return math.sqrt(self._moments.variance)

    def update(self, values: Tensor, mask: Tensor | None = None, all_reduce_sum: AllReduceSum = identity) -> None:
        """Once per rollout batch and before :meth:`normalize`, on every rank, also one without values.

        Args:
            values: this rank's, any shape.
            mask: same shape, nonzero = counts; ``None``: all do.
            all_reduce_sum: sums a small tensor over all ranks.

        Raises:
            ValueError: see :func:`batch_moments`; nothing is changed then.
        """
        batch = batch_moments(values, mask, all_reduce_sum, name="scores")
        count = self.count + batch.weight
        if batch.weight:
            self._moments = self._moments.mixed_with(batch, batch.weight / count, count)

    @torch.no_grad()
    def normalize(self, values: Tensor) -> Tensor:
        """(x - mean) / (std + eps); unchanged while fewer than two numbers have been seen.

        Args:
            values: any shape.

        Returns:
            The same shape, float32 or float64.
        """
        values = at_least_float32(values)
        if self.count < 2:
            return values
        return ((values.double() - self.mean) / (self.std + self.eps)).to(values.dtype)

    def state_dict(self) -> dict[str, float]:
        return {"count": self._moments.weight, "mean": self._moments.mean, "variance": self._moments.variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moments = Moments(float(state["count"]), float(state["mean"]), float(state["variance"]))
