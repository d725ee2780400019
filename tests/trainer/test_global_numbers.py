"""One rank and two (gloo) agree on everything that is over all ranks, however samples are spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "global_numbers.py"
ESTIMATORS = ("gae", "reinforce", "reinforce++_baseline", "grpo", "gpg", "group_adv_norm")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tiny_model, tmp_path_factory) -> dict[int, dict[Any, Any]]:
    """What each number of ranks found."""
    out, cases = tmp_path_factory.mktemp("global"), {}
    for world_size in (1, 2):
        path = out / f"{world_size}.pt"
        run_ranks(SCRIPT, tiny_model, path, world_size=world_size, timeout=300)
        cases[world_size] = torch.load(path)
    return cases


@pytest.mark.parametrize("spread", [0, 1], ids=["uneven", "all on one rank"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_samples_and_statistics(found, estimator, spread):
    alone, ranks = found[1][0, estimator], found[2][spread, estimator]
    for step in (1, 2):
        rows, expected = ranks[f"rows {step}"], alone[f"rows {step}"]
        assert rows.keys() == expected.keys()
        for key, row in expected.items():
            for name, numbers in row.items():
                torch.testing.assert_close(
                    rows[key][name], numbers, rtol=1e-5, atol=1e-6, msg=f"{key} {name}"
                )
        assert ranks[f"status {step}"] == pytest.approx(
            alone[f"status {step}"], rel=1e-6, abs=1e-7, nan_ok=True
        )
        assert sum(int(row["selected"].sum()) for row in expected.values()) > 0
    assert ranks["kl coefficient"] == pytest.approx(alone["kl coefficient"], rel=1e-9)
    assert alone["kl coefficient"] != 0.1
    for name in ("score statistics", "value statistics"):
        assert (ranks[name] is None) == (alone[name] is None)
        if alone[name] is not None:
            assert flat(ranks[name]) == pytest.approx(flat(alone[name]), rel=1e-9)


def flat(state: dict[str, Any]) -> dict[str, float]:
    """The numbers of a state, nested or not."""
    numbers: dict[str, float] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            numbers |= {f"{key}.{inner}": number for inner, number in flat(value).items()}
        elif isinstance(value, (int, float)):
            numbers[key] = value
    return numbers


def test_the_early_stop_is_one_decision(found):
    """Calm: ratio 1. Torn: the samples of rank 1 are beyond 4, e² = 7.4, those of rank 0 and the mean are not. Wild:
    the mean is beyond it, and no rank steps."""
    for name, stopped in (("calm", 0.0), ("torn", 0.0), ("wild", 1.0)):
        ratio, moved, stop = found[1]["early stop"][name]
        other_ratio, other_moved, other_stop = found[2]["early stop"][name]
        assert (moved, stop) == (other_moved, other_stop) == (not stopped, stopped), name
        assert other_ratio == pytest.approx(ratio, rel=1e-4)
    assert found[1]["early stop"]["calm"][0] == pytest.approx(1.0, abs=1e-4)
    assert 1.5 < found[1]["early stop"]["torn"][0] < 4.0
