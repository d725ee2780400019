"""One option: what is brought into its type, what is refused; and sections of options."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import pytest

from lightppo.algorithms.entries import KL_ESTIMATORS, KLEntry, Table
from lightppo.option import Option, Section, option, range_text, type_text

Stage = Literal[0, 3]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (3, int, 3),
        (1e6, int, 1_000_000),
        ("12", int, 12),
        ("1e6", int, 1_000_000),
        (2**63 + 1, int, 2**63 + 1),
        (str(2**63 + 1), int, 2**63 + 1),  # a float in between would lose the 1
        (1, float, 1.0),
        ("1e-6", float, 1e-6),
        (math.inf, float, math.inf),
        (True, bool, True),
        ("None", str, "None"),
        (Path("a/b"), str, "a/b"),
        (None, str | None, None),
        (None, tuple[str, ...] | None, None),
        ([], tuple[str, ...], ()),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        ("a", tuple[str, ...], ("a",)),
        ([-10, 10], tuple[float, float] | None, (-10.0, 10.0)),
        (0, Stage, 0),
        (None, Stage | None, None),
    ],
)
def test_conform(value, kind, expected):
    result = Option("x", kind, None, "").conform(value)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (1.5, int, "a whole number"),
        (True, int, "a whole number"),
        (math.inf, int, "a whole number"),
        ("many", float, "a number"),
        (math.nan, float, "a number"),
        ("nan", float, "a number"),
        (None, float, "a number"),
        (0, bool, "true or false"),
        ("true", bool, "true or false"),
        (5, str, "text"),
        ({}, str | None, "text or None"),
        (1, Stage, "one of 0, 3"),
        (False, Stage, "one of 0, 3"),
        ("0", Stage, "one of 0, 3"),
        ([0.9], tuple[float, float], "2 numbers"),
        (0.9, tuple[float, float], "2 numbers"),
        ([1, "x"], tuple[int, ...], "a list of whole numbers"),
        (None, tuple[str, ...], "a list of texts"),
        ([["a"]], tuple[str, ...] | None, "a list of texts or None"),
    ],
)
def test_conform_refuses(value, kind, words):
    assert type_text(Option("x", kind, None, "")) == words
    with pytest.raises(ValueError, match=f"--x must be {words}") as error:
        Option("x", kind, None, "").conform(value)
    assert str(error.value).count(repr(value)) == 1


def test_ranges():
    share = Option("share", float, 0.5, "", ge=0, lt=0.5)
    assert (range_text(share), range_text(Option("x", int, 0, ""))) == ("≥0 <0.5", "")
    assert share.conform(0) == 0.0
    for bad in (-0.1, 0.5, math.nan):
        with pytest.raises(ValueError, match=r"--share must be a number ≥0 <0\.5, not"):
            share.conform(bad)
    both = Option("betas", tuple[float, float], (0.9, 0.9), "", gt=0, le=1)
    assert both.conform([1, 0.5]) == (1.0, 0.5)
    with pytest.raises(ValueError, match="--betas must be 2 numbers >0 ≤1"):
        both.conform([0.5, 0])  # each of them
    assert Option("x", float | None, None, "", gt=0).conform(None) is None


def test_names_are_those_of_a_table_also_of_later_ones():
    table = Table("--kl", {"k1": KL_ESTIMATORS["k1"]})
    kl = Option("kl", str | None, None, "", names=table)
    assert (kl.conform("k1"), kl.conform(None), type_text(kl)) == ("k1", None, "one of k1 or None")
    with pytest.raises(ValueError, match=r"--kl: .*'k9'"):
        kl.conform("k9")
    table["k9"] = KLEntry("lightppo.algorithms.kl:k2")
    assert kl.conform("k9") == "k9"


def test_a_choice_that_is_misspelt():
    with pytest.raises(
        ValueError,
        match=r"--engine must be one of fast, slow, not 'fats' \(did you mean 'fast'\?\)",
    ):
        Option("engine", Literal["fast", "slow"], "fast", "").conform("fats")


def test_what_is_set():
    steps = Option("steps", int, -1, "", off=(0,))
    assert [steps.is_set(value) for value in (-1, 0, 1)] == [False, False, True]


class PaperConfig(Section, resume_safe=True):
    """Paper."""

    size: Literal["A4", "A5"] = option("A4", "Format.")
    sheets: int = option(1, "Number.", ge=1, needs="size=A4")


def test_sections():
    assert (PaperConfig().size, PaperConfig(sheets=3).sheets) == ("A4", 3)
    assert PaperConfig(sheets=3) != PaperConfig() == PaperConfig(sheets=1)
    assert repr(PaperConfig()) == "PaperConfig(size='A4', sheets=1)"
    sheets = PaperConfig.options()["sheets"]
    assert (sheets.name, sheets.type, sheets.owner, sheets.needs) == (
        "sheets",
        int,
        "paper",
        ("size=A4",),
    )
    assert sheets.resume_safe
    with pytest.raises(
        TypeError, match=r"PaperConfig has no option 'sheet' \(did you mean 'sheets'\?\)"
    ):
        PaperConfig(sheet=1)
    with pytest.raises(AttributeError, match="PaperConfig has no option 'sheet'"):
        _ = PaperConfig().sheet


def test_what_an_option_may_say():
    with pytest.raises(TypeError, match="min"):
        option(1, "help", min=0)
