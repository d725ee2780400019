"""Intervals and statistics of a few runs, worked out by hand or by another function of scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lightppo.experiments.intervals import (
    Bounded,
    bootstrapped,
    count_for_width,
    estimated,
    interquartile_mean,
    mean_of,
    performance_profile,
    probability_of_improvement,
    unpaired_difference,
)

FIRST = [0.1, 0.4, 0.35, 0.8, 0.62, 0.5, 0.9]
SECOND = [0.2, 0.3, 0.25, 0.5, 0.45, 0.1, 0.6]


def test_the_interval_of_a_mean():
    # t of 6 degrees of freedom 2.446912, standard deviation 0.274703: 0.5242857 ± 2.446912 · 0.274703 / √7
    estimate = mean_of(FIRST)
    assert estimate.value == pytest.approx(0.5242857)
    assert (estimate.low, estimate.high) == pytest.approx((0.2702275, 0.7783439))
    assert estimate.excludes_zero
    assert mean_of([2.0]) == Bounded(2.0, -math.inf, math.inf)
    assert not mean_of([2.0]).excludes_zero


def test_the_interval_of_two_groups():
    # stats.ttest_ind(FIRST, SECOND).confidence_interval()
    estimate = unpaired_difference(FIRST, SECOND)
    assert (estimate.low, estimate.high) == pytest.approx((-0.0885606, 0.4514177))
    assert not estimate.excludes_zero


@pytest.mark.parametrize("groups", [1, 2])
def test_the_count_for_a_width_is_the_least_that_suffices(groups):
    def width(count: int) -> float:
        half = stats.t.ppf(0.975, groups * (count - 1)) * 3.0 / math.sqrt(count)
        return 2 * half

    count = count_for_width(3.0, 1.5, groups)
    assert width(count) <= 1.5 < width(count - 1)
    assert count_for_width(3.0, 1e9, groups) == 2
    assert count_for_width(3.0, 1e-9, groups) is None


def test_the_mean_of_the_middle_half():
    assert interquartile_mean([0.0, 1.0, 2.0, 100.0]) == 1.5
    # one of seven is left out at each end: (0.35 + 0.4 + 0.5 + 0.62 + 0.8) / 5
    assert interquartile_mean(FIRST) == pytest.approx(0.534)


def test_how_often_one_setting_beats_another():
    assert probability_of_improvement([1.0, 3.0], [2.0, 3.0]) == (1 + 0.5) / 4
    # stats.mannwhitneyu(FIRST, SECOND).statistic / 49
    assert probability_of_improvement(FIRST, SECOND) == pytest.approx(35 / 49)


def test_a_profile_counts_runs_above_each_threshold():
    assert performance_profile([0.1, 0.5, 0.5], [0.0, 0.1, 0.5]).tolist() == [1.0, 2 / 3, 0.0]


def test_the_bootstrap_is_the_same_in_every_call():
    estimate = estimated(interquartile_mean, FIRST)
    # with 20000 draws: 0.310 to 0.744
    assert (estimate.low, estimate.high) == pytest.approx((0.310, 0.744), abs=0.02)
    assert estimate == estimated(interquartile_mean, FIRST)


def test_the_bootstrap_draws_each_sample_by_itself():
    low, high = bootstrapped(lambda a, b: a.mean() - b.mean(), FIRST, FIRST, draws=200)
    assert low < 0 < high  # drawn together, every difference would be 0
    low, high = bootstrapped(lambda a: performance_profile(a, [0.0, 0.5]), FIRST, draws=200)
    assert low.shape == high.shape == (2,)
    assert low[0] == high[0] == 1.0
    assert np.all(low <= high)
