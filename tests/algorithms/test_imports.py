"""The room stands on floor 0: its sources import torch, the standard library and themselves, and no process group."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import lightppo.algorithms

HOME = (
    "lightppo.algorithms.",
    "lightppo.errors.",
    "lightppo.option.",
    "lightppo.table.",
    "lightppo.user_code.",
)
MODULES = sorted(Path(lightppo.algorithms.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_source_uses_torch_and_itself_only(path: Path):
    tree = ast.parse(path.read_text())
    imported: set[str] = set()
    for_types = {
        id(node)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            assert node.attr not in {"distributed", "cuda"}, (
                f"{path.name}:{node.lineno}: .{node.attr}"
            )
    for name in imported:
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names | {"torch"} or name.startswith(HOME), name
        assert not name.startswith(("torch.distributed", "torch.cuda")), name
