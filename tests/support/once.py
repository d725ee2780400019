"""What takes long is made once for all processes of pytest-xdist."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from filelock import FileLock


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What ``make`` returns, JSON: the first test process that comes makes it, others wait for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make()
    shared = factory.getbasetemp().parent
    with FileLock(str(shared / f"{name}.lock"), timeout=1100):
        result = shared / f"{name}.json"
        if not result.exists():
            result.write_text(json.dumps(make()))
        return json.loads(result.read_text())
