"""How far a student is from its teacher, over the vocabulary and over a few tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightppo.algorithms.kl import divergence_of, full_kl, top_divergence
from lightppo.algorithms.logprobs import log_probs_at, top_log_probs

INF = float("inf")


def random_logits(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk_size", [1, 2, 5, None])
def test_gradcheck_in_chunks(chunk_size, beta):
    logits = random_logits(0, (5, 4)).requires_grad_()
    ref = random_logits(1, (5, 4))
    assert torch.autograd.gradcheck(
        lambda x: full_kl(x, ref, 0.7, chunk_size, divergence_of(beta)), (logits,)
    )


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # p = ½, ¼, ¼ and q = ¼, ¼, ½:  KL(q || p) = ¼·(-ln 2) + ½·ln 2
        (0.0, 0.25 * math.log(2)),
        # m = ⅜, ¼, ⅜:  ½(½ ln(4/3) + ¼ ln(2/3)) + ½(¼ ln(2/3) + ½ ln(4/3)) = ½ ln(4/3) + ¼ ln(2/3)
        (0.5, 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
        (1.0, 0.25 * math.log(2)),
    ],
)
def test_jensen_shannon_by_hand(beta, expected):
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    torch.testing.assert_close(
        full_kl(p.log(), q.log(), divergence=divergence_of(beta)), torch.tensor([expected])
    )


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.7])
def test_jensen_shannon_against_torch_distributions(beta):
    p, q = (torch.distributions.Categorical(logits=random_logits(i, (5, 7)) / 0.7) for i in (0, 1))
    m = torch.distributions.Categorical(probs=(1 - beta) * p.probs + beta * q.probs)
    kl = torch.distributions.kl_divergence
    expected = (1 - beta) * kl(p, m) + beta * kl(q, m) if beta else kl(q, p)
    torch.testing.assert_close(
        full_kl(
            random_logits(0, (5, 7)), random_logits(1, (5, 7)), 0.7, divergence=divergence_of(beta)
        ),
        expected,
    )


@pytest.mark.parametrize(("beta", "expected"), [(0.0, [0.5, -0.5]), (0.5, [0.0, 0.0])])
def test_jensen_shannon_where_one_is_certain(beta, expected):
    """p = 1, 0: KL(q || p) is infinite and its gradient p - q finite; Jensen-Shannon has both finite."""
    logits = torch.tensor([[0.0, -INF]], requires_grad=True)
    kl = full_kl(logits, torch.zeros(1, 2), divergence=divergence_of(beta))
    # m = ¾, ¼:  ½·ln(4/3) + ½(½ ln(2/3) + ½ ln 2) = ½ ln(4/3) + ¼ ln(4/3)
    assert kl.item() == (INF if beta == 0 else pytest.approx(0.75 * math.log(4 / 3)))
    kl.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([expected]))


class TestTopDivergence:
    """p 1/2 and 1/4, q 1/4 and 1/4 on the two tokens; the rest is 1/4 and 1/2."""

    P, Q = (
        torch.tensor([[0.5, 0.25]]).double().log(),
        torch.tensor([[0.25, 0.25]]).double().log(),
    )

    @pytest.mark.parametrize(
        ("beta", "tail", "expected"),
        [
            # 1/2 ln 2 + 0 + 1/4 ln 1/2
            (1.0, "rest", 0.25 * math.log(2)),
            # 1/4 ln 1/2 + 0 + 1/2 ln 2
            (0.0, "rest", 0.25 * math.log(2)),
            # 2/3 1/3 against 1/2 1/2
            (1.0, "renormalise", 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)),
            (0.0, "renormalise", 0.5 * math.log(3 / 4) + 0.5 * math.log(3 / 2)),
            (0.0, "drop", 0.25 * math.log(0.5)),
            # m = 3/8 1/4 3/8: 1/2 ln 4/3 + 1/4 ln 2/3, and the same the other way round
            (0.5, "rest", 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
        ],
    )
    def test_by_hand(self, beta, tail, expected):
        got = top_divergence(self.P, self.Q, beta, tail)
        torch.testing.assert_close(got, torch.tensor([expected]).double())

    @pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
    def test_of_all_tokens_it_is_the_divergence_and_of_fewer_at_most_that(self, beta):
        logits, other = random_logits(0, (4, 6)), random_logits(1, (4, 6))
        whole = full_kl(logits, other, 1.3, divergence=divergence_of(beta))
        shares = []
        for k in (1, 3, 6):
            top, ids = top_log_probs(other, k, 1.3)
            shares.append(top_divergence(log_probs_at(logits, ids, 1.3), top, beta))
        torch.testing.assert_close(shares[-1], whole)
        # coarser tokens tell less apart
        assert (shares[0] <= shares[1] + 1e-12).all()
        assert (shares[1] <= whole + 1e-12).all()
        assert (shares[0] >= 0).all()

    @pytest.mark.parametrize(
        ("beta", "tail"),
        [(0.0, "rest"), (0.3, "rest"), (1.0, "rest"), (0.3, "renormalise"), (0.0, "drop")],
    )
    def test_gradients(self, beta, tail):
        top, ids = top_log_probs(random_logits(1, (4, 6)), 3)
        logits = random_logits(0, (4, 6)).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x: top_divergence(log_probs_at(x, ids), top, beta, tail), (logits,)
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_without_a_rest_it_stays_finite(self, dtype):
        """One of the models gives all to the tokens, in one case more than all by rounding."""
        sure = torch.tensor([[0.5, 0.5 + 1e-7]], dtype=dtype).log()
        unsure = torch.tensor([[0.3, 0.3]], dtype=dtype).log()
        for log_p, log_q in ((sure, unsure), (unsure, sure), (sure, sure)):
            log_p = log_p.clone().requires_grad_()
            value = top_divergence(log_p, log_q).sum()
            value.backward()
            assert value.isfinite()
            assert log_p.grad.isfinite().all()
