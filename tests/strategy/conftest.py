"""Checks that run on several ranks: scripts in ``ranks/``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ranks import run_ranks

RANKS_DIR = Path(__file__).parent / "ranks"


@pytest.fixture
def run_checks(tmp_path: Path) -> Callable[..., str]:
    """Runs checks of a script in ``ranks/`` on several ranks; fails naming those that failed.

    ``run_checks("engines.py", "check_one", "check_two", launcher=…, world_size=…)`` returns what the run wrote.
    """

    def run(script: str, *checks: str, work_dir: Path = tmp_path, world_size: int = 2, **options) -> str:
        for stale in work_dir.glob("results_*.json"):
            stale.unlink()
        result = run_ranks(RANKS_DIR / script, work_dir, *checks, world_size=world_size, check=False, **options)
        failures = []
        for rank in range(world_size):
            path = work_dir / f"results_{rank}.json"
            passed = json.loads(path.read_text()) if path.is_file() else {}
            for name in checks:
                if passed.get(name) != "passed":
                    failures.append(f"--- {name} on rank {rank}: {passed.get(name, 'did not run')}")
        if failures or result.returncode != 0:
            pytest.fail("\n".join([*failures, f"exit code {result.returncode}", result.output[-4000:]]), pytrace=False)
        return result.output

    return run
