"""Samples whose advantages are all 0 have no gradient: they are left out of backward passes, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks

from lightppo.algorithms.entries import POLICY_LOSSES
from lightppo.algorithms.losses import PolicyLoss
from lightppo.algorithms.masking import LossNormalizer

SCRIPT = Path(__file__).parent / "ranks" / "silent_samples.py"


@pytest.mark.parametrize("world", [1, 2])
def test_steps_are_the_same(world: int, tiny_model, tmp_path) -> None:
    """Also a step in which no sample has an advantage, which moves weights by Adam's moments and weight decay."""
    out = tmp_path / "found"
    run_ranks(SCRIPT, tiny_model, out, world_size=world, timeout=300)
    for rank in range(world):
        found = torch.load(f"{out}.{rank}")
        for stage in (0, 2, 3):
            plain, ours = found[stage, False], found[stage, True]
            for name, expected in plain["weights"].items():
                torch.testing.assert_close(
                    ours["weights"][name], expected, rtol=1e-5, atol=1e-6, msg=f"{stage} {name}"
                )
            assert (
                ours["numbers"][1]["actor_grad_norm"] == 0 < ours["numbers"][0]["actor_grad_norm"]
            )
            for before, now in zip(plain["numbers"], ours["numbers"], strict=True):
                assert now == pytest.approx(before, rel=1e-4, abs=1e-6), stage
            # of two samples a micro batch: alone two in each step; now one, and with two ranks one each
            assert (plain["passes"], ours["passes"]) == ((4, 2) if world == 1 else (2, 2))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_that_is_linear_in_advantages_has_no_gradient_without(name: str) -> None:
    """And the others have one, but for what acts only elsewhere."""
    entry = POLICY_LOSSES.find(name)
    log_probs = torch.tensor([[-1.0, -0.2, -9.0, -40.0]], requires_grad=True)
    old = torch.tensor([[-1.5, -3.0, -0.1, -0.1]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    options = {option: 0.5 for option in entry.defaults if option.endswith("_coef")}
    loss_fn = PolicyLoss(policy_loss=name, options=options)
    selected = mask if loss_fn.selects_tokens else None
    loss, _ = loss_fn(
        log_probs, old, torch.zeros(1, 4), mask, LossNormalizer(4, 1), selected=selected
    )
    loss.backward()
    assert (log_probs.grad == 0).all() == entry.linear_in_advantages
