"""A step ahead the quickstart's task is learned as well as without, and worse without the correction.

No server runs: a run with ``--max_staleness 1`` equals, to the last bit, one that samples batch t + 1 before it trains
step t (tests/trainer/test_ahead_runs.py compares real servers). These runs do so, in this process.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterator

import pytest
from support.ranks import REPO
from support.scripts import beside

SETTING = "learning rate × 3"  # of which a step changes the policy so much that a stale one differs
SEEDS = (1, 2, 3)


@pytest.fixture
def script() -> Iterator[object]:
    with beside(REPO / "benchmarks"):
        yield importlib.import_module("staleness")


@pytest.mark.learning
@pytest.mark.timeout(5400)
def test_a_step_ahead_learns_as_well_and_worse_without_the_correction(world, script, tmp_path):
    script.make_model(tmp_path / "model")
    ends = {
        side: [
            script.train(
                tmp_path / "model",
                tmp_path / "run",
                [*script.SETTINGS[SETTING], *flags],
                steps=script.STEPS,
                seed=seed,
            )[-1]
            for seed in SEEDS
        ]
        for side, flags in script.SIDES.items()
    }
    lost, lost_uncorrected = (
        [one - other for one, other in zip(ends["synchronous"], ends[side], strict=True)]
        for side in ("ahead", "ahead, not corrected")
    )
    # Measured: TODO
    _, error = script.mean_and_error(lost)
    assert statistics.fmean(lost) < 0.02 + 2 * error, ends
    assert statistics.fmean(lost_uncorrected) > 0.06, ends
