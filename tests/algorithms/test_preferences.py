"""Losses of preference pairs against numbers by hand."""

import math

import pytest
import torch

from lightppo.algorithms.losses import (
    answer_log_probs,
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    pair_mean,
)


def test_bradley_terry_by_hand():
    # leads 0, ln 3 and -ln 3: the chosen answer wins with chance 1/2, 3/4 and 1/4
    chosen, rejected = torch.tensor([1.0, math.log(3), 0.0]), torch.tensor([1.0, 0.0, math.log(3)])
    loss = bradley_terry_loss(chosen, rejected)
    assert loss.tolist() == pytest.approx([math.log(2), math.log(4 / 3), math.log(4)])


def test_a_margin_is_taken_from_the_lead():
    # leads ln 3, less margins of ln 3 and 0: chances 1/2 and 3/4
    chosen, margin = torch.full((2,), math.log(3)), torch.tensor([math.log(3), 0.0])
    assert bradley_terry_loss(chosen, torch.zeros(2), margin).tolist() == pytest.approx(
        [math.log(2), math.log(4 / 3)]
    )


def test_bradley_terry_gradient_is_the_chance_of_being_wrong():
    chosen, rejected = (
        torch.tensor([math.log(3)], requires_grad=True),
        torch.zeros(1, requires_grad=True),
    )
    bradley_terry_loss(chosen, rejected).sum().backward()
    assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx((-1 / 4, 1 / 4))


def test_bradley_terry_is_finite_far_out():
    loss = bradley_terry_loss(torch.tensor([-1e4, 1e4]), torch.zeros(2))
    assert loss.tolist() == [1e4, 0.0]


def test_shapes_must_be_equal():
    with pytest.raises(ValueError, match=r"chosen \(2,\), rejected \(1,\)"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(1))


def test_micro_batches_add_up_to_the_mean_over_all_pairs():
    # two ranks, whose gradients are averaged: 5 pairs in micro batches of 2, 1 and 2
    loss = torch.tensor([1.0, 2.0, 4.0, 8.0, 10.0])
    shares = [pair_mean(part, pairs=5, dp_size=2) for part in loss.split([2, 1, 2])]
    assert (sum(shares) / 2).item() == pytest.approx(25 / 5)
    assert pair_mean(loss, pairs=5).item() == pytest.approx(5.0)


# -- without a reward model ------------------------------------------------------------------------------------------


def test_the_log_prob_of_an_answer_is_a_sum_or_a_mean_over_its_tokens():
    log_probs = torch.tensor([[-1.0, -2.0, -9.0], [-9.0, -3.0, -9.0], [-9.0, -9.0, -9.0]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]]).bool()
    assert answer_log_probs(log_probs, mask, mean=False).tolist() == [-3.0, -3.0, 0.0]
    assert answer_log_probs(log_probs, mask, mean=True).tolist() == [-1.5, -3.0, 0.0]


def test_dpo_by_hand():
    # βh = 0, ln 3, -ln 3: σ = 1/2, 3/4, 1/4
    lead = torch.tensor([0.0, 2 * math.log(3), -2 * math.log(3)])
    assert dpo_loss(lead, beta=0.5).tolist() == pytest.approx(
        [math.log(2), math.log(4 / 3), math.log(4)]
    )
    # one pair in ten is exchanged: 0.9 ln(4/3) + 0.1 ln 4 at ln 3
    smooth = dpo_loss(lead, beta=0.5, label_smoothing=0.1)
    expected = [
        math.log(2),
        0.9 * math.log(4 / 3) + 0.1 * math.log(4),
        0.9 * math.log(4) + 0.1 * math.log(4 / 3),
    ]
    assert smooth.tolist() == pytest.approx(expected)


def test_dpo_is_bradley_terry_on_implied_rewards():
    policy, reference = torch.randn(2, 8), torch.randn(2, 8)
    chosen, rejected = 0.3 * (policy - reference)
    lead = (policy[0] - reference[0]) - (policy[1] - reference[1])
    torch.testing.assert_close(dpo_loss(lead, beta=0.3), bradley_terry_loss(chosen, rejected))


@pytest.mark.parametrize(
    ("loss", "lead", "slope"),
    [
        # -β(1 - σ(βh)) at σ = 3/4: -0.5 / 4
        (lambda h: dpo_loss(h, beta=0.5), 2 * math.log(3), -0.125),
        # -β((1 - ε) - σ(βh)) at ε = 0.1: -0.5 · 0.15; and 0 where σ = 0.9
        (lambda h: dpo_loss(h, beta=0.5, label_smoothing=0.1), 2 * math.log(3), -0.075),
        (lambda h: dpo_loss(h, beta=0.5, label_smoothing=0.1), 2 * math.log(9), 0.0),
        # 2(h - 1 / 2β): 1 / 2β = 5
        (lambda h: ipo_loss(h, beta=0.1), 2.0, -6.0),
        (lambda h: ipo_loss(h, beta=0.1), 5.0, 0.0),
        (lambda h: ipo_loss(h, beta=0.1), 6.0, 2.0),
    ],
)
def test_gradients_by_hand(loss, lead, slope):
    h = torch.tensor([lead], dtype=torch.float64, requires_grad=True)
    loss(h).sum().backward()
    assert h.grad.item() == pytest.approx(slope, abs=1e-12)


def test_ipo_by_hand():
    # (h - 5)²
    assert ipo_loss(torch.tensor([0.0, 4.0, 7.0]), beta=0.1).tolist() == [25.0, 1.0, 4.0]


def test_dpo_is_finite_far_out():
    assert dpo_loss(torch.tensor([-1e4, 1e4]), beta=1.0).tolist() == [1e4, 0.0]
