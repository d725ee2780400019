"""The KL over the vocabulary. tests/algorithms/test_kl.py has the estimators of sampled tokens, by name."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightppo.algorithms.kl import full_kl

NAN, INF = float("nan"), float("inf")


def random_logits(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_by_hand():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    logits = p.log().requires_grad_()
    kl = full_kl(logits, q.log())
    # 0.5·ln 2 + 0.25·0 + 0.25·(-ln 2) = 0.25 ln 2
    torch.testing.assert_close(kl, torch.tensor([0.25 * math.log(2)]))
    kl.sum().backward()
    # p(d - KL) with d = ln 2, 0, -ln 2: 0.5·0.75, 0.25·(-0.25), 0.25·(-1.25), each times ln 2
    torch.testing.assert_close(logits.grad, math.log(2) * torch.tensor([[0.375, -0.0625, -0.3125]]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_against_torch_distributions(temperature):
    logits, ref = random_logits(0, (5, 7)), random_logits(1, (5, 7))
    categorical = torch.distributions.Categorical
    expected = torch.distributions.kl_divergence(
        categorical(logits=logits / temperature), categorical(logits=ref / temperature)
    )
    torch.testing.assert_close(full_kl(logits, ref, temperature), expected)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, None])
def test_gradcheck_in_chunks(chunk_size):
    logits = random_logits(0, (5, 4)).requires_grad_()
    ref = random_logits(1, (5, 4))
    assert torch.autograd.gradcheck(lambda x: full_kl(x, ref, 0.7, chunk_size), (logits,))


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, None])
def test_chunks_and_order_of_rows_change_nothing(chunk_size):
    logits, ref, upstream = (random_logits(seed, (7, 5)).float() for seed in range(3))
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    whole, part = logits.clone().requires_grad_(), logits[order].clone().requires_grad_()
    expected, out = full_kl(whole, ref, 1.3), full_kl(part, ref[order], 1.3, chunk_size)
    torch.testing.assert_close(out, expected[order])
    (expected * upstream[:, 0]).sum().backward()
    (out * upstream[order, 0]).sum().backward()
    torch.testing.assert_close(part.grad, whole.grad[order])


def test_the_reference_has_no_gradient():
    logits, ref = (
        random_logits(0, (2, 3)).requires_grad_(),
        random_logits(1, (2, 3)).requires_grad_(),
    )
    full_kl(logits, ref).sum().backward()
    assert ref.grad is None
    assert logits.grad.abs().sum() > 0


def test_without_gradients():
    out = full_kl(random_logits(0, (2, 3)), random_logits(1, (2, 3)))
    assert not out.requires_grad


def test_equal_distributions_give_0():
    logits = random_logits(0, (3, 9)).float().requires_grad_()
    kl = full_kl(logits, logits.detach() + 3.0)  # a constant is no difference
    torch.testing.assert_close(kl, torch.zeros(3), atol=1e-6, rtol=0)
    kl.sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros(3, 9), atol=1e-6, rtol=0)


def test_tokens_forbidden_in_both_add_nothing():
    logits, ref = random_logits(0, (2, 4)), random_logits(1, (2, 4))
    padded = torch.nn.functional.pad
    wide = padded(logits, (0, 2), value=-INF).requires_grad_()
    kl = full_kl(wide, padded(ref, (0, 2), value=-INF))
    torch.testing.assert_close(kl, full_kl(logits, ref))
    kl.sum().backward()
    assert wide.grad[:, 4:].tolist() == [[0.0, 0.0]] * 2
    assert wide.grad.isfinite().all()


def test_forbidden_in_one_only():
    """The policy forbids: fine. The reference forbids what the policy may do: infinite, but in that row alone."""
    logits = torch.tensor([[0.0, -INF], [0.0, 0.0], [0.0, 0.0]], requires_grad=True)
    ref = torch.tensor([[0.0, 0.0], [0.0, -INF], [0.0, math.log(3)]])
    kl = full_kl(logits, ref)
    # 1·ln(1 / ½); inf; ½ ln(½ / ¼) + ½ ln(½ / ¾) = ½ ln(4/3)
    torch.testing.assert_close(kl, torch.tensor([math.log(2), INF, 0.5 * math.log(4 / 3)]))
    kl.masked_fill(torch.tensor([False, True, False]), 0.0).sum().backward()
    # row 2: ½(±½ ln 3), d = ln 2 and ln(2/3), their mean is the KL
    quarter = 0.25 * math.log(3)
    torch.testing.assert_close(
        logits.grad, torch.tensor([[0.0, 0.0], [0.0, 0.0], [quarter, -quarter]])
    )


def test_bfloat16_is_computed_in_float32():
    logits, ref = random_logits(0, (3, 50)).bfloat16(), random_logits(1, (3, 50)).bfloat16()
    low = logits.clone().requires_grad_()
    kl = full_kl(low, ref)
    assert kl.dtype == torch.float32
    exact = logits.double().requires_grad_()
    expected = full_kl(exact, ref.double())
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-6)
    kl.sum().backward()
    expected.sum().backward()
    assert low.grad.dtype == torch.bfloat16
    torch.testing.assert_close(low.grad.double(), exact.grad, rtol=1e-2, atol=1e-4)


def test_no_rows():
    logits = torch.zeros(0, 5, requires_grad=True)
    kl = full_kl(logits, torch.zeros(0, 5))
    assert kl.shape == (0,)
    kl.sum().backward()
    assert logits.grad.shape == (0, 5)


def test_bad_input_full():
    logits = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"logits \(2, 3\), ref_logits \(2, 4\)"):
        full_kl(logits, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="--temperature"):
        full_kl(logits, logits, temperature=0.0)
