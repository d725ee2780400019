"""Scores to token rewards."""

from __future__ import annotations

import pytest
import torch

from lightppo.algorithms.advantages import compute_token_rewards

NAN = float("nan")


def test_token_rewards_by_hand():
    scores = torch.tensor([1.0, -2.0, 5.0, 7.0])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    kl = torch.tensor([[0.5, 1.0, -1.0], [2.0, 4.0, NAN], [1.0, NAN, 3.0], [NAN, NAN, NAN]])
    rewards = compute_token_rewards(scores, mask, kl=kl, kl_coef=0.5)
    expected = [
        [-0.25, -0.5, 1.5],  # -0.5·0.5, -0.5·1, -0.5·(-1) + 1
        [-1.0, -4.0, 0.0],  # -0.5·2, -0.5·4 - 2, padding
        [-0.5, 0.0, 3.5],  # -0.5·1, hole, -0.5·3 + 5
        [0.0, 0.0, 0.0],  # no trained token
    ]
    assert rewards.tolist() == expected


def test_score_alone_when_the_kl_is_in_the_loss():
    rewards = compute_token_rewards(torch.tensor([3.0]), torch.tensor([[True, True, False]]))
    assert rewards.tolist() == [[0.0, 3.0, 0.0]]


def test_leading_hole_and_one_token():
    rewards = compute_token_rewards(
        torch.tensor([3.0, 4.0]), torch.tensor([[False, True], [True, False]])
    )
    assert rewards.tolist() == [[0.0, 3.0], [4.0, 0.0]]


def test_dense_rewards_add_to_the_score():
    mask = torch.tensor([[True, False, True]])
    rewards = compute_token_rewards(
        torch.tensor([1.0]),
        mask,
        kl=torch.tensor([[1.0, 0.0, 1.0]]),
        kl_coef=0.25,
        token_scores=torch.tensor([[0.5, 0.0, 2.0]]),
    )
    assert rewards.tolist() == [[0.25, 0.0, 2.75]]  # 0.5 - 0.25, hole, 2 + 1 - 0.25


def test_the_sum_of_a_row_is_score_minus_total_kl():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(8, 10, generator=generator) > 0.3
    scores, kl = torch.randn(8, generator=generator), torch.randn(8, 10, generator=generator)
    rewards = compute_token_rewards(scores, mask, kl=kl, kl_coef=0.1)
    torch.testing.assert_close(rewards.sum(1), scores - 0.1 * (kl * mask).sum(1))


def test_padding_width_does_not_matter():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    scores, kl = (
        torch.tensor([1.0, 2.0]),
        torch.randn(2, 3, generator=torch.Generator().manual_seed(0)),
    )
    pad = torch.nn.functional.pad
    wide = compute_token_rewards(
        scores, pad(mask, (0, 4)), kl=pad(kl, (0, 4), value=NAN), kl_coef=0.3
    )
    assert torch.equal(wide, pad(compute_token_rewards(scores, mask, kl=kl, kl_coef=0.3), (0, 4)))


def test_bfloat16_scores_come_back_in_float32():
    rewards = compute_token_rewards(
        torch.tensor([1.0]).bfloat16(),
        torch.tensor([[True]]),
        kl=torch.tensor([[1e-3]]),
        kl_coef=1.0,
    )
    assert rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, torch.tensor([[0.999]]))


def test_bad_input():
    mask = torch.tensor([[True, False]])
    with pytest.raises(ValueError, match=r"kl_coef is 0.1"):
        compute_token_rewards(torch.zeros(1), mask, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"scores \(2,\)"):
        compute_token_rewards(torch.zeros(2), mask)
    with pytest.raises(ValueError, match=r"kl \(1, 1\)"):
        compute_token_rewards(torch.zeros(1), mask, kl=torch.zeros(1, 1), kl_coef=0.1)
