"""How sure a number of a few runs is: intervals of means, of pairs and by the bootstrap. Pure functions of numbers.

Needs scipy: ``pip install 'lightppo[experiments]'``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
from scipy import stats

LEVEL = 0.95  # of every interval
DRAWS = 2000  # of a bootstrap


@dataclass(frozen=True)
class Bounded:
    """A number with the bounds of its interval; the bounds are infinite where nothing is known of them."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def _quantile(freedom: int, level: float) -> float:
    """Return the t within which ``level`` of Student's distribution lies."""
    return float(stats.t.ppf((1 + level) / 2, freedom))


def mean_of(values: Sequence[float], level: float = LEVEL) -> Bounded:
    """Return the mean with its t interval; of one value the interval is infinite."""
    center = mean(values)
    if len(values) < 2:
        return Bounded(center, -math.inf, math.inf)
    half = _quantile(len(values) - 1, level) * stdev(values) / math.sqrt(len(values))
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
    half = _quantile(freedom, level) * error
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
        half = _quantile(groups * (count - 1), LEVEL) * deviation / math.sqrt(count)
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
    return float(stats.trim_mean(scores, 0.25))


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
    drawn = stats.bootstrap(
        samples,
        statistic,
        n_resamples=draws,
        vectorized=False,
        confidence_level=level,
        method="percentile",
        rng=0,
    )
    return drawn.confidence_interval.low, drawn.confidence_interval.high


def estimated(statistic: Callable[..., float], *samples: Sequence[float]) -> Bounded:
    """Return a statistic with its bootstrap interval."""
    low, high = bootstrapped(statistic, *samples)
    return Bounded(statistic(*samples), float(low), float(high))
