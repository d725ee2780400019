from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightppo.algorithms.advantages import reward_to_go
from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS
from lightppo.algorithms.masking import identity, whiten

NAN = float("nan")
CRITIC_FREE = [name for name, traits in ADVANTAGE_ESTIMATORS.items() if not traits.needs_critic]


def estimate(
    name: str, rewards: Tensor, mask: Tensor, *, scores: Tensor | None = None, **given: object
) -> tuple[Tensor, Tensor]:
    """Call as the trainer does: all keyword arguments, whatever the estimator."""
    arguments = {
        "values": None,
        "bootstrap_values": None,
        "group_ids": None,
        "gamma": 1.0,
        "lambd": 0.95,
        "std_eps": 1e-6,
        "divide_std": True,
        "baseline_scores": None,
        "all_reduce_sum": identity,
        "a_later_argument": None,  # the others take no notice
    } | given
    if scores is None:
        scores = (rewards * mask).sum(1)
    return ADVANTAGE_ESTIMATORS[name].fn(token_rewards=rewards, action_mask=mask, scores=scores, **arguments)


def random_batch() -> dict[str, Tensor]:
    """Six rows of two prompts, in any order, with holes and a row without a trained token; 0 under the mask."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(6, 5, generator=generator), torch.randn(6, 5, generator=generator)
    mask = torch.rand(6, 5, generator=generator) > 0.3
    mask[4] = False
    rewards = rewards * mask
    return {
        "rewards": rewards,
        "mask": mask,
        "values": values,
        "bootstrap_values": torch.randn(6, generator=generator),
        "baseline_scores": torch.randn(6, generator=generator),
        "group_ids": torch.tensor([7, 7, -2, -2, 7, -2]),
        "scores": rewards.sum(1),
    }


class TestTable:
    @pytest.mark.parametrize(("name", "other"), [("reinforce", "reinforce++"), ("grpo", "group_norm")])
    def test_two_names_of_one_estimator(self, name, other):
        assert ADVANTAGE_ESTIMATORS[name] == ADVANTAGE_ESTIMATORS[other]

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_every_estimator_is_invariant(self, name):
        """Order of the samples, padding width, and what lies under the mask change nothing; masked positions are 0."""
        batch = random_batch()
        mask = batch["mask"]
        whole = estimate(name, **batch, gamma=0.9)
        assert all((x[~mask] == 0).all() for x in whole)
        assert all(x.isfinite().all() for x in whole)
        assert whole[0].abs().sum() > 0

        order = torch.tensor([5, 2, 0, 3, 1, 4])
        shuffled = estimate(name, **{key: tensor[order] for key, tensor in batch.items()}, gamma=0.9)
        for got, expected in zip(shuffled, whole):
            torch.testing.assert_close(got, expected[order])

        pad = torch.nn.functional.pad
        dirty = {key: pad(batch[key].masked_fill(~mask, NAN), (0, 3), value=NAN) for key in ("rewards", "values")}
        empty_row = {key: batch[key].masked_fill(~mask.any(1), NAN) for key in ("scores", "baseline_scores")}
        wide = estimate(name, **(batch | dirty | empty_row | {"mask": pad(mask, (0, 3))}), gamma=0.9)
        for got, expected in zip(wide, whole):
            assert torch.equal(got, pad(expected, (0, 3)))

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_two_ranks_give_what_one_gives(self, name, simulate_ranks):
        batch = random_batch()
        rows = [batch["group_ids"] == 7, batch["group_ids"] == -2]  # the samples of a prompt are on one rank
        whole = estimate(name, **batch)
        shares = [{key: tensor[rows[rank]] for key, tensor in batch.items()} for rank in range(2)]
        parts = simulate_ranks(2, lambda rank, s: estimate(name, **shares[rank], all_reduce_sum=s))
        for rank, part in enumerate(parts):
            for got, expected in zip(part, whole):
                torch.testing.assert_close(got, expected[rows[rank]])

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_a_rank_without_samples_takes_part(self, name, simulate_ranks):
        batch = random_batch()
        shares = [batch, {key: tensor[:0] for key, tensor in batch.items()}]
        full, empty = simulate_ranks(2, lambda rank, s: estimate(name, **shares[rank], all_reduce_sum=s))
        assert all(x.shape == (0, 5) for x in empty)
        assert all(torch.equal(got, expected) for got, expected in zip(full, estimate(name, **batch)))

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_every_estimator_takes_an_all_masked_batch(self, name):
        zeros, mask = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
        ones = torch.ones(2)
        given = {"values": zeros + 5, "bootstrap_values": ones, "baseline_scores": ones}
        out = estimate(name, zeros, mask, group_ids=torch.zeros(2).long(), **given)
        assert all(torch.equal(x, zeros) for x in out)

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_no_gradient_leaks_into_the_targets(self, name):
        values, rewards = torch.zeros(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
        given = {"values": values, "baseline_scores": torch.zeros(2, requires_grad=True)}
        out = estimate(name, rewards, torch.ones(2, 2).bool(), group_ids=torch.zeros(2).long(), **given)
        assert not any(x.requires_grad for x in out)

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_precision_of_the_result(self, name):
        batch = random_batch()
        single = estimate(name, **batch)
        assert all(x.dtype == torch.float32 for x in single)
        wide = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in batch.items()}
        double = estimate(name, **wide)
        for got, expected in zip(double, single):
            assert got.dtype == torch.float64
            torch.testing.assert_close(got.float(), expected, rtol=1e-5, atol=1e-6)
        narrow = {key: tensor.bfloat16() if tensor.is_floating_point() else tensor for key, tensor in batch.items()}
        assert all(x.dtype == torch.float32 for x in estimate(name, **narrow))

    @pytest.mark.parametrize("name", CRITIC_FREE)
    def test_without_a_critic_values_and_bootstraps_count_for_nothing(self, name):
        batch = random_batch()
        without = estimate(name, **(batch | {"values": None, "bootstrap_values": None}))
        assert all(torch.equal(got, expected) for got, expected in zip(without, estimate(name, **batch)))

    @pytest.mark.parametrize("name", CRITIC_FREE)
    def test_returns_are_the_rewards_to_go(self, name):
        rewards = torch.tensor([[0.5, 9.0, 1.0], [1.0, 2.0, 4.0]])
        mask = torch.tensor([[True, False, True], [True, True, True]])
        given = {"group_ids": torch.zeros(2).long(), "baseline_scores": torch.ones(2)}
        _, returns = estimate(name, rewards, mask, gamma=0.5, **given)
        # 0.5 + 0.5·1, hole, 1;  1 + 0.5·(2 + 0.5·4), 2 + 0.5·4, 4
        assert returns.tolist() == [[1.0, 0.0, 1.0], [3.0, 4.0, 4.0]]

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_shapes_that_do_not_fit_are_refused(self, name):
        given = {"values": torch.zeros(2, 2), "baseline_scores": torch.zeros(2), "group_ids": torch.zeros(2).long()}
        with pytest.raises(ValueError, match=r"token_rewards \(2, 2\), action_mask \(2, 1\)"):
            estimate(name, torch.zeros(2, 2), torch.ones(2, 1).bool(), **given)


class TestGAE:
    def test_by_hand(self):
        rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.75]])
        mask = torch.ones(1, 3, dtype=torch.bool)
        advantages, returns = estimate("gae", rewards, mask, values=values, gamma=0.5, lambd=0.5)
        # δ2 = 1 + 0.5·0 - 0.75 = 0.25            A2 = 0.25
        # δ1 = 0 + 0.5·0.75 - 0.25 = 0.125        A1 = 0.125 + 0.25·0.25 = 0.1875
        # δ0 = 0 + 0.5·0.25 - 0.5 = -0.375        A0 = -0.375 + 0.25·0.1875 = -0.328125
        assert advantages.tolist() == [[-0.328125, 0.1875, 0.25]]
        # returns = A + V
        assert returns.tolist() == [[0.171875, 0.4375, 1.0]]

    def test_a_hole_is_passed_over_as_if_it_were_not_there(self):
        rewards, values = torch.tensor([[0.1, 0.2, 1.0]]), torch.tensor([[0.5, 0.25, 0.75]])
        dense = estimate("gae", rewards, torch.ones(1, 3).bool(), values=values, gamma=0.9, lambd=0.8)
        # the same three tokens with tool output between, before and after them; what lies there is ignored
        at = torch.tensor([1, 4, 6])
        holed_rewards, holed_values = torch.full((1, 8), 9.0), torch.full((1, 8), NAN)
        mask = torch.zeros(1, 8, dtype=torch.bool)
        holed_rewards[:, at], holed_values[:, at], mask[:, at] = rewards, values, True
        holed = estimate("gae", holed_rewards, mask, values=holed_values, gamma=0.9, lambd=0.8)
        for got, expected in zip(holed, dense):
            assert torch.equal(got[:, at], expected)
            assert (got[~mask] == 0).all()

    def test_hole_by_hand(self):
        mask = torch.tensor([[True, False, True]])
        advantages, returns = estimate(
            "gae",
            torch.tensor([[0.0, 0.0, 1.0]]),
            mask,
            values=torch.tensor([[0.5, 99.0, 0.25]]),
            gamma=0.5,
            lambd=1.0,
        )
        # A2 = 1 - 0.25 = 0.75;  A0 = 0 + 0.5·0.25 - 0.5 + 0.5·0.75 = 0: V and A of position 2, one discount
        assert advantages.tolist() == [[0.0, 0.0, 0.75]]
        assert returns.tolist() == [[0.5, 0.0, 1.0]]

    def test_bootstrap_reaches_the_last_trained_token_through_the_padding(self):
        mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
        rewards, values = torch.zeros(2, 4), torch.ones(2, 4)
        advantages, returns = estimate(
            "gae", rewards, mask, values=values, bootstrap_values=torch.tensor([3.0, 0.0]), gamma=0.5, lambd=1.0
        )
        # row 0: A1 = 0 + 0.5·3 - 1 = 0.5; A0 = 0.5·1 - 1 + 0.5·0.5 = -0.25
        assert advantages[0].tolist() == [-0.25, 0.5, 0.0, 0.0]
        # returns: 0.5·3 = 1.5, 0.25·3 = 0.75: the discounted bootstrap
        assert returns[0].tolist() == [0.75, 1.5, 0.0, 0.0]
        # row 1 finished: A3 = -1, A2 = -0.5 - 0.5, A1 = -0.5 - 0.5, A0 = -0.5 - 0.5
        assert advantages[1].tolist() == [-1.0, -1.0, -1.0, -1.0]

    def test_lambda_one_gives_monte_carlo_and_lambda_zero_one_step(self):
        generator = torch.Generator().manual_seed(0)
        rewards, values = torch.randn(3, 6, generator=generator), torch.randn(3, 6, generator=generator)
        mask = torch.tensor([6, 2, 1])[:, None] > torch.arange(6)
        _, returns = estimate("gae", rewards, mask, values=values, gamma=0.9, lambd=1.0)
        torch.testing.assert_close(returns, reward_to_go(rewards, mask, 0.9))
        advantages, _ = estimate("gae", rewards, mask, values=values, gamma=0.9, lambd=0.0)
        following = torch.nn.functional.pad((values * mask)[:, 1:], (0, 1))
        torch.testing.assert_close(advantages, (rewards + 0.9 * following - values) * mask)

    def test_rows_do_not_see_each_other(self):
        generator = torch.Generator().manual_seed(0)
        rewards, values = torch.randn(4, 50, generator=generator), torch.randn(4, 50, generator=generator)
        mask = torch.tensor([50, 1, 3, 0])[:, None] > torch.arange(50)  # very different lengths
        whole = estimate("gae", rewards, mask, values=values)
        for row in range(4):
            alone = estimate("gae", rewards[[row]], mask[[row]], values=values[[row]])
            assert all(torch.equal(got, expected[[row]]) for got, expected in zip(alone, whole))

    def test_bfloat16_values_are_used_in_float32(self):
        values = torch.tensor([[1.0, 1.0]]).bfloat16()
        advantages, returns = estimate("gae", torch.tensor([[0.0, 1.001]]), torch.ones(1, 2).bool(), values=values)
        assert advantages.dtype == returns.dtype == torch.float32
        torch.testing.assert_close(advantages[0, 1], torch.tensor(0.001), rtol=0, atol=1e-7)

    def test_bad_input(self):
        rewards, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
        with pytest.raises(ValueError, match=r"gae needs values: give a critic \(--critic_pretrain\)"):
            estimate("gae", rewards, mask)
        with pytest.raises(ValueError, match=r"values \(2, 1\)"):
            estimate("gae", rewards, mask, values=torch.zeros(2, 1))
        with pytest.raises(ValueError, match=r"bootstrap_values \(2, 1\)"):
            estimate("gae", rewards, mask, values=rewards, bootstrap_values=torch.zeros(2, 1))


class TestReinforce:
    def test_discounted_reward_to_go_by_hand(self):
        rewards = torch.tensor([[-0.5, 7.0, 0.0, 2.0], [1.0, NAN, NAN, NAN]])
        mask = torch.tensor([[True, False, True, True], [True, False, False, False]])
        advantages, returns = estimate("reinforce++", rewards, mask, scores=torch.tensor([1.5, 1.0]), gamma=0.5)
        # A3 = 2, A2 = 0 + 0.5·2 = 1, hole, A0 = -0.5 + 0.5·1 = 0; the answer of one token: 1
        assert advantages.tolist() == [[0.0, 0.0, 1.0, 2.0], [1.0, 0.0, 0.0, 0.0]]
        assert torch.equal(returns, advantages)

    def test_a_penalty_counts_for_the_tokens_before_it_only(self):
        # -β·KL of 0.25 on the middle token: (1 - 0.25, 1 - 0.25, 1)
        advantages, _ = estimate("reinforce", torch.tensor([[0.0, -0.25, 1.0]]), torch.ones(1, 3).bool())
        assert advantages.tolist() == [[0.75, 0.75, 1.0]]

    def test_whitening_one_result_leaves_the_other(self):
        advantages, returns = estimate("reinforce", torch.ones(1, 2), torch.ones(1, 2).bool())
        advantages -= 5
        assert returns.tolist() == [[2.0, 1.0]]

    def test_with_its_whitening(self):
        # scores 1 and 0, two tokens each: mean 0.5, std 0.5
        mask = torch.ones(2, 2).bool()
        advantages, _ = estimate("reinforce", torch.tensor([[0.0, 1.0], [0.0, 0.0]]), mask)
        assert whiten(advantages, mask, eps=0.0).tolist() == [[1.0, 1.0], [-1.0, -1.0]]


class TestReMax:
    MASK = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])

    def test_by_hand(self):
        rewards = torch.tensor([[-0.5, NAN, 2.0], [0.0, 1.0, NAN], [NAN, NAN, NAN]])
        given = {"scores": torch.zeros(3), "baseline_scores": torch.tensor([1.0, 1.5, NAN])}
        advantages, returns = estimate("remax", rewards, self.MASK, **given)
        # row 0: (2 - 0.5) - 1, hole, 2 - 1; row 1: 1 - 1.5 on both; row 2 trains nothing
        assert advantages.tolist() == [[0.5, 0.0, 1.0], [-0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]
        assert returns.tolist() == [[1.5, 0.0, 2.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]

    def test_the_baseline_is_not_discounted(self):
        given = {"baseline_scores": torch.tensor([1.0]), "gamma": 0.5}
        advantages, _ = estimate("remax", torch.tensor([[0.0, 0.0, 4.0]]), torch.ones(1, 3).bool(), **given)
        assert advantages.tolist() == [[0.0, 1.0, 3.0]]  # (1, 2, 4) - 1

    def test_an_answer_as_good_as_the_greedy_one_gets_zero(self):
        given = {"baseline_scores": torch.full((2,), 0.1)}
        rewards = torch.tensor([[0.0, 0.0, 0.1], [0.1, 0.0, 0.0]])
        advantages, _ = estimate("remax", rewards, torch.tensor([[1, 1, 1], [1, 0, 0]]).bool(), **given)
        assert torch.equal(advantages, torch.zeros(2, 3))

    def test_bad_input(self):
        rewards, mask = torch.zeros(2, 1), torch.ones(2, 1).bool()
        with pytest.raises(ValueError, match="--advantage_estimator remax needs baseline_scores: generate and score"):
            estimate("remax", rewards, mask)
        with pytest.raises(ValueError, match=r"baseline_scores \(2, 1\)"):
            estimate("remax", rewards, mask, baseline_scores=torch.zeros(2, 1))


class TestGroupAdvNorm:
    def test_by_hand(self):
        # prompt 5: rewards to go (2, 2) and (1), (-1); prompt 3: (4, 4, 4) and (0)
        rewards = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 4.0], [1.0, 0.0, 0.0], [-1.0, 9.0, 9.0], [9.0, 0.0, 9.0]])
        mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0], [0, 1, 0]]).bool()
        advantages, _ = estimate("group_adv_norm", rewards, mask, group_ids=torch.tensor([5, 3, 5, 5, 3]))
        # prompt 5: mean 4/4 = 1, squares 1 + 1 + 0 + 4 = 6, σ = sqrt(6/4) = 1.2247449; 1/(σ + 1e-5), -2/(σ + 1e-5)
        a, b = 0.8164899, -1.6329798
        # prompt 3: mean 12/4 = 3, squares 1 + 1 + 1 + 9 = 12, σ = sqrt(3) = 1.7320508
        c, d = 0.5773469, -1.7320408
        expected = torch.tensor([[a, a, 0.0], [c, c, c], [0.0, 0.0, 0.0], [b, 0.0, 0.0], [0.0, d, 0.0]])
        torch.testing.assert_close(advantages, expected, rtol=0, atol=2e-7)

    def test_discounted(self):
        mask = torch.tensor([[1, 1], [1, 0]]).bool()
        rewards = torch.tensor([[0.0, 4.0], [0.0, 0.0]])
        advantages, _ = estimate("group_adv_norm", rewards, mask, group_ids=torch.zeros(2).long(), gamma=0.5)
        # (2, 4) and (0): mean 2, σ = sqrt(8/3) = 1.6329932: 0, 2/1.6330032, -2/1.6330032
        torch.testing.assert_close(advantages, torch.tensor([[0.0, 1.2247374], [-1.2247374, 0.0]]))

    def test_bad_input(self):
        rewards, mask = torch.zeros(3, 1), torch.ones(3, 1).bool()
        with pytest.raises(ValueError, match="group_ids must be given"):
            estimate("group_adv_norm", rewards, mask)
        with pytest.raises(ValueError, match=r"group 9 has 1 sample\(s\).*set --n_samples_per_prompt to 2 or more"):
            estimate("group_adv_norm", rewards, mask, group_ids=torch.tensor([4, 9, 4]))
