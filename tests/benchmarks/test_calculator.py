"""What `lightppo memory` predicts against what runs hold: small runs here; `long`: the 20 of docs/memory.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.ranks import run_ranks

from .conftest import BENCHMARKS

SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 1024}


def difference(calculator: ModuleType, name: str, folder: Path, changes: dict[str, int]) -> float:
    """Prediction over measurement, less 1."""
    ranks, _, own = calculator.ROWS[name]
    calculator.write_assets(folder, {**changes, **own})
    options = calculator.options_of(name, folder) | ({"generate_max_len": 16} if changes else {})
    (folder / "options.json").write_text(json.dumps(options))
    run_ranks(BENCHMARKS / "calculator.py", "--rank", folder, world_size=ranks)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    measured = max(size for rank in found for phase, size in rank.items() if phase != "resident")
    return max(calculator.predicted(options, ranks).values()) / measured - 1


@pytest.mark.parametrize(
    "name",
    [
        "bf16, ZeRO 2",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("fp32, ZeRO 0", "LoRA")),
    ],
)
def test_small_runs_hold_what_was_predicted(
    name: str, tmp_path: Path, benchmark_script: Callable[[str], ModuleType]
) -> None:
    assert abs(difference(benchmark_script("calculator"), name, tmp_path, SMALL)) < 0.1


@pytest.mark.long
def test_all_rows_of_the_page_are_within_10_percent(
    tmp_path: Path, benchmark_script: Callable[[str], ModuleType]
) -> None:
    calculator = benchmark_script("calculator")
    assert len(calculator.ROWS) >= 20
    found = {
        name: difference(calculator, name, tmp_path / str(i), {})
        for i, name in enumerate(calculator.ROWS)
    }
    limits = {"LoRA, bf16, ZeRO 3": 0.11}  # what the page says of it
    assert {
        name: share for name, share in found.items() if abs(share) > limits.get(name, 0.1)
    } == {}
