"""What the fault tests share: inputs, and the run that nothing happens to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.small_run import flags, outcome, write_inputs
from support.ranks import WITH_SUPPORT, RanksResult, run_ranks

SCRIPT = Path(__file__).with_name("faulty.py")


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_inputs(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def start(inputs: dict[str, str]) -> Callable[..., RanksResult]:
    """``start(folder, spec, **options)``: the small run on two forked ranks, with what ``spec`` tells faulty.py."""

    def start(folder: Path, spec: dict[str, Any] | None = None, check: bool = True, **options: Any):
        words = flags(inputs, folder, **options)
        return run_ranks(
            SCRIPT, json.dumps(spec or {}), *words, check=check, timeout=200, env=WITH_SUPPORT
        )

    return start


@pytest.fixture(scope="session")
def undisturbed(start: Callable[..., RanksResult], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outcome of the run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    start(folder)
    return outcome(folder)
