"""Sums of gradients in few calls; that no weight changes is tried on ranks, by test_deepspeed.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightppo.distributed import fused_zero


def test_sums_are_those_of_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a gradient is missing, and where one alone has more numbers than are copied at once."""
    monkeypatch.setattr(fused_zero, "_COPIED_ELEMENTS", 12)
    shapes = [(2, 3), (4,), (3,), (2,), (5, 4), (2, 2), (3, 2), (1,)]
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    flat = torch.randn(1 + sum(parameter.numel() for parameter in parameters))  # with padding
    sums = flat[:-1].split([parameter.numel() for parameter in parameters])
    expected = [part.clone() for part in sums]
    for place, parameter in enumerate(parameters):
        if place not in (0, 3, 7):
            parameter.grad = torch.randn_like(parameter)
            expected[place] += parameter.grad.float().flatten()
    padding = flat[-1].clone()
    optimizer = SimpleNamespace(
        bf16_groups=[parameters], fp32_groups_gradients=[sums], fp32_groups_gradients_flat=[flat]
    )
    fused_zero._add_all(optimizer)
    assert torch.equal(flat, torch.cat([*expected, padding[None]]))
    assert all(parameter.grad is None for parameter in parameters)
    (norm,), _ = fused_zero._for_norm(optimizer)
    assert norm == pytest.approx(float(flat[:-1].double().norm()), rel=1e-12)


def test_an_optimizer_with_other_parts_stays_and_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer = type("BF16_Optimizer", (), {"update_hp_grads": None, "bf16_groups": []})()
    fused_zero.fuse_gradient_calls(optimizer)
    assert vars(optimizer) == {}
    assert "has no get_grads_for_norm, fp32_groups_gradients, " in caplog.text
    assert "deepspeed 0.19.8" in caplog.text


def test_others_stay_silently(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    before = dict(vars(optimizer))
    fused_zero.fuse_gradient_calls(optimizer)
    assert (vars(optimizer), caplog.text) == (before, "")
