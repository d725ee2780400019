"""Loading the benchmark scripts, which are no package."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.scripts import beside

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_script() -> Iterator[Callable[[str], ModuleType]]:
    """``benchmark_script("workloads")`` imports ``benchmarks/workloads.py`` as a script beside it would."""
    with beside(BENCHMARKS):
        yield importlib.import_module
