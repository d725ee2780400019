"""The room stands on floor 0: torch and the standard library, no process group, nothing heavy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lightppo.algorithms

ROOM = Path(lightppo.algorithms.__file__).parent
HOME = ("lightppo.algorithms.", "lightppo.errors.", "lightppo.option.")
MODULES = sorted(ROOM.glob("*.py"))


def test_importing_the_room_loads_nothing_heavy():
    names = [f"lightppo.algorithms.{path.stem}" for path in MODULES if path.stem != "__init__"]
    assert "lightppo.algorithms.losses" in names
    code = (
        "import importlib, json, sys\n"
        f"for name in ['lightppo.algorithms', *{names!r}]: importlib.import_module(name)\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))\n"
    )
    # The directory of the package on the path, not the current one: the test may run from anywhere.
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOM.parent.parent
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.strip().splitlines()[-1]))
    assert {"torch", "lightppo"} <= loaded
    heavy = {"transformers", "deepspeed", "datasets", "vllm", "peft", "accelerate", "tyro", "wandb", "matplotlib"}
    assert not loaded & heavy


def test_the_tables_need_no_torch():
    """The command line reads the entries before anything heavy is loaded."""
    code = "import sys, lightppo.algorithms.entries; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOM.parent.parent
    )
    assert done.stdout.split()[-1:] == ["False"], done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_source_uses_torch_and_itself_only(path: Path):
    tree = ast.parse(path.read_text())
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            assert node.attr not in {"distributed", "cuda"}, f"{path.name}:{node.lineno}: .{node.attr}"
    for name in imported:
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names | {"torch"} or name.startswith(HOME), name
        assert not name.startswith(("torch.distributed", "torch.cuda")), name
