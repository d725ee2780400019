"""The house: imports run downward only, and the light parts stay light."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightppo.plugin import PUBLIC

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightppo"

# A room imports those of lower floors only, at whatever depth.
FLOORS = {
    "callbacks": 0,
    "errors": 0,
    "files": 0,
    "http_client": 0,
    "http_deadline": 0,
    "metric_names": 0,
    "option": 0,
    "plugin": 0,
    "plugins": 0,
    "ranks": 0,
    "redaction": 0,
    "storage": 0,
    "suggestions": 0,
    "table": 0,
    "tensor_file": 0,
    "user_code": 0,
    "version": 0,
    "zero3": 0,
    "algorithms": 1,
    "config": 2,
    "checkpoint": 3,
    "data": 3,
    "processes": 3,
    "distributed": 4,
    "models": 5,
    "rewards": 6,
    "rollout": 7,
    "verifiers": 7,
    "experience": 8,
    "episodes": 9,
    "logging": 9,
    "audit": 10,
    "preflight": 10,
    "trainer": 11,
    "supervised": 12,
    "experiments": 13,
    "compat": 10,
    "cli": 14,
    "__main__": 15,
}


def public_names() -> dict[str, str]:
    """What ``lightppo/__init__.py`` resolves: name → module."""
    return dict(PUBLIC)


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import that runs, at whatever depth; those for type checkers do not."""
    tree = ast.parse(source)
    unseen = {
        id(n)
        for block in ast.walk(tree)
        if _is_type_checking(block)
        for s in block.body
        for n in ast.walk(s)
    }
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                if node.level
                else None
            )
            base = ".".join(part for part in (above, node.module) if part)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((node.lineno, a.value) for a in node.args if isinstance(a, ast.Constant))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def violations(source: str, room: str, package: str) -> list[tuple[int, str]]:
    """Imports of another room that is not below."""
    found = []
    for line, name in imports(source, package):
        parts = name.split(".")
        if parts[0] != "lightppo":
            continue
        if len(parts) > 1 and parts[1] in public_names():
            parts = public_names()[parts[1]].split(".")
        target = parts[1] if len(parts) > 1 else None
        if target in FLOORS and target != room and FLOORS[target] >= FLOORS[room]:
            found.append((line, name))
    return found


MODULES = sorted(PACKAGE.glob("*/**/*.py"))


STRUCTURE = (
    "circles of imports at module level",
    "circles of imports, with those inside functions",
    "circles of imports, with those for type checkers",
    "names of files in several rooms",
    "functions of more than 70 lines",
    "names with two classes",
    "public classes replaced at import",
    "entries of tables that are replaced",
)


@pytest.fixture(scope="module")
def shape() -> dict:
    """What ``make house`` reads of the structure."""
    spec = importlib.util.spec_from_file_location("house", ROOT / "benchmarks" / "house.py")
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    return house.shape(ROOT)


@pytest.mark.parametrize("measure", STRUCTURE)
def test_the_house_has_none_of(measure, shape):
    assert shape[measure] == []


def test_every_room_has_its_floor():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert rooms | files == set(FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_run_downward_only(path: Path):
    room = path.relative_to(PACKAGE).parts[0]
    package = ".".join(path.relative_to(ROOT).parent.parts)
    found = violations(path.read_text(), room, package)
    assert not found, [f"{path.relative_to(ROOT)}:{line} imports {name}" for line, name in found]


@pytest.mark.parametrize(
    ("room", "source", "lines"),
    [
        ("algorithms", "from lightppo.config import PPOConfig", [1]),
        ("rollout", "from lightppo.verifiers import math", [1]),  # the same floor
        ("config", "from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS", []),
        ("trainer", "import torch\nfrom lightppo.models.actor import Actor", []),
        ("models", "import lightppo.rollout.hf as hf", [1]),
        ("models", "def f():\n    from lightppo.rollout.hf import HFRolloutEngine", [2]),
        ("models", "from ..trainer import update", [1]),
        ("models", "from . import packing", []),
        ("models", "from lightppo import Critic, PPOTrainer", [1]),  # the one of the floor above
        (
            "models",
            "import importlib\nimportlib.import_module('lightppo.rewards.reward_model')",
            [2],
        ),
        (
            "rollout",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lightppo.trainer.update",
            [],
        ),
        ("rollout", "if TYPE_CHECKING:\n    pass\nelse:\n    import lightppo.trainer.update", [4]),
        (
            "rewards",
            "from lightppo.data.records import Rollout\nfrom lightppo.rollout.engine import E",
            [2],
        ),
    ],
)
def test_the_check_itself(room, source, lines):
    assert [line for line, _ in violations(source, room, f"lightppo.{room}")] == lines


def test_no_file_without_a_subject():
    names = {path.name for path in PACKAGE.rglob("*.py")}
    assert not names & {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


@pytest.mark.parametrize(
    "module",
    ["lightppo", "lightppo.config", "lightppo.algorithms", "lightppo.preflight.before_imports"],
)
def test_light_parts_stay_light(module):
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    loaded = {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    heavy = {
        "deepspeed",
        "transformers",
        "vllm",
        "datasets",
        "accelerate",
        "peft",
        "wandb",
        "matplotlib",
    }
    if module != "lightppo.algorithms":
        heavy.add("torch")
    if module in ("lightppo", "lightppo.config"):
        heavy.add("numpy")
    assert "lightppo" in loaded
    assert not loaded & heavy


def test_public_names_point_to_definitions():
    """Read from the source: importing them all takes what the test above forbids."""
    for name, module in public_names().items():
        path = ROOT / Path(*module.split("."))
        source = (
            path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        ).read_text()
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        defined = {n.name for n in ast.parse(source).body if isinstance(n, kinds)}
        imported = {
            (a.asname or a.name)
            for n in ast.parse(source).body
            if isinstance(n, ast.ImportFrom)
            for a in n.names
        }
        assert name in defined | imported, f"lightppo.{name}: not in {module}"


def test_a_public_name_has_one_class():
    """An editor finds one class or function of this name in the package."""
    homes: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                homes.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    twice = {name: homes[name] for name in public_names() if len(homes.get(name, ())) > 1}
    assert not twice
