"""What benchmarks and examples import of lightppo is there, also where only a long run or a GPU comes to the line."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")]


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of each import from lightppo at any depth; no name: the module itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightppo":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from ((name, "") for name in names if name.split(".")[0] == "lightppo")


def is_there(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return (
        not name or hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None
    )


@pytest.mark.parametrize(
    "path", sorted(SCRIPTS), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_what_is_imported_is_there(path):
    missing = [
        f"{module}: {name}"
        for module, name in imported(path)
        # vLLM's own processes import it
        if not module.startswith("lightppo.rollout.vllm.") and not is_there(module, name)
    ]
    assert not missing


def test_a_name_that_is_gone_is_found(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "def late():\n    from lightppo.rollout import no_such_room\n    import lightppo.option\n"
    )
    assert [is_there(*one) for one in imported(script)] == [False, True]
