"""What benchmarks/what_if.py makes of the measures of branches."""

from __future__ import annotations

import pytest


def test_a_question_by_hand(benchmark_script):
    base, changed = [[1.0], [2.0], [3.0]], [[1.5], [2.25], [3.75]]
    answer = benchmark_script("what_if").question(base, changed)
    # differences 0.5, 0.25, 0.75: mean 0.5, variance 0.0625; variances 1 and 1.3125 of the sides
    assert answer["effect"] == pytest.approx(0.5)
    assert answer["variance_ratio"] == pytest.approx(0.0625 / 2.3125)
    assert not answer["found"]  # 0.5 is within 4.3 × 0.25 / √3 of 0
    assert answer["interval"][0] == pytest.approx(0.5 - 4.302653 * 0.25 / 3**0.5)
    assert answer["steps_in_pairs"] == 4  # 3.18 × 0.25 / 2 is below 0.5
    assert answer["steps_in_unlike_seeds"] == 37  # 1.99 × (2.3125 / n)½ is at most 0.5 from here on


def test_the_cheapest_length_of_branches_counts(benchmark_script):
    """The first step has no effect; two steps the one by hand above; three the same mean with more noise."""
    fewest_steps = benchmark_script("what_if").fewest_steps
    base = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]]
    changed = [[1.0, 2.0, 0.0], [2.0, 2.5, 3.0], [3.0, 4.5, 6.0]]
    assert fewest_steps(base, changed, 1) == 4 * 2
    assert fewest_steps(base, changed, 2) == 37 * 2


def test_branches_that_are_equal_need_no_pairs(benchmark_script):
    answer = benchmark_script("what_if").question([[1.0], [2.0]], [[1.0], [2.0]])
    assert (answer["effect"], answer["variance_ratio"]) == (0.0, 0.0)
    assert answer["steps_in_pairs"] is None


def test_the_interval_of_a_share(benchmark_script):
    """scipy.stats.binomtest(found, 20).proportion_ci() says the same."""
    interval = benchmark_script("what_if").binomial_interval
    assert interval(0, 20) == pytest.approx([0.0, 0.1684335], abs=1e-6)
    assert interval(1, 20) == pytest.approx([0.0012651, 0.2487328], abs=1e-6)
    assert interval(20, 20) == pytest.approx([0.8315665, 1.0], abs=1e-6)


def test_unlike_seeds_differ_in_one_interval_of_twenty(benchmark_script):
    script = benchmark_script("what_if")
    normal = [-1.53, -1.07, -0.78, -0.55, -0.35, -0.17, 0.0, 0.17, 0.35, 0.55, 0.78, 1.07, 1.53]
    assert 0.02 < script.false_positives(normal, 4) < 0.09


def test_the_aims_are_counted(benchmark_script):
    script = benchmark_script("what_if")
    base = {measure: [[1.0], [2.0], [3.0], [4.0]] for measure in script.MEASURES}
    near = {measure: [[1.5], [2.4], [3.6], [4.5]] for measure in script.MEASURES}
    far = {measure: [[11.0], [14.0], [12.0], [13.0]] for measure in script.MEASURES}
    curves = {"effects": {"near": near}, "large": {"far": far}, "nulls": {"same": base}}
    summary = script.results(curves, base)["summary"]["reward"]
    effects, large, nulls = (summary[kind] for kind in curves)
    assert (effects["effects_found"], effects["effects_found_unpaired"]) == (1, 0)
    assert effects["share_of_steps_in_all"] < 1 / 3
    assert large["effects_found"] == large["effects_found_unpaired"] == 1
    assert large["at_most_a_third_of_the_steps"] == 0
    assert [of["variance_at_most_a_fifth"] for of in (effects, large, nulls)] == [1, 0, 1]
    assert (nulls["nulls"], nulls["false_positives"]) == (1, 0)
