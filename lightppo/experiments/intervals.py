"""How sure a number of a few runs is: intervals of means, of pairs and by the bootstrap. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, stdev

import numpy as np

LEVEL = 0.95  # of every interval
DRAWS = 2000  # of a bootstrap
_NEARLY_NORMAL = (
    1000  # degrees of freedom from which Student's t is taken for the normal distribution
)


@dataclass(frozen=True)
class Bounded:
    """A number with the bounds of its interval; the bounds are infinite where nothing is known of them."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


# -- Student's t -----------------------------------------------------------------------------------------------------


def share_within(t: float, freedom: int) -> float:
    """Return P(\\|T\\| < t) of Student's t, by its finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    if freedom > _NEARLY_NORMAL:
        return 2 * NormalDist().cdf(t) - 1
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    is_odd = freedom % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(1 + is_odd, freedom, 2):  # the powers of the cosine are k - 1 or, of odd ones, k
        total += term
        term *= cosine**2 * k / (k + 1)
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """Return the t within which ``level`` of Student's distribution lies."""
    low, high = 0.0, 1.0
    while share_within(high, freedom) < level:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, freedom) < level else (low, middle)
    return high


def mean_of(values: Sequence[float], level: float = LEVEL) -> Bounded:
    """Return the mean with its t interval; of one value the interval is infinite."""
    center = mean(values)
    if len(values) < 2:
        return Bounded(center, -math.inf, math.inf)
    half = t_quantile(len(values) - 1, level) * stdev(values) / math.sqrt(len(values))
    return Bounded(center, center - half, center + half)


def unpaired_difference(
    new: Sequence[float], old: Sequence[float], level: float = LEVEL
) -> Bounded:
    """Return the difference of two means with its t interval, of equal variances."""
    center = mean(new) - mean(old)
    freedom = len(new) + len(old) - 2
    squares = sum((x - mean(new)) ** 2 for x in new) + sum((x - mean(old)) ** 2 for x in old)
    if freedom < 1:
        return Bounded(center, -math.inf, math.inf)
    error = math.sqrt(squares / freedom * (1 / len(new) + 1 / len(old)))
    half = t_quantile(freedom, level) * error
    return Bounded(center, center - half, center + half)


def count_for_width(deviation: float, width: float, groups: int = 1) -> int | None:
    """Return how many values give an interval of this width (low to high) at this deviation of a value.

    Args:
        groups: 1: the mean of values, as of paired differences; 2: the difference of the means of two groups of as
            many values, ``deviation`` being the root of the sum of both variances.

    Returns:
        at least 2; None where more than a million are needed.
    """

    def is_enough(count: int) -> bool:
        half = t_quantile(groups * (count - 1), LEVEL) * deviation / math.sqrt(count)
        return 2 * half <= width

    high = 2
    while not is_enough(high):
        high *= 2
        if high > 1_000_000:
            return None
    low = high // 2
    while high - low > 1 and high > 2:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


# -- runs of settings (Agarwal et al. 2021, arXiv:2108.13264) --------------------------------------------------------


def interquartile_mean(scores: Sequence[float] | np.ndarray) -> float:
    """Return the mean of the middle half: a quarter of the scores, rounded down, is left out at each end."""
    ordered = np.sort(np.asarray(scores, dtype=float))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def probability_of_improvement(new: Sequence[float], old: Sequence[float]) -> float:
    """Return how often a run of the new setting beats one of the old; equal scores count half."""
    differences = np.subtract.outer(np.asarray(new, dtype=float), np.asarray(old, dtype=float))
    return float((differences > 0).mean() + 0.5 * (differences == 0).mean())


def performance_profile(
    scores: Sequence[float] | np.ndarray, thresholds: Sequence[float]
) -> np.ndarray:
    """Return the share of runs that score above each threshold, (T,)."""
    return np.greater.outer(np.asarray(scores, dtype=float), np.asarray(thresholds)).mean(axis=0)


def bootstrapped(
    statistic: Callable[..., float | np.ndarray],
    *samples: Sequence[float],
    draws: int = DRAWS,
    level: float = LEVEL,
) -> tuple[np.ndarray, np.ndarray]:
    """Return low and high of the percentile bootstrap of ``statistic(*samples)``; each sample is drawn anew by itself.

    The draws are the same in every call, so that a report that is written twice says the same.
    """
    generator = np.random.default_rng(0)
    arrays = [np.asarray(sample, dtype=float) for sample in samples]
    drawn = [
        statistic(*(array[generator.integers(len(array), size=len(array))] for array in arrays))
        for _ in range(draws)
    ]
    low, high = np.quantile(np.asarray(drawn), [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def estimated(statistic: Callable[..., float], *samples: Sequence[float]) -> Bounded:
    """Return a statistic with its bootstrap interval."""
    low, high = bootstrapped(statistic, *samples)
    return Bounded(statistic(*samples), float(low), float(high))
