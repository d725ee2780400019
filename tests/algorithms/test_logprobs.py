"""Log probs and entropy from logits."""

from __future__ import annotations

import math

import pytest
import torch

from lightppo.algorithms.logprobs import (
    log_probs_and_entropy,
    token_log_probs,
)


def entropy_of(logits, temperature=1.0, chunk_size=None):
    return log_probs_and_entropy(
        logits, torch.zeros(logits.shape[:-1], dtype=torch.long), temperature, chunk_size
    )[1]


def test_log_probs_by_hand():
    # softmax of (ln 1, ln 2, ln 5) = (1/8, 2/8, 5/8)
    logits = torch.tensor([1.0, 2.0, 5.0]).log().expand(3, 3)
    expected = torch.tensor([1 / 8, 2 / 8, 5 / 8]).log()
    torch.testing.assert_close(token_log_probs(logits, torch.tensor([0, 1, 2])), expected)


def test_temperature_by_hand():
    # logits/0.5 doubles them: weights (1, 4, 25), sum 30
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    out = token_log_probs(logits, torch.tensor([1]), temperature=0.5)
    torch.testing.assert_close(out, torch.tensor([math.log(4 / 30)]))


def test_entropy_by_hand():
    # uniform over 4: ln 4; one forbidden token of -inf: uniform over 3; a certain token: 0
    inf = float("inf")
    logits = torch.tensor([[3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, -inf], [0.0, -inf, -inf, -inf]])
    torch.testing.assert_close(entropy_of(logits), torch.tensor([math.log(4), math.log(3), 0.0]))
    # (1/5, 4/5) at temperature 0.5 from weights (1, 2): -(0.2 ln 0.2 + 0.8 ln 0.8) = 0.500402
    out = entropy_of(torch.tensor([[1.0, 2.0]]).log(), temperature=0.5)
    torch.testing.assert_close(out, torch.tensor([0.5004024]))


def test_forbidden_tokens_leave_the_entropy_gradient_finite():
    logits = torch.tensor([[1.0, 2.0, -float("inf")]], requires_grad=True)
    entropy_of(logits).sum().backward()
    free = torch.tensor([[1.0, 2.0]], requires_grad=True)
    entropy_of(free).sum().backward()
    torch.testing.assert_close(logits.grad, torch.cat([free.grad, torch.zeros(1, 1)], dim=1))


def test_entropy_gradient_by_hand():
    # p = (1/5, 4/5), H = 0.500402; dH/dlogit_i = -p_i (ln p_i + H):
    #   -0.2 (ln 0.2 + 0.500402) = 0.221807    -0.8 (ln 0.8 + 0.500402) = -0.221807
    logits = torch.tensor([[1.0, 4.0]]).log().requires_grad_()
    entropy_of(logits).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.2218071, -0.2218071]]))


def test_fused_by_hand():
    # weights (1, 2, 5)/8; -(1/8 ln 1/8 + 2/8 ln 2/8 + 5/8 ln 5/8) = 0.259930 + 0.346574 + 0.293752 = 0.900256
    log_probs, entropy = log_probs_and_entropy(
        torch.tensor([[1.0, 2.0, 5.0]]).log(), torch.tensor([2])
    )
    torch.testing.assert_close(log_probs, torch.tensor([5 / 8]).log())
    torch.testing.assert_close(entropy, torch.tensor([0.9002561]))
    # temperature 0.5: weights (1, 4, 25)/30; ln 30 - (4 ln 4 + 25 ln 25)/30 = 3.401197 - 0.184839 - 2.682397
    log_probs, entropy = log_probs_and_entropy(
        torch.tensor([[1.0, 2.0, 5.0]]).log(), torch.tensor([1]), 0.5
    )
    torch.testing.assert_close(log_probs, torch.tensor([math.log(4 / 30)]))
    torch.testing.assert_close(entropy, torch.tensor([0.5339620]))


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_fused_is_the_two_alone(chunk_size, entropy_grad):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 11, generator=generator)
    logits[0, 0, 3] = -float("inf")
    labels = torch.randint(3, (2, 6), generator=generator)
    weights = torch.randn(2, 2, 6, generator=generator)
    alone, fused = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = token_log_probs(alone, labels, 0.7), entropy_of(alone, 0.7)
    got = log_probs_and_entropy(fused, labels, 0.7, chunk_size, entropy_grad)
    assert all(torch.equal(a, b) and b.is_contiguous() for a, b in zip(expected, got))
    assert got[1].requires_grad is entropy_grad
    ((expected[0] * weights[0]).sum() + entropy_grad * (expected[1] * weights[1]).sum()).backward()
    ((got[0] * weights[0]).sum() + (got[1] * weights[1]).sum()).backward()
    assert float(alone.grad.abs().max()) > 0.1
    torch.testing.assert_close(fused.grad, alone.grad)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_entropy_keeps_nothing_more_for_the_backward_pass(entropy_grad):
    logits = torch.randn(40, 500, requires_grad=True)
    labels = torch.zeros(40, dtype=torch.long)

    def large_tensors_kept(fn):
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t
        ):
            out = fn()
        # the graph lives until here
        return sum(t.numel() == logits.numel() for t in kept.values()), out

    assert large_tensors_kept(lambda: token_log_probs(logits, labels, 0.7))[0] == 1
    assert (
        large_tensors_kept(lambda: log_probs_and_entropy(logits, labels, 0.7, None, entropy_grad))[
            0
        ]
        == 1
    )


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
@pytest.mark.parametrize("sliced", [False, True])
def test_chunks_and_layout_change_no_bit(chunk_size, sliced):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 6, 11, generator=generator)
    labels = torch.randint(11, (2, 6), generator=generator)
    logits, labels = (whole[:, :-1], labels[:, 1:]) if sliced else (whole, labels)
    assert logits.is_contiguous() is not sliced
    reference = torch.log_softmax(logits.contiguous() / 0.7, -1)
    out = token_log_probs(logits, labels, 0.7, chunk_size=chunk_size)
    assert torch.equal(out, reference.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
    entropy = entropy_of(logits, 0.7, chunk_size=chunk_size)
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1))


def test_gradcheck_across_chunks():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.randint(4, (2, 3), generator=generator)
    assert torch.autograd.gradcheck(
        lambda x: token_log_probs(x, labels, 1.3, chunk_size=2), (logits,)
    )
    assert torch.autograd.gradcheck(
        lambda x: token_log_probs(x[:, :-1], labels[:, 1:], chunk_size=1), (logits,)
    )
    assert torch.autograd.gradcheck(lambda x: entropy_of(x, 1.3, chunk_size=2), (logits,))
    assert torch.autograd.gradcheck(lambda x: log_probs_and_entropy(x, labels, 1.3, 2), (logits,))
    assert torch.autograd.gradgradcheck(
        lambda x: log_probs_and_entropy(x, labels, 1.3, 2), (logits,)
    )
    assert log_probs_and_entropy(logits, labels)[1].dtype == torch.float64


def test_low_precision_logits_give_float32():
    logits = torch.tensor([[0.0, 10.0]], dtype=torch.bfloat16)
    out = token_log_probs(logits, torch.tensor([0]))
    assert out.dtype == torch.float32
    # -ln(e^0 + e^10) = -10.0000454, which bfloat16 would round to -10
    torch.testing.assert_close(out, torch.tensor([-10.0000454]), rtol=0, atol=1e-6)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([0]))
    assert torch.equal(log_probs, out)
    # p0 = e^-10.0000454 = 4.53979e-5: p0 (10.0000454 + 1) and terms of p0^2, by -(1 - p0) ln(1 - p0) = p0 - p0^2/2
    torch.testing.assert_close(entropy, torch.tensor([4.9937e-4]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_second_copy_of_the_logits_without_gradients(dtype):
    """The largest tensor made on the way is one chunk in float32, not (T, V)."""
    logits, labels = torch.randn(2, 50, 20).to(dtype), torch.zeros(2, 49, dtype=torch.long)
    own = logits.untyped_storage().data_ptr()
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            # not a view of the logits
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != own:
                sizes.append(out.numel())
            return out

    with torch.no_grad(), Watch():
        token_log_probs(logits[:, :-1], labels, 0.7, chunk_size=10)
        log_probs_and_entropy(logits[:, :-1], labels, 0.7, chunk_size=10)
    assert max(sizes) == 10 * 20


def test_no_tokens_at_all():
    logits, labels = torch.zeros(0, 3, 5), torch.zeros(0, 3, dtype=torch.long)
    assert token_log_probs(logits, labels).shape == (0, 3)
    assert [x.shape for x in log_probs_and_entropy(logits, labels)] == [(0, 3), (0, 3)]


def test_bad_input():
    logits, labels = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="--temperature"):
            token_log_probs(logits, labels, temperature)
    with pytest.raises(ValueError, match=r"labels \(2, 2\)"):
        token_log_probs(logits, labels[:, 1:])
    with pytest.raises(ValueError, match=r"labels \(2, 2\)"):
        log_probs_and_entropy(logits, labels[:, 1:])
