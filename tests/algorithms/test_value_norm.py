from __future__ import annotations

import json
import math

import pytest
import torch

from lightppo.algorithms.shaping import VALUE_NORM_KINDS, ValueNorm

NAN, INF = float("nan"), float("inf")
KINDS = list(VALUE_NORM_KINDS)


def normal(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class TestByHand:
    def test_exp(self):
        norm = ValueNorm("exp", beta=0.5)
        norm.update(torch.tensor([[1.0, 3.0]]))
        assert (norm.mean, norm.std) == (2.0, 1.0)
        norm.update(torch.tensor([[8.0, 8.0, 8.0]]))
        # weights ¼ and ½ over ¾: ⅓ of the first rollout, ⅔ of the second, however many returns they have
        # mean ⅓·2 + ⅔·8 = 6; E[x²] = ⅓·5 + ⅔·64 = 133/3; variance 133/3 - 36 = 25/3
        assert norm.mean == pytest.approx(6.0)
        assert norm.std == pytest.approx(math.sqrt(25 / 3))

    def test_ma(self):
        norm = ValueNorm("ma")
        norm.update(torch.tensor([[1.0, 3.0]]))
        assert (norm.mean, norm.std) == (2.0, 1.0)
        norm.update(torch.tensor([[8.0]]))
        # of 1, 3, 8: mean 4, variance (9 + 1 + 16) / 3
        assert norm.mean == pytest.approx(4.0)
        assert norm.std == pytest.approx(math.sqrt(26 / 3))

    def test_there_and_back(self):
        norm = ValueNorm("ma")
        norm.update(torch.tensor([[1.0, 5.0]]))
        # mean 3, std 2
        assert norm.denormalize(torch.tensor([0.5, -1.0])).tolist() == [4.0, 1.0]
        assert norm.normalize(torch.tensor([4.0, 1.0])).tolist() == [0.5, -1.0]

    def test_exp_against_the_weighted_sums(self):
        """Debiased averages of x and x², as the formula has them."""
        beta, norm = 0.9, ValueNorm("exp", beta=0.9)
        rollouts = [normal((3, 4), seed) * (1 + seed) + seed for seed in range(6)]
        for rollout in rollouts:
            norm.update(rollout)
        weights = [(1 - beta) * beta ** (5 - i) for i in range(6)]
        assert sum(weights) == pytest.approx(1 - beta**6)
        mean = sum(w * r.mean().item() for w, r in zip(weights, rollouts)) / sum(weights)
        square = sum(w * r.square().mean().item() for w, r in zip(weights, rollouts)) / sum(weights)
        assert norm.mean == pytest.approx(mean)
        assert norm.std == pytest.approx(math.sqrt(square - mean**2))

    def test_beta_near_1_weighs_the_rollouts_of_a_short_run_the_same(self):
        norm = ValueNorm("exp", beta=0.99995)
        for level in range(10):
            norm.update(torch.full((2, 2), float(level)))
        assert norm.mean == pytest.approx(4.5, rel=1e-3)

    def test_beta_0_is_the_last_rollout(self):
        norm = ValueNorm("exp", beta=0.0)
        for rollout in (torch.tensor([100.0, 300.0]), torch.tensor([1.0, 3.0])):
            norm.update(rollout)
        assert (norm.mean, norm.std) == (2.0, 1.0)


@pytest.mark.parametrize("kind", KINDS)
class TestColdStart:
    def test_before_any_update_nothing_is_changed(self, kind):
        norm, values = ValueNorm(kind), normal((2, 3)).float()
        assert (norm.mean, norm.std) == (0.0, 1.0)
        for way in (norm.denormalize, norm.normalize, norm.normalize_old):
            assert torch.equal(way(values), values)

    def test_a_narrow_first_rollout_comes_out_with_variance_1(self, kind):
        returns = 0.3 + 0.01 * normal((64, 50)).float()
        norm = ValueNorm(kind)
        values = norm.denormalize(normal((64, 50), 1).float() * 0.1)  # an untrained critic
        norm.update(returns)
        targets = norm.normalize(returns)
        assert targets.mean().item() == pytest.approx(0.0, abs=1e-3)
        assert targets.std().item() == pytest.approx(1.0, abs=1e-2)
        torch.testing.assert_close(norm.normalize_old(values), normal((64, 50), 1).float() * 0.1)
        # the critic that has learned its targets predicts the returns
        torch.testing.assert_close(norm.denormalize(targets), returns, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("level", [0.0, 0.3, -1e4])
    def test_constant_returns(self, kind, level):
        norm, returns = ValueNorm(kind), torch.full((4, 5), level)
        norm.update(returns)
        assert norm.std == pytest.approx(math.sqrt(1e-5))
        torch.testing.assert_close(norm.normalize(returns), torch.zeros(4, 5))
        torch.testing.assert_close(norm.denormalize(torch.zeros(4, 5)), returns)

    def test_the_first_success_after_a_rollout_of_failures_stays_small(self, kind):
        norm = ValueNorm(kind)
        norm.update(torch.zeros(100, 10))
        returns = torch.zeros(100, 10)
        returns[0] = 1.0
        norm.update(returns)
        # 10 of 2000 returns are 1: mean 0.005, variance 0.005·0.995, (1 - 0.005) / sqrt of that
        assert norm.normalize(returns).max().item() == pytest.approx(math.sqrt(0.995 / 0.005), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
class TestUpdates:
    def test_old_outputs_come_back(self, kind):
        norm, outputs = ValueNorm(kind, beta=0.5), normal((4, 6)).float()
        for step in range(5):
            values = norm.denormalize(outputs)
            norm.update(values + 10.0 * (step + 1) + normal((4, 6), step).float())
            torch.testing.assert_close(norm.normalize_old(values), outputs, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(norm.normalize(values), outputs, atol=0.1)

    def test_old_outputs_come_back_exactly_in_float64(self, kind):
        norm, outputs = ValueNorm(kind), normal((4, 6))
        norm.update(0.3 + 0.01 * normal((4, 6), 1))
        values = norm.denormalize(outputs)
        norm.update(values * 3)
        torch.testing.assert_close(norm.normalize_old(values), outputs, rtol=1e-12, atol=1e-12)

    def test_masked_returns_count_nowhere(self, kind):
        returns = torch.tensor([[1.0, NAN, 3.0], [INF, NAN, NAN]])
        mask = torch.tensor([[True, False, True], [False, False, False]])
        norm = ValueNorm(kind)
        norm.update(returns, mask)
        assert (norm.mean, norm.std) == (2.0, 1.0)

    def test_an_all_masked_rollout_keeps_the_statistics_and_the_way_back(self, kind):
        norm = ValueNorm(kind)
        norm.update(torch.tensor([[1.0, 5.0]]))
        values = norm.denormalize(torch.tensor([[0.25, -2.0]]))
        norm.update(torch.full((1, 2), NAN), torch.zeros(1, 2))
        assert (norm.mean, norm.std) == (3.0, 2.0)
        assert norm.normalize_old(values).tolist() == [[0.25, -2.0]]

    def test_a_first_rollout_without_returns_is_no_start(self, kind):
        norm = ValueNorm(kind)
        norm.update(torch.full((1, 2), NAN), torch.zeros(1, 2))
        assert (norm.mean, norm.std) == (0.0, 1.0)
        norm.update(torch.tensor([[1.0, 5.0]]))
        assert (norm.mean, norm.std) == (3.0, 2.0)

    @pytest.mark.parametrize("bad", [NAN, INF])
    def test_a_broken_return_is_refused_and_changes_nothing(self, kind, bad):
        norm = ValueNorm(kind)
        norm.update(torch.tensor([[1.0, 5.0]]))
        before = norm.state_dict()
        with pytest.raises(ValueError, match="the returns of this rollout hold NaN or infinite"):
            norm.update(torch.tensor([[1.0, bad]]))
        assert norm.state_dict() == before

    @pytest.mark.parametrize("first", [0, 1, 5, 8])
    def test_the_split_over_ranks_and_the_order_of_rows_do_not_matter(self, kind, simulate_ranks, first):
        rollouts = [normal((8, 5), seed) * (1 + seed) + seed for seed in range(3)]
        masks = [normal((8, 5), 10 + seed) > -0.5 for seed in range(3)]
        order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
        alone = ValueNorm(kind, beta=0.7)
        for returns, mask in zip(rollouts, masks):
            alone.update(returns, mask)

        def one_rank(rank, all_reduce_sum):
            norm = ValueNorm(kind, beta=0.7)
            rows = order[:first] if rank == 0 else order[first:]
            for returns, mask in zip(rollouts, masks):
                norm.update(returns[rows], mask[rows], all_reduce_sum)
            return norm.state_dict()

        states = simulate_ranks(2, one_rank)
        assert states[0] == states[1]
        expected = alone.state_dict()
        assert states[0].pop("kind") == expected.pop("kind") == kind
        assert states[0] == pytest.approx(expected, rel=1e-12)

    def test_padding_does_not_matter(self, kind):
        returns, mask = normal((4, 5)), normal((4, 5), 1) > 0
        pad = torch.nn.functional.pad
        narrow, wide = ValueNorm(kind), ValueNorm(kind)
        narrow.update(returns, mask)
        wide.update(pad(returns, (0, 3), value=NAN), pad(mask, (0, 3)))
        assert wide.mean == pytest.approx(narrow.mean, rel=1e-13)
        assert wide.std == pytest.approx(narrow.std, rel=1e-13)

    def test_float32_is_close_to_float64_with_a_large_offset(self, kind):
        returns = 1000.0 + torch.round(normal((20, 30)) * 64) / 64  # exact in float32
        exact, single = ValueNorm(kind), ValueNorm(kind)
        exact.update(returns)
        single.update(returns.float())
        assert (single.mean, single.std) == (exact.mean, exact.std)
        out = single.normalize(returns.float())
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), exact.normalize(returns), rtol=1e-6, atol=1e-6)

    def test_state_survives_json(self, kind):
        norm, resumed = ValueNorm(kind, beta=0.8), ValueNorm(kind, beta=0.8)
        for seed in range(3):
            norm.update(normal((4, 5), seed) + seed)
        resumed.load_state_dict(json.loads(json.dumps(norm.state_dict())))
        values = normal((2, 2))
        assert torch.equal(resumed.normalize_old(values), norm.normalize_old(values))
        for each in (norm, resumed):
            each.update(normal((4, 5), 9))
        assert resumed.state_dict() == norm.state_dict()

    def test_a_fresh_state_loads_as_fresh(self, kind):
        norm = ValueNorm(kind)
        norm.update(normal((2, 2)))
        norm.load_state_dict(ValueNorm(kind).state_dict())
        assert (norm.mean, norm.std) == (0.0, 1.0)


def test_the_floor_is_of_the_variance():
    norm = ValueNorm("ma", eps=0.25)
    norm.update(torch.tensor([1.0, 1.2]))
    assert norm.std == 0.5
    norm.update(torch.tensor([11.0, 11.2]))
    assert norm.std == pytest.approx(math.sqrt(25.01))


def test_another_kind_of_state_is_refused():
    with pytest.raises(ValueError, match=r"ma, .*exp.*--value_norm"):
        ValueNorm("exp").load_state_dict(ValueNorm("ma").state_dict())


def test_bad_constants():
    with pytest.raises(ValueError, match=r"--value_norm: unknown name 'ema'.*known names: exp, ma"):
        ValueNorm("ema")
    for beta in (1.0, -0.1, NAN):
        with pytest.raises(ValueError, match="--value_norm_beta"):
            ValueNorm(beta=beta)
    for eps in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="--value_norm_eps"):
            ValueNorm(eps=eps)
