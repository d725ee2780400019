"""The way of a reader in docs/dataflow.md: at most 15 files, and a run enters them in this order."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import CodeType

import pytest
from support.ranks import REPO

from lightppo import PPOTrainer

ROW = re.compile(r"^\|? ?(\d+) \| `([\w/]+\.py)` \| (.*)$", re.MULTILINE)


def path_of(file: str) -> Path:
    return REPO / file if file.startswith("examples/") else REPO / "lightppo" / file


def reading_path() -> dict[str, list[str]]:
    """File → functions to read in it."""
    rows = ROW.findall((REPO / "docs" / "dataflow.md").read_text(encoding="utf-8"))
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    return {file: re.findall(r"`([\w.]+)`", text.replace(".py`", "")) for _, file, text in rows}


def functions_of(file: str) -> set[str]:
    """Qualified names of its functions."""
    tree = ast.parse(path_of(file).read_text(encoding="utf-8"))
    homes = [
        ("", tree),
        *((f"{node.name}.", node) for node in tree.body if isinstance(node, ast.ClassDef)),
    ]
    return {
        prefix + node.name
        for prefix, home in homes
        for node in home.body
        if isinstance(node, ast.FunctionDef)
    }


def test_the_way_has_at_most_15_files_and_names_functions_of_theirs():
    way = reading_path()
    assert 10 <= len(way) <= 15
    for file, names in way.items():
        assert names
        assert set(names) <= functions_of(file), file


@pytest.mark.usefixtures("world")
def test_a_run_enters_them_in_this_order(make_config, monkeypatch):
    # which go the way in small before the first step
    for probe in ("check_padding", "check_decoding"):
        monkeypatch.setattr(f"lightppo.preflight.run_checks.{probe}", lambda *args, **options: None)
    entered: dict[tuple[str, str], None] = {}  # in the order of the first call

    def note(code: CodeType) -> None:
        if code.co_filename.startswith(str(REPO / "lightppo")):
            entered.setdefault((code.co_filename, code.co_qualname))

    config = make_config(total_training_steps=1)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: note(frame.f_code) if event == "call" else None)
    try:
        PPOTrainer.from_config(config).fit()
    finally:
        sys.setprofile(before)
    compat = str(REPO / "lightppo" / "compat")
    assert [name for file, name in entered if file.startswith(compat)] == []
    expected = [
        (str(path_of(file)), name)
        for file, names in list(reading_path().items())[1:]
        for name in names
    ]
    assert [step for step in expected if step not in entered] == []
    first = {file: names[0] for file, names in list(reading_path().items())[1:]}
    places = [list(entered).index((str(path_of(file)), name)) for file, name in first.items()]
    assert list(first) == [file for _, file in sorted(zip(places, first))]
