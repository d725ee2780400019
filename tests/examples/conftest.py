"""Loading the example scripts, which are no package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.fixtures.small_runs import world

__all__ = ["quickstart", "rlhf", "world"]

EXAMPLES = Path(__file__).parents[2] / "examples"


def scripts_of(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], ModuleType]]:
    """``("task")`` imports ``examples/FOLDER/task.py`` as a script beside it would."""
    monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    names = [path.stem for path in (EXAMPLES / folder).glob("*.py")]
    for name in names:
        sys.modules.pop(name, None)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    yield from scripts_of("quickstart", monkeypatch)


@pytest.fixture
def rlhf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    yield from scripts_of("rlhf", monkeypatch)
