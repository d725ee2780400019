"""Running statistics, and the critic's normalised returns."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lightppo.experience.normalisation import Moments, RunningMeanStd, ValueNorm

NAN, INF = float("nan"), float("inf")


def scores(count: int = 60, seed: int = 0) -> torch.Tensor:
    return 5.0 + 3.0 * torch.randn(
        count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


class TestMoments:
    def test_by_hand(self):
        values = torch.tensor([[1.0, 3.0, NAN], [8.0, INF, NAN]])
        mask = torch.tensor([[True, True, False], [True, False, False]])
        # (1 + 3 + 8) / 3 = 4; (9 + 1 + 16) / 3
        assert Moments.of(values, mask) == Moments(3.0, 4.0, pytest.approx(26 / 3))
        assert Moments.of(torch.tensor([1.0, 3.0])) == Moments(2.0, 2.0, 1.0)
        assert Moments.of(torch.tensor([7.0])) == Moments(1.0, 7.0, 0.0)

    def test_nothing(self):
        assert Moments.of(torch.tensor([NAN]), torch.tensor([False])) == Moments(0.0, 0.0, 0.0)
        assert Moments.of(torch.zeros(0)) == Moments(0.0, 0.0, 0.0)

    def test_a_large_offset_loses_nothing(self):
        # E[x²] - E[x]² in float64 would be off by 1e16·2^-53 = 1
        values = 1e8 + torch.tensor([-1.0, 1.0], dtype=torch.float64)
        assert Moments.of(values).variance == 1.0

    @pytest.mark.parametrize("bad", [NAN, INF])
    def test_broken_numbers_are_refused_on_every_rank(self, simulate_ranks, bad):
        def one_rank(rank, all_reduce_sum):
            with pytest.raises(ValueError, match="scores"):
                Moments.of(
                    torch.tensor([1.0, bad if rank == 1 else 2.0]),
                    None,
                    all_reduce_sum,
                    name="scores",
                )
            return True

        assert simulate_ranks(2, one_rank) == [True, True]

    def test_shapes(self):
        with pytest.raises(ValueError, match=r"values \(2,\), mask \(1,\)"):
            Moments.of(torch.zeros(2), torch.ones(1))


class TestRunningMeanStd:
    def test_by_hand(self):
        running = RunningMeanStd()
        running.update(torch.tensor([1.0, 3.0]))
        assert (running.count, running.mean, running.std) == (2, 2.0, 1.0)
        running.update(torch.tensor([8.0]))
        # of 1, 3, 8: mean 4, variance (9 + 1 + 16) / 3
        assert (running.count, running.mean) == (3, pytest.approx(4.0))
        assert running.std == pytest.approx(math.sqrt(26 / 3))
        out = running.normalize(torch.tensor([4.0, 8.0]))
        torch.testing.assert_close(out, torch.tensor([0.0, 4 / math.sqrt(26 / 3)]))

    def test_unchanged_before_there_are_two(self):
        running, values = RunningMeanStd(), torch.tensor([3.0, NAN])
        torch.testing.assert_close(running.normalize(values), values, equal_nan=True)
        running.update(values, torch.tensor([True, False]))
        assert (running.count, running.mean, running.std) == (1, 3.0, 0.0)
        torch.testing.assert_close(running.normalize(values), values, equal_nan=True)
        running.update(torch.tensor([5.0]))
        # mean 4, std 1
        torch.testing.assert_close(running.normalize(torch.tensor([5.0])), torch.tensor([1.0]))

    def test_equal_scores_give_0(self):
        running = RunningMeanStd()
        for _ in range(3):
            running.update(torch.full((7,), 0.1))
        torch.testing.assert_close(
            running.normalize(torch.full((2,), 0.1)), torch.zeros(2), atol=1e-6, rtol=0
        )

    def test_the_first_batch_is_normalised_by_itself(self):
        running, values = RunningMeanStd(), scores()
        running.update(values)
        torch.testing.assert_close(
            running.normalize(values).mean(), torch.tensor(0.0).double(), atol=1e-12, rtol=0
        )
        torch.testing.assert_close(
            running.normalize(values).std(correction=0),
            torch.tensor(1.0).double(),
            rtol=1e-6,
            atol=0,
        )

    @pytest.mark.parametrize("sizes", [[60], [1] * 60, [2, 50, 8], [0, 60, 0], [59, 1]])
    def test_batches_and_their_order_do_not_matter(self, sizes):
        values = scores()
        expected_mean, expected_std = values.mean().item(), values.std(correction=0).item()
        batches = list(values.split(sizes))
        for ordered in (batches, batches[::-1]):
            running = RunningMeanStd()
            for batch in ordered:
                running.update(batch)
            assert running.count == 60
            assert running.mean == pytest.approx(expected_mean, rel=1e-13)
            assert running.std == pytest.approx(expected_std, rel=1e-13)

    @pytest.mark.parametrize("first", [0, 1, 25, 60])
    def test_the_split_over_ranks_does_not_matter(self, simulate_ranks, first):
        values = scores()
        alone = RunningMeanStd()
        for batch in (values, values[:10] * 2):
            alone.update(batch)

        def one_rank(rank, all_reduce_sum):
            running = RunningMeanStd()
            for batch in (values, values[:10] * 2):
                own = batch[:first] if rank == 0 else batch[first:]
                running.update(own, torch.ones_like(own), all_reduce_sum)
            return running.state_dict()

        states = simulate_ranks(2, one_rank)
        assert states[0] == states[1]
        assert states[0] == pytest.approx(alone.state_dict(), rel=1e-13)

    def test_an_all_masked_batch_changes_nothing(self):
        running = RunningMeanStd()
        running.update(scores())
        before = running.state_dict()
        running.update(torch.full((4,), NAN), torch.zeros(4))
        assert running.state_dict() == before

    def test_a_refused_batch_changes_nothing(self):
        running = RunningMeanStd()
        running.update(scores())
        before = running.state_dict()
        with pytest.raises(ValueError, match="scores"):
            running.update(torch.tensor([NAN]))
        assert running.state_dict() == before

    def test_a_large_offset(self):
        running = RunningMeanStd()
        for _ in range(10):
            running.update(1e8 + torch.tensor([-1.0, 1.0], dtype=torch.float64))
        assert running.std == pytest.approx(1.0, rel=1e-9)
        normalized = running.normalize(torch.tensor([1e8 + 1.0], dtype=torch.float64))
        assert normalized.item() == pytest.approx(1.0, rel=1e-5)

    def test_float32_and_bfloat16(self):
        values = scores()
        exact, single = RunningMeanStd(), RunningMeanStd()
        exact.update(values)
        single.update(values.float())
        out = single.normalize(values.float())
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), exact.normalize(values), rtol=1e-5, atol=1e-6)
        assert single.normalize(values.bfloat16()).dtype == torch.float32

    def test_state_survives_json(self):
        running, resumed = RunningMeanStd(), RunningMeanStd()
        running.update(scores())
        resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
        for each in (running, resumed):
            each.update(scores(7, seed=1))
        assert resumed.state_dict() == running.state_dict()
        assert resumed.count == 67


KINDS = ["exp", "ma"]


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

    def test_kind_is_ma_or_exp(self):
        with pytest.raises(ValueError, match="ma or exp"):
            ValueNorm("mean")

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
        assert norm.normalize(returns).max().item() == pytest.approx(
            math.sqrt(0.995 / 0.005), rel=1e-3
        )


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
        with pytest.raises(ValueError, match="returns"):
            norm.update(torch.tensor([[1.0, bad]]))
        assert norm.state_dict() == before

    @pytest.mark.parametrize("first", [0, 1, 5, 8])
    def test_the_split_over_ranks_and_the_order_of_rows_do_not_matter(
        self, kind, simulate_ranks, first
    ):
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
    with pytest.raises(ValueError, match=r"--value_norm ma, .*exp"):
        ValueNorm("exp").load_state_dict(ValueNorm("ma").state_dict())
