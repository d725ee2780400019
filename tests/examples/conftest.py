"""Loading the example scripts, which are no package."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.scripts import beside

__all__ = ["quickstart", "real", "rlhf"]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def quickstart() -> Iterator[Callable[[str], ModuleType]]:
    """``quickstart("task")`` imports ``examples/quickstart/task.py`` as a script beside it would."""
    with beside(EXAMPLES / "quickstart"):
        yield importlib.import_module


@pytest.fixture
def rlhf() -> Iterator[Callable[[str], ModuleType]]:
    """The same of ``examples/rlhf``."""
    with beside(EXAMPLES / "rlhf"):
        yield importlib.import_module


@pytest.fixture
def real() -> Iterator[Callable[[str], ModuleType]]:
    """The same of ``examples/real``."""
    with beside(EXAMPLES / "real"):
        yield importlib.import_module
