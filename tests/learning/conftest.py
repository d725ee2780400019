"""What the learning runs share: the process group, and one warm start per session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock
from support.addition import warm_start

__all__ = ["better", "warm"]


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the warm start. Under xdist the first worker makes it and the others wait."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, unfinished = root / "warm_start", root / "warm_start.unfinished"
    with FileLock(root / "warm_start.lock"):
        if not folder.exists():
            unfinished.mkdir()
            warm_start(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def better(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a model that answers six of seven sums right when it samples."""
    folder = tmp_path_factory.mktemp("better")
    warm_start(folder, seed=2, smoothing=0.0)
    return str(folder / "model")
