"""What benchmarks/staleness.py makes of accuracies, and its table."""

from __future__ import annotations

import pytest

CURVES = {
    "synchronous": [[0.5, 0.6, 0.7, 0.8, 0.9], [0.5, 0.6, 0.7, 0.8, 0.94]],
    "ahead": [[0.5, 0.5, 0.6, 0.7, 0.9], [0.5, 0.5, 0.6, 0.7, 0.9]],
}


def test_accuracies_at_equal_samples_and_at_equal_time(benchmark_script):
    sides = benchmark_script("staleness").results({"a setting": CURVES}, ratio=0.5)["a setting"]
    assert sides["synchronous"]["samples"][2] == pytest.approx((0.92, 0.02))
    assert sides["synchronous"]["difference"] == (0, 0)
    assert sides["synchronous"]["time"] == sides["synchronous"]["samples"][:2]
    ahead = sides["ahead"]
    assert [mean for mean, _ in ahead["samples"]] == pytest.approx([0.5, 0.6, 0.9])
    assert ahead["difference"] == pytest.approx((-0.02, 0.02))
    # while the synchronous run makes a quarter of its steps, this one makes half of them
    assert [mean for mean, _ in ahead["time"]] == pytest.approx([0.6, 0.9])


def test_between_evaluations_is_a_line_and_behind_the_last_one_nothing_changes(benchmark_script):
    accuracy_at = benchmark_script("staleness").accuracy_at
    shares = (0, 0.375, 0.5, 1, 1.7)
    assert [accuracy_at([0.0, 0.5, 1.0], share) for share in shares] == [0, 0.375, 0.5, 1, 1]


def test_the_table_and_its_place(benchmark_script):
    script, report = benchmark_script("staleness"), benchmark_script("report")
    data = {
        "date": "2026-01-01",
        "steps": 20,
        "ratio": 0.5,
        "settings": script.results({"a setting": CURVES}, ratio=0.5),
    }
    text = report.staleness_block(data)
    assert (
        "a setting, ahead | 2 | 0.500 | 0.600 | 0.900 ± 0.000 | -0.020 ± 0.020 | 0.600 | 0.900"
        in text
    )
    page = report.ASYNC_PAGE.read_text(encoding="utf-8")
    assert text in report.replace_block(page, "staleness", text)
