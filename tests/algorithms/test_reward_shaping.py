from __future__ import annotations

import pytest
import torch

from lightppo.algorithms.shaping import (
    clip_scores,
    compute_token_rewards,
    dense_rewards,
    overlong_penalty,
    scale_scores,
    stop_properly,
    zero_truncated,
)

NAN, INF = float("nan"), float("inf")


def test_clip_scores():
    scores = torch.tensor([-12.0, 0.5, 30.0])
    assert clip_scores(scores, (-10.0, 10.0)).tolist() == [-10.0, 0.5, 10.0]
    assert clip_scores(scores, None).tolist() == [-12.0, 0.5, 30.0]
    with pytest.raises(ValueError, match="--reward_clip_range"):
        clip_scores(scores, (1.0, 1.0))


class TestScaleScores:
    def test_by_hand(self):
        scores = torch.tensor([1.0, 3.0, -4.0])
        # (1 - 2)·0.5, (3 - 2)·0.5, (-4 - 2)·0.5
        assert scale_scores(scores, bias=2.0, scaling=0.5).tolist() == [-0.5, 0.5, -3.0]
        assert scale_scores(scores, bias=2.0, scaling=0.5, max_clip=1.0).tolist() == [-0.5, 0.5, -1.0]
        # a cost becomes a reward: (1 - 0)·(-2), ..., clipped on both sides
        assert scale_scores(scores, scaling=-2.0, max_clip=5.0).tolist() == [-2.0, -5.0, 5.0]
        assert scale_scores(scores).tolist() == scores.tolist()

    def test_low_precision(self):
        # 1000 - 0.5 is no bfloat16: the nearest are 1000 and 996
        assert scale_scores(torch.tensor([1000.0]).bfloat16(), bias=0.5).item() == 999.5
        assert scale_scores(torch.tensor([1.0]).double()).dtype == torch.float64

    @pytest.mark.parametrize("bad", [{"scaling": 0.0}, {"scaling": INF}, {"bias": NAN}])
    def test_bad_scale(self, bad):
        with pytest.raises(ValueError, match=r"--reward_bias .* --reward_scaling"):
            scale_scores(torch.ones(1), **bad)

    @pytest.mark.parametrize("max_clip", [0.0, -1.0, NAN])
    def test_bad_clip(self, max_clip):
        with pytest.raises(ValueError, match="--max_reward_clip must be above 0"):
            scale_scores(torch.ones(1), max_clip=max_clip)


class TestTruncated:
    SCORES = torch.tensor([2.0, 2.0, -2.0, -2.0, 0.0])
    TRUNCATED = torch.tensor([False, True, False, True, True])

    def test_zeroed(self):
        assert zero_truncated(self.SCORES, self.TRUNCATED).tolist() == [2.0, 0.0, -2.0, 0.0, 0.0]
        assert zero_truncated(torch.tensor([NAN, 1.0]), torch.tensor([True, False])).tolist() == [0.0, 1.0]

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
        assert torch.equal(stop_properly(self.SCORES[order], self.TRUNCATED[order], 0.25), whole[order])

    @pytest.mark.parametrize("coef", [1.5, NAN, -INF])
    def test_bad_coef(self, coef):
        with pytest.raises(ValueError, match="--stop_properly_penalty"):
            stop_properly(self.SCORES, self.TRUNCATED, coef)

    @pytest.mark.parametrize("fn", [zero_truncated, lambda s, t: stop_properly(s, t, 0.5)])
    def test_bad_shapes(self, fn):
        with pytest.raises(ValueError, match=r"scores \(5,\), truncated \(1,\)"):
            fn(self.SCORES, torch.ones(1))


class TestOverlong:
    def test_by_hand(self):
        lengths = torch.tensor([0, 80, 81, 90, 100, 130])
        # 100 - 20 = 80 is free; then 1/20, 10/20, 20/20 of the factor, and no more beyond the limit
        expected = torch.tensor([0.0, 0.0, -0.1, -1.0, -2.0, -2.0])
        torch.testing.assert_close(overlong_penalty(lengths, max_len=100, buffer_len=20, factor=2.0), expected)

    def test_the_buffer_may_be_everything(self):
        out = overlong_penalty(torch.tensor([0, 1, 4]), max_len=4, buffer_len=4, factor=1.0)
        assert out.tolist() == [0.0, -0.25, -1.0]

    def test_factor_0_and_lengths_as_floats(self):
        assert overlong_penalty(torch.tensor([10.0]), 10, 5, 0.0).item() == 0.0
        assert overlong_penalty(torch.tensor([7.5]), 10, 5, 1.0).item() == -0.5

    @pytest.mark.parametrize("buffer_len", [0, -1, 101])
    def test_bad_buffer(self, buffer_len):
        with pytest.raises(ValueError, match=r"--overlong_buffer_len .* at most --generate_max_len \(100\)"):
            overlong_penalty(torch.tensor([1]), 100, buffer_len, 1.0)

    @pytest.mark.parametrize("factor", [-1.0, INF, NAN])
    def test_bad_factor(self, factor):
        with pytest.raises(ValueError, match="--overlong_penalty_factor"):
            overlong_penalty(torch.tensor([1]), 100, 10, factor)


class TestDenseRewards:
    MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    SCORES = torch.tensor([[1.0, 3.0, 2.0, 2.0], [NAN, 4.0, 9.0, 1.0], [5.0, 5.0, -1.0, NAN], [NAN, 1.0, INF, 2.0]])

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
        torch.testing.assert_close(dense_rewards(scores, mask, delta=True).sum(1), torch.tensor(last).double())

    def test_equal_scores_reward_the_first_token_only(self):
        out = dense_rewards(torch.full((1, 3), 0.7), torch.ones(1, 3), delta=True)
        torch.testing.assert_close(out, torch.tensor([[0.7, 0.0, 0.0]]))

    @pytest.mark.parametrize("delta", [False, True])
    def test_padding_and_order_do_not_matter(self, delta):
        pad = torch.nn.functional.pad
        order = torch.tensor([2, 0, 3, 1])
        wide = dense_rewards(pad(self.SCORES, (0, 3), value=NAN)[order], pad(self.MASK, (0, 3))[order], delta)
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
        with pytest.raises(ValueError, match="shapes must be equal"):
            dense_rewards(torch.zeros(2, 3), torch.ones(2, 1), delta=True)


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
    rewards = compute_token_rewards(torch.tensor([3.0, 4.0]), torch.tensor([[False, True], [True, False]]))
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
    scores, kl = torch.tensor([1.0, 2.0]), torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    pad = torch.nn.functional.pad
    wide = compute_token_rewards(scores, pad(mask, (0, 4)), kl=pad(kl, (0, 4), value=NAN), kl_coef=0.3)
    assert torch.equal(wide, pad(compute_token_rewards(scores, mask, kl=kl, kl_coef=0.3), (0, 4)))


def test_bfloat16_scores_come_back_in_float32():
    rewards = compute_token_rewards(
        torch.tensor([1.0]).bfloat16(), torch.tensor([[True]]), kl=torch.tensor([[1e-3]]), kl_coef=1.0
    )
    assert rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, torch.tensor([[0.999]]))


def test_bad_input():
    mask = torch.tensor([[True, False]])
    with pytest.raises(ValueError, match=r"kl_coef is 0.1 but there is no KL"):
        compute_token_rewards(torch.zeros(1), mask, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"scores \(2,\)"):
        compute_token_rewards(torch.zeros(2), mask)
    with pytest.raises(ValueError, match=r"kl \(1, 1\)"):
        compute_token_rewards(torch.zeros(1), mask, kl=torch.zeros(1, 1), kl_coef=0.1)
    with pytest.raises(ValueError, match=r"untrained tokens would be lost, in rows \[0\]"):
        compute_token_rewards(torch.zeros(1), mask, token_scores=torch.tensor([[0.0, 1.0]]))
