"""Loading the benchmark scripts, which are no package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """``benchmark_script("workloads")`` imports ``benchmarks/workloads.py`` as a script beside it would."""
    names = {path.stem for path in BENCHMARKS.glob("*.py")}
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)
