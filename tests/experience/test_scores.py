"""The steps of shaping alone, as functions of scores."""

from __future__ import annotations

import pytest
import torch

from lightppo.algorithms.advantages import compute_token_rewards
from lightppo.experience.normalisation import (
    dense_rewards,
    overlong_penalty,
    scale_scores,
    stop_properly,
    zero_truncated,
)

NAN, INF = float("nan"), float("inf")


class TestScaleScores:
    def test_by_hand(self):
        scores = torch.tensor([1.0, 3.0, -4.0])
        # (1 - 2)·0.5, (3 - 2)·0.5, (-4 - 2)·0.5
        assert scale_scores(scores, bias=2.0, scaling=0.5).tolist() == [-0.5, 0.5, -3.0]
        assert scale_scores(scores, bias=2.0, scaling=0.5, max_clip=1.0).tolist() == [
            -0.5,
            0.5,
            -1.0,
        ]
        # a cost becomes a reward: (1 - 0)·(-2), ..., clipped on both sides
        assert scale_scores(scores, scaling=-2.0, max_clip=5.0).tolist() == [-2.0, -5.0, 5.0]
        assert scale_scores(scores).tolist() == scores.tolist()

    def test_low_precision(self):
        # 1000 - 0.5 is no bfloat16: the nearest are 1000 and 996
        assert scale_scores(torch.tensor([1000.0]).bfloat16(), bias=0.5).item() == 999.5
        assert scale_scores(torch.tensor([1.0]).double()).dtype == torch.float64


class TestTruncated:
    SCORES = torch.tensor([2.0, 2.0, -2.0, -2.0, 0.0])
    TRUNCATED = torch.tensor([False, True, False, True, True])

    def test_zeroed(self):
        assert zero_truncated(self.SCORES, self.TRUNCATED).tolist() == [2.0, 0.0, -2.0, 0.0, 0.0]
        assert zero_truncated(torch.tensor([NAN, 1.0]), torch.tensor([True, False])).tolist() == [
            0.0,
            1.0,
        ]

    def test_the_kl_of_a_zeroed_answer_stays(self):
        scores = zero_truncated(torch.tensor([5.0]), torch.tensor([True]))
        rewards = compute_token_rewards(
            scores, torch.ones(1, 2, dtype=torch.bool), kl=torch.tensor([[1.0, 2.0]]), kl_coef=0.5
        )
        assert rewards.tolist() == [[-0.5, -1.0]]

    @pytest.mark.parametrize(
        ("coef", "expected"),
        [
            (1.0, [2.0, 2.0, -2.0, -2.0, 0.0]),
            (0.25, [2.0, 0.5, -2.0, -2.0, 0.0]),  # 0.25·2; -2 stays, 0.25·(-2) would be more
            (0.0, [2.0, 0.0, -2.0, -2.0, 0.0]),
            (-0.5, [2.0, -0.5, -2.0, -2.0, -0.5]),  # -2 is less than -0.5 already
            (-3.0, [2.0, -3.0, -2.0, -3.0, -3.0]),
        ],
    )
    def test_stop_properly_by_hand(self, coef, expected):
        assert stop_properly(self.SCORES, self.TRUNCATED, coef).tolist() == expected

    @pytest.mark.parametrize("coef", [1.0, 0.5, 0.0, -1.0])
    def test_nobody_gains_by_not_ending_and_the_finished_lose_nothing(self, coef):
        scores = torch.linspace(-3, 3, 13)
        cut = stop_properly(scores, torch.ones(13), coef)
        assert (cut <= scores).all()
        assert (cut.diff() >= 0).all()  # a better answer is still no worse
        assert torch.equal(stop_properly(scores, torch.zeros(13), coef), scores)

    def test_one_answer_does_not_see_the_others(self):
        order = torch.tensor([4, 2, 0, 3, 1])
        whole = stop_properly(self.SCORES, self.TRUNCATED, 0.25)
        assert torch.equal(
            stop_properly(self.SCORES[order], self.TRUNCATED[order], 0.25), whole[order]
        )


class TestOverlong:
    def test_by_hand(self):
        lengths = torch.tensor([0, 80, 81, 90, 100, 130])
        # 100 - 20 = 80 is free; then 1/20, 10/20, 20/20 of the factor, and no more beyond the limit
        expected = torch.tensor([0.0, 0.0, -0.1, -1.0, -2.0, -2.0])
        torch.testing.assert_close(
            overlong_penalty(lengths, max_len=100, buffer_len=20, factor=2.0), expected
        )

    def test_the_buffer_may_be_everything(self):
        out = overlong_penalty(torch.tensor([0, 1, 4]), max_len=4, buffer_len=4, factor=1.0)
        assert out.tolist() == [0.0, -0.25, -1.0]

    def test_factor_0_and_lengths_as_floats(self):
        assert overlong_penalty(torch.tensor([10.0]), 10, 5, 0.0).item() == 0.0
        assert overlong_penalty(torch.tensor([7.5]), 10, 5, 1.0).item() == -0.5


class TestDenseRewards:
    MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    SCORES = torch.tensor(
        [[1.0, 3.0, 2.0, 2.0], [NAN, 4.0, 9.0, 1.0], [5.0, 5.0, -1.0, NAN], [NAN, 1.0, INF, 2.0]]
    )

    def test_delta_by_hand(self):
        expected = [
            [1.0, 2.0, -1.0, 0.0],  # 1, 3 - 1, 2 - 3, 2 - 2
            [0.0, 4.0, 0.0, -3.0],  # hole, 4, hole (its 9 is passed over), 1 - 4
            [0.0, 0.0, -1.0, 0.0],  # one token: its own score
            [0.0, 0.0, 0.0, 0.0],
        ]
        assert dense_rewards(self.SCORES, self.MASK, delta=True).tolist() == expected

    def test_as_they_are_by_hand(self):
        expected = [[1.0, 3.0, 2.0, 2.0], [0.0, 4.0, 0.0, 1.0], [0.0, 0.0, -1.0, 0.0], [0.0] * 4]
        assert dense_rewards(self.SCORES, self.MASK, delta=False).tolist() == expected

    def test_with_delta_a_row_sums_to_its_last_score(self):
        generator = torch.Generator().manual_seed(0)
        mask = torch.rand(20, 30, generator=generator) > 0.4
        mask[0] = False
        scores = torch.randn(20, 30, dtype=torch.float64, generator=generator)
        last = [row[m][-1].item() if m.any() else 0.0 for row, m in zip(scores, mask)]
        torch.testing.assert_close(
            dense_rewards(scores, mask, delta=True).sum(1), torch.tensor(last).double()
        )

    def test_equal_scores_reward_the_first_token_only(self):
        out = dense_rewards(torch.full((1, 3), 0.7), torch.ones(1, 3), delta=True)
        torch.testing.assert_close(out, torch.tensor([[0.7, 0.0, 0.0]]))

    @pytest.mark.parametrize("delta", [False, True])
    def test_padding_and_order_do_not_matter(self, delta):
        pad = torch.nn.functional.pad
        order = torch.tensor([2, 0, 3, 1])
        wide = dense_rewards(
            pad(self.SCORES, (0, 3), value=NAN)[order], pad(self.MASK, (0, 3))[order], delta
        )
        assert torch.equal(wide, pad(dense_rewards(self.SCORES, self.MASK, delta), (0, 3))[order])

    def test_what_comes_out_goes_into_the_token_rewards(self):
        dense = dense_rewards(self.SCORES, self.MASK, delta=True)
        rewards = compute_token_rewards(torch.zeros(4), self.MASK, token_scores=dense)
        assert torch.equal(rewards, dense)

    def test_low_precision_and_no_positions(self):
        # In bfloat16 256 - 0.5 is 255 or 256
        out = dense_rewards(torch.tensor([[0.5, 256.0]]).bfloat16(), torch.ones(1, 2), delta=True)
        assert out.tolist() == [[0.5, 255.5]]
        assert dense_rewards(torch.zeros(2, 0), torch.zeros(2, 0), delta=True).shape == (2, 0)

    def test_bad_shapes(self):
        with pytest.raises(ValueError, match="shapes"):
            dense_rewards(torch.zeros(2, 3), torch.ones(2, 1), delta=True)
