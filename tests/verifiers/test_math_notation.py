from __future__ import annotations

import pytest

from lightppo.verifiers.math_notation import canonical, exclude_each_other, is_unit


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("√2", r"\sqrt{2}"),
        ("sqrt(x+1)", r"\sqrt{x+1}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\frac\pi2", r"\frac{\pi}{2}"),
        ("x²³", "x^{23}"),
        ("x₁", "x_{1}"),
        ("x^(n+1)", "x^{n+1}"),
        ("2^10", "2^{10}"),
        ("½", r"\frac{1}{2}"),
        ("2½", r"(2+\frac{1}{2})"),
        ("2 1/2", r"(2+\frac{1}{2})"),
        (r"5\frac{3}{2}", r"5 \cdot \frac{3}{2}"),  # no mixed number
        ("25 000", "25000"),
        ("0.1\\overline{6}", r"\frac{15}{90}"),
        ("−3 ≤ x", r"-3 \le x"),
        ("5pi", r"5\pi"),
        ("sin x", r"\sin x"),
        (r"2\text{ men}", r"2 \text{men}"),
        ("5 apples", r"5 \text{apples}"),
        (r"C\mathrm{e}^{-x}", "Ce^{-x}"),
        (r"6\,\mathrm{m}", r"6 \text{m}"),
        ("4:30 P.M.", r"4:30 \text{pm}"),
        ("α", r"\alpha"),
        (r"\\frac{1}{2}", r"\frac{1}{2}"),  # with the escapes of JSON
    ],
)
def test_one_notation(written: str, read: str) -> None:
    assert canonical(written).replace("  ", " ") == read


@pytest.mark.parametrize(
    ("word", "attached", "unit"),
    [("cm", True, True), ("xyz", True, False), ("apples", False, True), ("ab", False, False)],
)
def test_units(word: str, attached: bool, unit: bool) -> None:
    assert is_unit(word, attached) is unit


@pytest.mark.parametrize(
    ("ours", "theirs", "exclude"),
    [
        (("pm",), ("am",), True),
        (("km", "hour"), ("miles", "hour"), True),
        (("feet",), ("ft",), False),
        (("cm^2",), ("cm^3",), True),
        (("cm^2",), ("cm",), False),
        (("apples",), ("pears",), False),
        (("pm",), (), False),
    ],
)
def test_words_that_exclude_each_other(
    ours: tuple[str, ...], theirs: tuple[str, ...], exclude: bool
) -> None:
    assert exclude_each_other(ours, theirs) is exclude
