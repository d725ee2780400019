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
    assert norm == pytest.approx(float(flat[:-1].double().norm()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_norm_of_many_numbers(dtype: torch.dtype) -> None:
    """3, 4 and 0 times √2²⁴ is 5 · 2¹²; added one by one in float32 it would be 0.07% less."""
    gradients = [torch.full((4096, 4096), 3.0, dtype=dtype), torch.zeros(5, dtype=dtype)]
    gradients.append(torch.full((1 << 24,), 4.0, dtype=dtype))
    norm = fused_zero.total_norm(gradients)
    assert norm.dtype is torch.double
    assert float(norm) == pytest.approx(5 * 4096, rel=1e-6)
    assert float(fused_zero.total_norm([])) == 0


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
