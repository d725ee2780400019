"""Loading the example scripts, which are no package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
_QUICKSTART = ("task", "make_assets", "reward", "summarize")


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """``quickstart("task")`` imports ``examples/quickstart/task.py`` as a script beside it would."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "quickstart"))
    for name in _QUICKSTART:
        sys.modules.pop(name, None)
    yield importlib.import_module
    for name in _QUICKSTART:
        sys.modules.pop(name, None)
