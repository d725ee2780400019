"""docs/models.md: its table is what was measured, the code still does it, and nothing in it is wrong without a word."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from families import measure, table
from families.zoo import FAMILIES, families_here
from support.ranks import run_ranks

from lightppo.models.attention.recurrent import before_known_code

ROWS = measure.stored()["families"]
# One of each kind: full attention, fused experts, recurrent layers, one that is refused.
FEW = ("llama", "deepseek_v3", "jamba", "phimoe")
TOGETHER = 8  # families of one process


def groups(names: list[str]) -> list[list[str]]:
    return [names[first : first + TOGETHER] for first in range(0, len(names), TOGETHER)]


def measured(names: list[str] | tuple[str, ...], folder: Path, vllm: bool = False) -> dict:
    """What each column says of each family, now."""
    words = [*names, "--jobs", "0", "--into", str(folder / "seen.json"), *["--vllm"] * vllm]
    run_ranks(Path(measure.__file__), *words, world_size=1, vllm=vllm, timeout=800)
    seen = json.loads((folder / "seen.json").read_text())
    return {
        family: {column: cell["says"] for column, cell in row.items()}
        for family, row in seen.items()
    }


def expected(names: list[str] | tuple[str, ...], vllm: bool = False) -> dict:
    """The same, as the page says it."""
    return {
        family: {
            column: cell["says"]
            for column, cell in ROWS[family].items()
            if (column == measure.OF_VLLM) == vllm
        }
        for family in names
    }


def test_the_page_has_what_was_measured():
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.page_with_table(page), "make docs"


def test_every_family_has_every_column_and_nothing_is_wrong():
    from families.columns import COLUMNS

    assert list(ROWS) == list(FAMILIES)
    assert len(ROWS) >= 45
    for family, row in ROWS.items():
        assert row.keys() | {measure.OF_VLLM} == COLUMNS.keys(), f"make families FAMILIES={family}"
        for column, cell in row.items():
            assert cell["says"] in ("yes", "refused", "other way"), (family, column, cell)
            assert (cell["says"] == "yes") == ("why" not in cell)


@pytest.mark.slow
def test_a_few_families_are_as_the_page_says(tmp_path):
    rows = expected(FEW)
    if before_known_code():
        rows["jamba"] |= dict.fromkeys(("packs", "shares prompts", "decodes"), "other way")
    assert measured(FEW, tmp_path) == rows


@pytest.mark.long
@pytest.mark.parametrize("names", groups(list(FAMILIES)), ids=lambda names: names[0])
def test_all_families_are_as_the_page_says(names, tmp_path):
    names = [name for name in names if name in families_here()]
    seen = measured(names, tmp_path)
    if metadata.version("transformers") == measure.stored()["versions"]["transformers"]:
        assert seen == expected(names)
    # other releases pack and decode other families, but none is wrong without a word
    says = {(name, column): word for name in names for column, word in seen[name].items()}
    assert not {cell: word for cell, word in says.items() if word in ("wrong", "fails")}


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize(
    "names",
    groups([family for family, row in ROWS.items() if measure.OF_VLLM in row]),
    ids=lambda names: names[0],
)
def test_vllm_has_the_families_that_the_page_says(names, tmp_path):
    assert measured(names, tmp_path, vllm=True) == expected(names, vllm=True)
