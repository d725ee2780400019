"""docs/faults.md: the tests that it names are there."""

from __future__ import annotations

import ast
import re

from support.ranks import REPO


def test_every_promise_names_a_test_that_exists():
    lines = (REPO / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.count(" | ") == 1 and not line.startswith("promise |")]
    assert len(rows) > 9
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test: {row}"
        for file, test in named:
            tree = ast.parse((REPO / file).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
                f"{file}::{test}"
            )
