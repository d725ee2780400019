"""Losses of preference pairs against numbers by hand."""

import math

import pytest
import torch

from lightppo.algorithms.preferences import bradley_terry_loss, pair_mean


def test_bradley_terry_by_hand():
    # leads 0, ln 3 and -ln 3: the chosen answer wins with chance 1/2, 3/4 and 1/4
    chosen, rejected = torch.tensor([1.0, math.log(3), 0.0]), torch.tensor([1.0, 0.0, math.log(3)])
    loss = bradley_terry_loss(chosen, rejected)
    assert loss.tolist() == pytest.approx([math.log(2), math.log(4 / 3), math.log(4)])


def test_a_margin_is_taken_from_the_lead():
    # leads ln 3, less margins of ln 3 and 0: chances 1/2 and 3/4
    chosen, margin = torch.full((2,), math.log(3)), torch.tensor([math.log(3), 0.0])
    assert bradley_terry_loss(chosen, torch.zeros(2), margin).tolist() == pytest.approx([math.log(2), math.log(4 / 3)])


def test_bradley_terry_gradient_is_the_chance_of_being_wrong():
    chosen, rejected = torch.tensor([math.log(3)], requires_grad=True), torch.zeros(1, requires_grad=True)
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
