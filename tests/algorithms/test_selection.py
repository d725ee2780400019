"""Token selections over all ranks: worked out by hand, and the same whatever the ranks and the order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.fakes import FakeStrategy, on_ranks
from torch import Tensor

from lightppo.algorithms.losses import PolicyLoss
from lightppo.algorithms.masking import LossNormalizer
from lightppo.algorithms.selection import (
    covariance,
    first_above_mean,
    select_clip_cov,
    select_kl_cov,
    top_share,
)

NAN = float("nan")
SELECTIONS = {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov}
KINDS = sorted(SELECTIONS)


def reducers(strategy: FakeStrategy) -> dict[str, Callable[[Tensor], Tensor]]:
    return {"all_reduce_sum": lambda x: strategy.all_reduce(x, op="sum")}


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def spread(tokens: int, ranks: int, seed: int = 0) -> list[Tensor]:
    """Which tokens each rank holds, in disorder; with more than two ranks the last one holds none."""
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    if ranks == 1:
        return [order]
    cuts = [tokens // 5, *[tokens] * (ranks - 2)]
    return list(order.tensor_split(cuts))


def on_all_ranks(
    fn: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    ranks: int,
    names: tuple[str, ...],
    **fixed,
):
    """``fn`` of each rank's own tokens, put together in the order of the tokens."""
    parts = spread(len(tensors[0]), ranks)

    def one_rank(strategy: FakeStrategy) -> Tensor:
        own = parts[strategy.rank]
        return fn(
            *(x[own] for x in tensors),
            **{name: reducers(strategy)[name] for name in names},
            **fixed,
        )

    results = torch.cat(on_ranks(ranks, one_rank))
    together = torch.empty_like(results)
    together[torch.cat(parts)] = results
    return together


class TestTopShare:
    @pytest.mark.parametrize(
        ("ratio", "expected"),
        [
            (0.4, [1, 0, 1, 0, 0]),  # ceil(2.0) = 2 of 5
            (0.41, [1, 0, 1, 0, 1]),  # ceil(2.05) = 3
            (1e-9, [1, 0, 0, 0, 0]),  # at least 1
            (1.0, [1, 1, 1, 1, 1]),
        ],
    )
    def test_by_hand(self, ratio, expected):
        assert top_share(torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0]), ratio).tolist() == [
            bool(x) for x in expected
        ]

    def test_the_count_is_that_of_the_ratio_as_written(self):
        assert 0.07 * 100 > 7
        assert top_share(rand(100), 0.07).sum() == 7

    def test_equal_values_are_in_together(self):
        assert top_share(torch.tensor([1.0, 3.0, 3.0, 0.0]), 0.25).tolist() == [
            False,
            True,
            True,
            False,
        ]
        assert top_share(torch.zeros(4), 0.5).all()

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_ranks_and_order_do_not_matter(self, ranks):
        values = (10 * rand(101)).round()  # many ties
        values[7] = -float("inf")
        chosen = on_all_ranks(top_share, (values,), ranks, ("all_reduce_sum",), ratio=0.2)
        # the 21st of ceil(20.2)
        assert torch.equal(chosen, values >= values.sort(descending=True).values[20])
        assert 21 <= chosen.sum() < 101

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_numbers_of_every_size_and_sign(self, dtype):
        values = (torch.randn(300, generator=torch.Generator().manual_seed(1)).double() ** 9).to(
            dtype
        )
        values[:6] = torch.tensor(
            [0.0, -0.0, 1e-42, -1e-42, float("inf"), -float("inf")], dtype=dtype
        )
        ordered = values.sort(descending=True).values
        for k in (1, 2, 7, 140, 150, 160, 299, 300):
            chosen = on_all_ranks(top_share, (values,), 3, ("all_reduce_sum",), ratio=k / 300)
            assert torch.equal(chosen, values >= ordered[k - 1]), k

    def test_what_travels_does_not_grow_with_the_tokens(self):
        def numbers(tokens: int) -> int:
            sent = []
            top_share(rand(tokens), 0.2, lambda x: sent.append(x.numel()) or x)
            return sum(sent)

        assert numbers(10) == numbers(10_000) < 1100

    def test_no_tokens_anywhere(self):
        assert on_all_ranks(
            top_share, (torch.zeros(0),), 2, ("all_reduce_sum",), ratio=0.2
        ).shape == (0,)

    def test_nan_on_one_rank_is_refused_on_all(self):
        def one_rank(strategy: FakeStrategy) -> str:
            values = torch.tensor([1.0, NAN]) if strategy.rank == 1 else torch.ones(3)
            with pytest.raises(ValueError, match=r"1 of 5 .*NaN"):
                top_share(values, 0.5, reducers(strategy)["all_reduce_sum"])
            return "refused"

        assert on_ranks(2, one_rank) == ["refused", "refused"]


class TestFirstAboveMean:
    @pytest.mark.parametrize(
        ("most", "expected"),
        [(0, 1), (0.74, 1), (0.75, 3), (1.7, 3), (2, 6), (2.9, 9), (3, float("inf"))],
    )
    def test_by_hand(self, most, expected):
        """Means up to 0, 1, 3, 6 and 9: 0, 3/4, 12/7, 18/8 and 27/9."""
        assert (
            first_above_mean(torch.tensor([3.0, 1.0, 0.0, 1.0, NAN, 3.0, 1.0, 3.0, 9.0, 6.0]), most)
            == expected
        )

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_ranks_and_order_do_not_matter(self, ranks):
        values = (torch.randn(301, generator=torch.Generator().manual_seed(1)).double() ** 9).abs()
        values[:50], values[50:60] = values[50:100].clone(), 0.0  # ties
        ordered = values.sort().values
        means, parts = ordered.cumsum(0) / torch.arange(1, 302), spread(301, ranks)
        for i in range(0, 300, 23):
            most = float(means[i] + means[i + 1]) / 2

            def one_rank(strategy: FakeStrategy, most: float = most) -> float:
                return first_above_mean(
                    values[parts[strategy.rank]], most, reducers(strategy)["all_reduce_sum"]
                )

            assert on_ranks(ranks, one_rank) == [float(ordered[means > most][0])] * ranks, i

    def test_what_travels_does_not_grow_with_the_tokens(self):
        def numbers(tokens: int) -> int:
            sent = []
            first_above_mean(rand(tokens), 0.2, lambda x: sent.append(x.numel()) or x)
            return sum(sent)

        assert max(numbers(10), numbers(10_000)) <= 2 * 64

    def test_without_tokens_nothing_is_above(self):
        assert first_above_mean(torch.zeros(0), 0.0) == float("inf")


class TestCovariance:
    def test_by_hand(self):
        # means -2 and 1: (-1 + 2)(1 - 1), (-3 + 2)(-1 - 1), (-2 + 2)(3 - 1)
        result = covariance(torch.tensor([-1.0, -3.0, -2.0]), torch.tensor([1.0, -1.0, 3.0]))
        assert result.tolist() == [0.0, 2.0, 0.0]

    def test_its_mean_is_the_covariance(self):
        log_probs, advantages = rand(50).double(), rand(50, seed=1).double()
        expected = torch.stack([log_probs, advantages]).cov(correction=0)[0, 1]
        torch.testing.assert_close(covariance(log_probs, advantages).mean(), expected)

    def test_equal_advantages_covary_with_nothing(self):
        assert not covariance(rand(9), torch.full((9,), 0.7)).any()

    def test_one_token(self):
        assert covariance(torch.tensor([-3.0]), torch.tensor([2.0])).tolist() == [0.0]

    def test_precision(self):
        log_probs, advantages = rand(1000, seed=1).double() - 1e6, rand(1000, seed=2).double()
        assert covariance(log_probs, advantages).dtype == torch.float64
        single = covariance(log_probs.float(), advantages.float())  # a common offset costs nothing
        assert single.dtype == torch.float32
        exact = covariance(log_probs.float().double(), advantages.float().double())
        torch.testing.assert_close(single, exact.float())
        assert (
            covariance(torch.zeros(2).bfloat16(), torch.zeros(2).bfloat16()).dtype == torch.float32
        )

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_ranks_and_order_do_not_matter(self, ranks):
        log_probs, advantages = rand(101).log(), rand(101, seed=1)
        together = on_all_ranks(covariance, (log_probs, advantages), ranks, ("all_reduce_sum",))
        torch.testing.assert_close(
            together, covariance(log_probs, advantages), rtol=1e-6, atol=1e-7
        )

    def test_bad_input(self):
        with pytest.raises(ValueError, match=r"log_probs \(3,\), advantages \(2,\)"):
            covariance(torch.zeros(3), torch.zeros(2))
        for bad in (NAN, float("inf")):
            with pytest.raises(ValueError, match="not finite"):
                covariance(torch.tensor([0.0, bad]), torch.zeros(2))


class TestClipCov:
    # mean log prob 0, mean advantage 0: the products themselves
    LOG_PROBS = torch.tensor([1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 0.0, 0.0])
    # products 1, 1, 2, 2, 3, 3, 0, 0
    ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 9.0, -9.0])
    UNIFORMS = torch.tensor([0.0, 0.1, 0.9, 0.2, 0.3, 0.8, 0.05, 0.06])

    def chosen(self, ratio: float, low: float = 1.0, high: float = 5.0) -> list[int]:
        options = {"clip_cov_ratio": ratio, "clip_cov_low": low, "clip_cov_high": high}
        chosen = SELECTIONS["clip_cov"](
            self.LOG_PROBS, self.ADVANTAGES, self.UNIFORMS, options=options
        )
        return chosen.nonzero().flatten().tolist()

    def test_by_hand(self):
        # covariances above 1: tokens 2, 3, 4, 5, with random numbers 0.9, 0.2, 0.3, 0.8
        assert self.chosen(0.25) == [3, 4]  # floor(2.0) = 2 of 8
        assert self.chosen(0.37) == [3, 4]  # floor(2.96) = 2
        assert self.chosen(0.375) == [3, 4, 5]
        assert self.chosen(2e-4) == [3]  # at least 1
        assert self.chosen(1.0) == [2, 3, 4, 5]  # fewer than 8 are in the band

    def test_the_band_is_open(self):
        assert self.chosen(1.0, low=2.0) == [4, 5]
        assert self.chosen(1.0, low=0.5, high=3.0) == [0, 1, 2, 3]
        assert self.chosen(1.0, low=3.0) == []

    def test_the_count_is_that_of_the_ratio_as_written(self):
        assert 0.29 * 100 < 29
        options = {"clip_cov_ratio": 0.29, "clip_cov_low": -9.0, "clip_cov_high": 9.0}
        assert (
            SELECTIONS["clip_cov"](
                rand(100), rand(100, seed=1), rand(100, seed=2), options=options
            ).sum()
            == 29
        )

    def test_every_candidate_has_the_same_chance(self):
        options = {"clip_cov_ratio": 0.25, "clip_cov_low": 1.0, "clip_cov_high": 5.0}
        draws = [
            SELECTIONS["clip_cov"](
                self.LOG_PROBS, self.ADVANTAGES, rand(8, seed=seed), options=options
            )
            for seed in range(400)
        ]
        share = torch.stack(draws).float().mean(0)
        assert share[[0, 1, 6, 7]].tolist() == [0.0] * 4
        assert (share[2:6] - 0.5).abs().max() < 0.1  # 2 of 4; the standard error is 0.025


class TestKLCov:
    def test_by_hand(self):
        chosen = SELECTIONS["kl_cov"](
            TestClipCov.LOG_PROBS,
            TestClipCov.ADVANTAGES,
            TestClipCov.UNIFORMS,
            options={"kl_cov_ratio": 0.375},
        )
        # products 1, 1, 2, 2, 3, 3, 0, 0; floor(3.0) = 3: both 3s, and the 2 of the smaller random number
        assert chosen.nonzero().flatten().tolist() == [3, 4, 5]

    def test_at_least_one(self):
        chosen = SELECTIONS["kl_cov"](
            rand(8), rand(8, seed=1), rand(8, seed=2), options={"kl_cov_ratio": 2e-3}
        )
        assert chosen.nonzero().item() == covariance(rand(8), rand(8, seed=1)).argmax()

    def test_constant_rewards_are_drawn_by_the_random_numbers(self):
        chosen = SELECTIONS["kl_cov"](
            rand(10), torch.zeros(10), rand(10, seed=2), options={"kl_cov_ratio": 0.3}
        )
        assert torch.equal(chosen, rand(10, seed=2) <= rand(10, seed=2).sort().values[2])


@pytest.mark.parametrize("kind", KINDS)
class TestEverySelection:
    OPTIONS = {
        "clip_cov_ratio": 0.1,
        "clip_cov_low": 0.02,
        "clip_cov_high": 0.2,
        "kl_cov_ratio": 0.1,
    }

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    @pytest.mark.parametrize("equal_rows", [False, True])
    def test_ranks_and_order_do_not_matter(self, kind, ranks, equal_rows):
        tokens = [rand(200, seed=seed) for seed in range(3)]
        # the same answer twice: its tokens come with the same random numbers and cannot be told
        # apart
        if equal_rows:
            tokens = [x[:100].repeat(2) for x in tokens]
        expected = SELECTIONS[kind](*tokens, options=self.OPTIONS)
        assert expected.sum() == 20
        result = on_all_ranks(
            SELECTIONS[kind], tuple(tokens), ranks, ("all_reduce_sum",), options=self.OPTIONS
        )
        assert torch.equal(result, expected)
        if equal_rows:
            assert torch.equal(result[:100], result[100:])

    def test_one_rank_more_than_there_are_tokens(self, kind):
        options = self.OPTIONS | {"clip_cov_low": -1.0}
        chosen = on_all_ranks(
            SELECTIONS[kind], (torch.zeros(1),) * 3, 3, ("all_reduce_sum",), options=options
        )
        assert chosen.tolist() == [True]  # at least one, and there is but one

    def test_no_tokens_anywhere(self, kind):
        empty = (torch.zeros(0),) * 3
        names = ("all_reduce_sum",)
        assert on_all_ranks(SELECTIONS[kind], empty, 2, names, options=self.OPTIONS).shape == (0,)

    def test_bad_input(self, kind):
        with pytest.raises(ValueError, match=r"advantages \(2,\)"):
            SELECTIONS[kind](torch.zeros(3), torch.zeros(2), torch.zeros(3), options=self.OPTIONS)

    def test_nothing_keeps_a_gradient(self, kind):
        log_probs = rand(10).requires_grad_()
        assert not SELECTIONS[kind](
            log_probs, rand(10, seed=1), rand(10, seed=2), options=self.OPTIONS
        ).requires_grad
        assert not covariance(log_probs, rand(10)).requires_grad

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_the_step_of_a_loss_does_not_depend_on_ranks(self, kind, ranks):
        """From the log probs of a rollout to the gradient of the step, rows spread over ranks."""
        mask = torch.tensor([5, 1, 8, 0, 3, 8])[:, None] > torch.arange(8)
        old, advantages, uniforms = (rand(6, 8, seed=seed) for seed in range(3))
        loss_fn = PolicyLoss(
            policy_loss=kind, options={n: v for n, v in self.OPTIONS.items() if n.startswith(kind)}
        )

        def step(strategy: FakeStrategy) -> Tensor:
            rows = slice(strategy.rank, None, strategy.world_size)
            own, reduce = mask[rows], reducers(strategy)
            selected = torch.zeros_like(own)
            selected[own] = SELECTIONS[kind](
                old[rows][own],
                advantages[rows][own],
                uniforms[rows][own],
                options=loss_fn.options,
                **reduce,
            )
            normalizer = LossNormalizer.from_masks(
                [own], all_reduce_sum=reduce["all_reduce_sum"], dp_size=strategy.world_size
            )
            log_probs = (old + 0.1).requires_grad_()
            loss_fn(
                log_probs[rows], old[rows], advantages[rows], own, normalizer, selected=selected
            )[0].backward()
            return log_probs.grad

        (whole,) = on_ranks(1, step)
        gradient = torch.stack(on_ranks(ranks, step)).mean(0)
        torch.testing.assert_close(gradient, whole)
        unselected = PolicyLoss(policy_loss="ppo", clip_eps_low=0.9, clip_eps_high=0.9)
        log_probs = (old + 0.1).requires_grad_()
        unselected(log_probs, old, advantages, mask)[0].backward()
        # floor(0.1 · 25) tokens are treated differently
        assert ((whole - log_probs.grad).abs() > 1e-6).sum() == 2
