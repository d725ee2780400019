"""Numbers in any notation, and what is told at once; None: it takes algebra."""

from __future__ import annotations

from fractions import Fraction

import pytest

from lightppo.verifiers.math_numbers import as_number, compare


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("72", "72", True),
        ("72", "72.00", True),
        ("72", "73", False),
        ("1,234", "1234", True),
        ("1{,}234.5", "1234.50", True),
        ("1,234", "1,235", False),
        ("10000", r"10,\!000", True),
        (r"10,\! 000", "10{,}000", True),
        (r"1\,000\,000", "1000000", True),
        ("10000", r"10,\!001", False),
        ("(1, 2)", r"(1,\,2)", True),
        ("2516_8", "2516_{8}", True),
        ("2516_8", r"x = \text{2516}_{8}", True),
        ("2516_8", "2516", True),  # the question names the base
        ("2516_8", "2516_7", False),
        ("2516_8", "1358", False),
        ("1001_2", "9", False),  # the same number is not the answer
        ("A2_{16}", "A3_{16}", False),
        ("A_1", "A_2", None),  # a name
        ("2", r"x \le 2", None),
        (r"x \geq 2", "2", None),
        ("2", r"\left(x\right)", None),
        ("1000001", "1000000", False),  # integers are equal or not, however large
        ("$18", "18 dollars", True),
        (r"\$18", "-$18", False),
        ("1st", "1", True),
        ("17", r"17^{\text{th}}", True),
        ("1st", "2", False),
        (r"2\text{ m}^2", "2 m²", True),
        (r"2\text{ m}^2", "3 m²", None),
        ("-5", "−5", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac12", r"\dfrac{2}{4}", True),
        (r"-\frac{1}{2}", r"\frac{-1}{2}", True),
        (r"1\frac{1}{2}", "1 1/2", True),
        ("3/4", r"\tfrac34", True),
        ("1/3", "0.333333", True),  # six significant digits, rounded
        ("1/3", "0.33333", False),  # five
        ("2/3", "0.666666", False),  # cut off, not rounded
        ("0.333333", "1/3", True),
        ("0.3", "0.30000000000000004", True),  # a float's noise
        ("50%", r"50\%", True),
        ("50", r"50\%", True),  # the sign may be a unit
        ("0.5", "50 percent", True),  # or a division by 100
        ("50%", "0.5", True),
        ("50%", "5", False),
        ("50", "0.5", False),  # no sign, no division
        ("5", r"5 \text{ meters}", True),
        ("5", r"5\text{ m}^2", True),
        ("5", "5cm", True),
        ("60 miles per hour", "60", True),
        ("60 miles/hour", "61", False),
        (r"90^\circ", "90", True),
        ("2 million", "2,000,000 dollars", True),
        (r"1.5 \times 10^3", "1500", True),
        ("1e3", "1000", True),
        ("5", "x = 5", True),
        (r"\text{Monday}", "monday", True),
        ("A", r"(\text{A})", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        ("5", "5xy", None),  # a product, no unit
        ("144", "12^2", None),
        ("2", "2 x", None),
        ("5", "5 and 6", None),
        ("5", "2 sin x", None),
        ("300", "3 hundred thousand", None),
        ("1", r"\frac{1}{0}", None),
        ("two", "2", None),
        ("9" * 5000, "8" * 5000, None),  # longer than Python reads integers
    ],
)
def test_equal_without_algebra(gold: str, answer: str, equal: bool | None) -> None:
    assert compare(gold, answer) is equal


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("25 000", "25,000", True),
        ("25 000", "0", False),
        ("25 000 euros", "25000", True),
        ("20€", "€20", True),
        ("20€", "20 dollars", False),
        ("3 p.m.", "3 PM", True),
        ("3 p.m.", "3 a.m.", False),
        (r"3\text{ p.m.}", "3", True),
        ("5 cm", "5 mm", False),
        ("5 cm^2", "5 cm^3", False),
        ("5 cm²", "5 cm", True),
        ("20% increase", r"20\% \text{ decrease}", False),
        ("28 pct", r"28\%", True),
        ("2 1/2", "2.5", True),
        ("2 1/2", "21/2", False),
        ("2 5/2", "4.5", None),  # a product, or a mistake
        ("x = 5", "x=5", True),
        ("x = 5", "y = 5", None),
        ("1,234", "1, 234", None),
    ],
)
def test_units_and_spaces(gold: str, answer: str, equal: bool | None) -> None:
    assert compare(gold, answer) is equal
    assert compare(answer, gold) is equal


def test_what_is_read() -> None:
    number = as_number("-1 234.50 km")
    assert number is not None
    assert (number.value, number.decimals, number.digits) == (Fraction("-1234.5"), 2, 6)
    assert as_number("5xyz") is None
