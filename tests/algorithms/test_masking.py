from __future__ import annotations

import math

import pytest
import torch

from lightppo.algorithms.entries import LOSS_AGG_MODES
from lightppo.algorithms.masking import (
    LossNormalizer,
    aggregate_loss,
    masked_mean,
    whiten,
)

NAN = float("nan")


def test_masked_mean_by_hand():
    values = torch.tensor([[1.0, 2.0, NAN], [6.0, 0.0, 5.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(values, mask, dim=1).tolist() == [1.5, 6.0]  # (1 + 2) / 2, 6 / 1


def test_masked_mean_without_tokens_is_zero():
    assert masked_mean(
        torch.full((2, 2), NAN), torch.zeros(2, 2, dtype=torch.bool), dim=1
    ).tolist() == [
        0.0,
        0.0,
    ]


def test_masked_mean_keeps_nan_out_of_gradients():
    values = torch.tensor([[1.0, 3.0, NAN]], requires_grad=True)
    masked_mean(values, torch.tensor([[True, True, False]])).sum().backward()
    assert values.grad.tolist() == [[0.5, 0.5, 0.0]]


def test_low_precision_is_summed_in_float32():
    # In bfloat16 256 + 1 = 256: a sum of 1000 ones would stop there.
    values = torch.ones(1, 1000, dtype=torch.bfloat16)
    mean = masked_mean(values, torch.ones(1, 1000, dtype=torch.bool), dim=1)
    assert mean.dtype == torch.float32
    assert mean.item() == 1.0


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"values \(2, 3\), mask \(2, 1\)"):
        masked_mean(torch.ones(2, 3), torch.ones(2, 1))


class TestWhiten:
    def test_by_hand(self):
        values = torch.tensor([[1.0, 3.0, NAN], [5.0, 9.0, 9.0]])
        mask = torch.tensor([[True, True, False], [True, False, False]])
        # mean 3, biased var 8/3: (x - 3) / sqrt(8/3) = ±2 / 1.632993 = ±1.224745
        out = whiten(values, mask, eps=0.0)
        torch.testing.assert_close(
            out, torch.tensor([[-1.2247449, 0.0, 0.0], [1.2247449, 0.0, 0.0]])
        )
        # unbiased var 4: ±2 / 2
        assert whiten(values, mask, eps=0.0, unbiased=True).tolist() == [
            [-1.0, 0.0, 0.0],
            [1.0, 0.0, 0.0],
        ]
        # shift_mean=False adds the mean 3 back, masked positions stay 0
        out = whiten(values, mask, eps=0.0, unbiased=True, shift_mean=False)
        assert out.tolist() == [[2.0, 3.0, 0.0], [4.0, 0.0, 0.0]]
        # divide_std=False only subtracts the mean
        assert whiten(values, mask, divide_std=False).tolist() == [
            [-2.0, 0.0, 0.0],
            [2.0, 0.0, 0.0],
        ]
        # eps belongs to the variance: 2 / sqrt(4 + 12) = 0.5
        assert whiten(values, mask, eps=12.0, unbiased=True)[1, 0].item() == 0.5

    def test_fewer_than_two_tokens_come_back_unchanged(self):
        values = torch.tensor([[7.0, NAN]])
        assert whiten(values, torch.tensor([[True, False]])).tolist() == [[7.0, 0.0]]
        assert whiten(values, torch.tensor([[False, False]])).tolist() == [[0.0, 0.0]]

    def test_equal_values_give_exactly_zero(self):
        # In float32 the mean of 0.1 is off by rounding, and eps 1e-8 would blow that up 10^4 times.
        values = torch.full((3, 7), 0.1)
        assert whiten(values, torch.ones(3, 7, dtype=torch.bool)).abs().max().item() < 1e-9

    def test_a_large_offset_does_not_eat_the_variance(self):
        # mean of squares minus square of the mean would give 0 or noise at 1e4 in float32
        values = torch.tensor([[10000.0, 10001.0]])
        out = whiten(values, torch.ones(1, 2, dtype=torch.bool), eps=0.0)
        torch.testing.assert_close(out, torch.tensor([[-1.0, 1.0]]))  # mean 10000.5, std 0.5

    def test_ranks_share_mean_and_variance(self, simulate_ranks):
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(6, 5, generator=generator) * 3 + 7
        mask = torch.rand(6, 5, generator=generator) > 0.4
        whole = whiten(values, mask, unbiased=True)
        shares = [slice(0, 1), slice(1, 6)]  # very different numbers of rows
        parts = simulate_ranks(
            2,
            lambda r, s: whiten(
                values[shares[r]], mask[shares[r]], all_reduce_sum=s, unbiased=True
            ),
        )
        torch.testing.assert_close(torch.cat(parts), whole)
        # per rank it would differ
        assert not torch.allclose(whiten(values[1:], mask[1:], unbiased=True), whole[1:])

    def test_a_rank_without_tokens_takes_part(self, simulate_ranks):
        values, mask = (
            torch.tensor([[1.0, 3.0]]),
            [torch.tensor([[True, True]]), torch.tensor([[False, False]])],
        )
        full, empty = simulate_ranks(
            2, lambda r, s: whiten(values, mask[r], all_reduce_sum=s, eps=0.0)
        )
        assert full.tolist() == [[-1.0, 1.0]]  # mean 2, std 1
        assert empty.tolist() == [[0.0, 0.0]]

    def test_one_token_on_each_rank_is_enough(self, simulate_ranks):
        mask = torch.tensor([[True, False]])
        values = [torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 0.0]])]
        low, high = simulate_ranks(
            2, lambda r, s: whiten(values[r], mask, all_reduce_sum=s, eps=0.0)
        )
        assert (low.tolist(), high.tolist()) == ([[-1.0, 0.0]], [[1.0, 0.0]])

    def test_order_and_padding_do_not_matter(self):
        generator = torch.Generator().manual_seed(1)
        values, mask = (
            torch.randn(5, 4, generator=generator),
            torch.rand(5, 4, generator=generator) > 0.3,
        )
        out = whiten(values, mask)
        order = torch.tensor([3, 0, 4, 1, 2])
        torch.testing.assert_close(whiten(values[order], mask[order]), out[order])
        pad = torch.nn.functional.pad
        wide = whiten(pad(values, (0, 3), value=NAN), pad(mask, (0, 3)))
        torch.testing.assert_close(wide, pad(out, (0, 3)))


class TestLossNormalizer:
    def test_counts_over_micro_batches(self):
        masks = [torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.tensor([[True, False, True, True]])]
        normalizer = LossNormalizer.from_masks(masks, dp_size=2, scale=8.0)
        # tokens 2 + 0 + 3; rows with a token: 1 + 1
        assert normalizer == LossNormalizer(tokens=5.0, sequences=2.0, dp_size=2, scale=8.0)

    def test_counts_over_ranks_one_without_micro_batches(self, simulate_ranks):
        masks = [[torch.tensor([[True, True]])], []]
        both = simulate_ranks(
            2, lambda r, s: LossNormalizer.from_masks(masks[r], all_reduce_sum=s, dp_size=2)
        )
        assert both == [LossNormalizer(2.0, 1.0, dp_size=2)] * 2


class TestAggregateLoss:
    LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, 6.0], [NAN, NAN, NAN]])
    MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("token-mean", 2.5),  # (1 + 2 + 3 + 4) / 4
            ("seq-mean-token-sum", 5.0),  # (6 + 4) / 2 rows; the empty row counts nowhere
            ("seq-mean-token-mean", 3.0),  # (6/3 + 4/1) / 2
            ("seq-mean-token-sum-norm", 1.25),  # (6 + 4) / (2 · 4)
        ],
    )
    def test_by_hand(self, mode, expected):
        normalizer = LossNormalizer.from_masks([self.MASK], scale=4.0)
        assert aggregate_loss(self.LOSS, self.MASK, mode, normalizer).item() == expected

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("token-mean", 4.0),  # 2 ranks · 10 / 5 tokens
            ("seq-mean-token-sum", 20 / 3),  # 2 · 10 / 3
            ("seq-mean-token-mean", 4.0),  # 2 · (2 + 4) / 3
            ("seq-mean-token-sum-norm", 5 / 3),  # 2 · 10 / (3 · 4)
        ],
    )
    def test_divides_by_the_counts_of_the_step_times_ranks(self, mode, expected):
        normalizer = LossNormalizer(tokens=5, sequences=3, dp_size=2, scale=4.0)
        assert aggregate_loss(self.LOSS, self.MASK, mode, normalizer).item() == pytest.approx(
            expected
        )

    def test_without_normalizer_the_batch_is_the_step(self):
        assert aggregate_loss(self.LOSS, self.MASK, "token-mean").item() == 2.5

    @pytest.mark.parametrize("mode", LOSS_AGG_MODES)
    def test_fully_masked_is_an_exact_zero_with_a_gradient(self, mode):
        for normalizer in (None, LossNormalizer(tokens=9, sequences=3)):
            x = torch.full((2, 3), 5.0, requires_grad=True)
            loss = aggregate_loss(x * NAN, torch.zeros(2, 3, dtype=torch.bool), mode, normalizer)
            assert loss.item() == 0.0
            assert loss.grad_fn is not None
            (y,) = torch.autograd.grad(
                aggregate_loss(x * 2, torch.zeros(2, 3), mode, normalizer), x
            )
            assert y.abs().max().item() == 0.0

    def test_gradcheck(self):
        x = torch.randn(
            3,
            3,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(0),
            requires_grad=True,
        )
        for mode in LOSS_AGG_MODES:
            assert torch.autograd.gradcheck(
                lambda x, mode=mode: aggregate_loss(x.square(), self.MASK, mode), (x,)
            )

    def test_tokens_that_nobody_counted_are_refused(self):
        with pytest.raises(ValueError, match=r"4 tokens .*normalizer"):
            aggregate_loss(
                self.LOSS, self.MASK, "token-mean", LossNormalizer(tokens=0, sequences=0)
            )

    def test_unknown_mode_names_the_nearest(self):
        with pytest.raises(ValueError, match=r"--loss_agg_mode: .*'token_mean'.*'token-mean'"):
            aggregate_loss(self.LOSS, self.MASK, "token_mean")

    def test_shapes_must_agree(self):
        with pytest.raises(ValueError, match=r"token_loss \(3, 3\), mask \(3, 1\)"):
            aggregate_loss(self.LOSS, self.MASK[:, :1], "token-mean")

    def test_low_precision_is_summed_in_float32(self):
        loss = aggregate_loss(
            torch.ones(1, 1000, dtype=torch.bfloat16), torch.ones(1, 1000), "seq-mean-token-sum"
        )
        assert loss.dtype == torch.float32
        assert math.isclose(loss.item(), 1000.0)
