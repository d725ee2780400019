from __future__ import annotations

import json
import math

import pytest
import torch

from lightppo.algorithms.shaping import Moments, RunningMeanStd

NAN, INF = float("nan"), float("inf")


def scores(count: int = 60, seed: int = 0) -> torch.Tensor:
    return 5.0 + 3.0 * torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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
            with pytest.raises(ValueError, match="the scores of this rollout hold NaN or infinite"):
                Moments.of(torch.tensor([1.0, bad if rank == 1 else 2.0]), None, all_reduce_sum, name="scores")
            return True

        assert simulate_ranks(2, one_rank) == [True, True]

    def test_shapes(self):
        with pytest.raises(ValueError, match=r"values \(2,\), mask \(1,\)"):
            Moments.of(torch.zeros(2), torch.ones(1))


class TestRunningMeanStd:
    def test_by_hand(self):
        running = RunningMeanStd(eps=1e-6)
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
        torch.testing.assert_close(running.normalize(torch.full((2,), 0.1)), torch.zeros(2), atol=1e-6, rtol=0)

    def test_the_first_batch_is_normalised_by_itself(self):
        running, values = RunningMeanStd(), scores()
        running.update(values)
        torch.testing.assert_close(running.normalize(values).mean(), torch.tensor(0.0).double(), atol=1e-12, rtol=0)
        torch.testing.assert_close(
            running.normalize(values).std(correction=0), torch.tensor(1.0).double(), rtol=1e-6, atol=0
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
        with pytest.raises(ValueError, match="the scores of this rollout"):
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

    def test_bad_eps(self):
        with pytest.raises(ValueError, match="eps must be above 0"):
            RunningMeanStd(eps=0.0)
