"""Intervals and statistics of a few runs, worked out by hand or by scipy 1.17.1."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightppo.experiments.intervals import (
    Bounded,
    bootstrapped,
    count_for_width,
    estimated,
    interquartile_mean,
    mean_of,
    performance_profile,
    probability_of_improvement,
    share_within,
    t_quantile,
    unpaired_difference,
)

FIRST = [0.1, 0.4, 0.35, 0.8, 0.62, 0.5, 0.9]
SECOND = [0.2, 0.3, 0.25, 0.5, 0.45, 0.1, 0.6]


@pytest.mark.parametrize(
    ("freedom", "expected"),  # scipy.stats.t.ppf(0.975, freedom)
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (7, 2.364624), (29, 2.045230), (5000, 1.960)],
)
def test_quantiles_of_students_t(freedom, expected):
    assert t_quantile(freedom) == pytest.approx(expected, rel=2e-4 if freedom > 1000 else 1e-6)
    assert share_within(t_quantile(freedom), freedom) == pytest.approx(0.95)


def test_one_degree_of_freedom_is_the_cauchy_distribution():
    assert share_within(1.0, 1) == pytest.approx(0.5)


def test_the_interval_of_a_mean():
    # scipy.stats.t.interval(0.95, 6, mean, sem)
    estimate = mean_of(FIRST)
    assert estimate.value == pytest.approx(0.5242857)
    assert (estimate.low, estimate.high) == pytest.approx((0.2702275, 0.7783439))
    assert estimate.excludes_zero
    assert mean_of([2.0]) == Bounded(2.0, -math.inf, math.inf)
    assert not mean_of([2.0]).excludes_zero


def test_the_interval_of_two_groups():
    # scipy.stats.ttest_ind(FIRST, SECOND).confidence_interval()
    estimate = unpaired_difference(FIRST, SECOND)
    assert (estimate.low, estimate.high) == pytest.approx((-0.0885606, 0.4514177))
    assert not estimate.excludes_zero


@pytest.mark.parametrize("groups", [1, 2])
def test_the_count_for_a_width_is_the_least_that_suffices(groups):
    def width(count: int) -> float:
        return 2 * t_quantile(groups * (count - 1)) * 3.0 / math.sqrt(count)

    count = count_for_width(3.0, 1.5, groups)
    assert width(count) <= 1.5 < width(count - 1)
    assert count_for_width(3.0, 1e9, groups) == 2
    assert count_for_width(3.0, 1e-9, groups) is None


def test_the_mean_of_the_middle_half():
    assert interquartile_mean([0.0, 1.0, 2.0, 100.0]) == 1.5
    # scipy.stats.trim_mean(FIRST, 0.25): one of seven is left out at each end
    assert interquartile_mean(FIRST) == pytest.approx(0.534)


def test_how_often_one_setting_beats_another():
    assert probability_of_improvement([1.0, 3.0], [2.0, 3.0]) == (1 + 0.5) / 4
    # scipy.stats.mannwhitneyu(FIRST, SECOND).statistic / 49
    assert probability_of_improvement(FIRST, SECOND) == pytest.approx(35 / 49)


def test_a_profile_counts_runs_above_each_threshold():
    assert performance_profile([0.1, 0.5, 0.5], [0.0, 0.1, 0.5]).tolist() == [1.0, 2 / 3, 0.0]


def test_the_bootstrap_is_that_of_scipy_and_the_same_in_every_call():
    estimate = estimated(interquartile_mean, FIRST)
    # scipy.stats.bootstrap(method="percentile", n_resamples=20000): 0.310 to 0.744
    assert (estimate.low, estimate.high) == pytest.approx((0.310, 0.744), abs=0.02)
    assert estimate == estimated(interquartile_mean, FIRST)


def test_the_bootstrap_draws_each_sample_by_itself():
    low, high = bootstrapped(lambda a, b: a.mean() - b.mean(), FIRST, FIRST, draws=200)
    assert low < 0 < high  # drawn together, every difference would be 0
    low, high = bootstrapped(lambda a: performance_profile(a, [0.0, 0.5]), FIRST, draws=200)
    assert low.shape == high.shape == (2,)
    assert low[0] == high[0] == 1.0
    assert np.all(low <= high)
