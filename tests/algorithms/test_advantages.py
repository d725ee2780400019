from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightppo.algorithms.advantages import ADVANTAGE_ESTIMATORS, get_estimator, reward_to_go
from lightppo.algorithms.traits import ESTIMATOR_TRAITS

NAN = float("nan")


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
        "greedy_scores": None,  # a later estimator's argument: the others take no notice
    } | given
    if scores is None:
        scores = (rewards * mask).sum(1)
    return get_estimator(name).fn(token_rewards=rewards, action_mask=mask, scores=scores, **arguments)


class TestTable:
    def test_every_estimator_has_its_traits_and_the_other_way_round(self):
        assert ADVANTAGE_ESTIMATORS.keys() == ESTIMATOR_TRAITS.keys()
        for name, entry in ADVANTAGE_ESTIMATORS.items():
            traits = ESTIMATOR_TRAITS[name]
            assert (entry.needs_critic, entry.min_group_size, entry.whiten) == (
                traits.needs_critic,
                traits.min_group_size,
                traits.whiten,
            )

    def test_what_each_declares(self):
        rows = {name: (e.needs_critic, e.min_group_size, e.whiten) for name, e in ADVANTAGE_ESTIMATORS.items()}
        assert rows["gae"] == (True, 1, True)
        assert rows["rloo"] == (False, 2, False)
        assert rows["grpo"] == rows["group_norm"] == (False, 2, False)
        assert get_estimator("grpo").fn is get_estimator("group_norm").fn

    def test_unknown_name(self):
        with pytest.raises(ValueError, match=r"--advantage_estimator: unknown name 'gea'. Did you mean 'gae'.*rloo"):
            get_estimator("gea")

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_every_estimator_is_invariant(self, name):
        """Order of the samples, padding width, and what lies under the mask change nothing; masked positions are 0."""
        generator = torch.Generator().manual_seed(0)
        rewards, values = torch.randn(6, 5, generator=generator), torch.randn(6, 5, generator=generator)
        mask = torch.rand(6, 5, generator=generator) > 0.3
        mask[4] = False
        bootstrap, groups = torch.randn(6, generator=generator), torch.tensor([7, 7, -2, -2, 7, -2])
        rewards = rewards * mask
        given = {
            "values": values,
            "bootstrap_values": bootstrap,
            "group_ids": groups,
            "scores": rewards.sum(1),
            "gamma": 0.9,
        }
        whole = estimate(name, rewards, mask, **given)
        assert all((x[~mask] == 0).all() for x in whole)
        assert whole[0].abs().sum() > 0

        order = torch.tensor([5, 2, 0, 3, 1, 4])
        shuffled = estimate(
            name, rewards[order], mask[order], **{k: v if k == "gamma" else v[order] for k, v in given.items()}
        )
        for got, expected in zip(shuffled, whole):
            torch.testing.assert_close(got, expected[order])

        pad = torch.nn.functional.pad
        dirty = values.masked_fill(~mask, NAN)
        wide = estimate(
            name, pad(rewards, (0, 3)), pad(mask, (0, 3)), **(given | {"values": pad(dirty, (0, 3), value=NAN)})
        )
        for got, expected in zip(wide, whole):
            assert torch.equal(got, pad(expected, (0, 3)))

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_every_estimator_takes_an_all_masked_batch(self, name):
        zeros, mask = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
        out = estimate(
            name, zeros, mask, values=zeros + 5, bootstrap_values=torch.ones(2), group_ids=torch.zeros(2).long()
        )
        assert all(torch.equal(x, zeros) for x in out)

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_no_gradient_leaks_into_the_targets(self, name):
        values, rewards = torch.zeros(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
        out = estimate(name, rewards, torch.ones(2, 2).bool(), values=values, group_ids=torch.zeros(2).long())
        assert not any(x.requires_grad for x in out)


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
        with pytest.raises(ValueError, match=r"bootstrap_values \(2, 1\) do not fit"):
            estimate("gae", rewards, mask, values=rewards, bootstrap_values=torch.zeros(2, 1))


class TestGroups:
    """RLOO and group_norm (= GRPO)."""

    MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [0, 1]], dtype=torch.bool)
    SCORES = torch.tensor([1.0, 4.0, 2.0, 6.0, 4.0])
    GROUPS = torch.tensor([30, -1, 30, 30, -1])  # arbitrary ids, not contiguous: scores (1, 2, 6) and (4, 4)

    def run(self, name: str, **given: object) -> tuple[Tensor, Tensor]:
        return estimate(name, torch.zeros(5, 2), self.MASK, scores=self.SCORES, group_ids=self.GROUPS, **given)

    def test_rloo_by_hand(self):
        advantages, _ = self.run("rloo")
        # 1 - (2 + 6)/2 = -3, 2 - (1 + 6)/2 = -1.5, 6 - (1 + 2)/2 = 4.5; 4 - 4 = 0
        torch.testing.assert_close(
            advantages, torch.tensor([[-3.0, -3.0], [0.0, 0.0], [-1.5, -1.5], [4.5, 4.5], [0.0, 0.0]])
        )

    def test_group_norm_by_hand(self):
        advantages, _ = self.run("group_norm", std_eps=1e-6)
        # mean 3, squares 4 + 1 + 9 = 14, unbiased std sqrt(14/2) = 2.6457513; (-2, -1, 3) / 2.6457523
        a, b, c = -0.7559286, -0.3779643, 1.1338930
        torch.testing.assert_close(advantages, torch.tensor([[a, a], [0.0, 0.0], [b, b], [c, c], [0.0, 0.0]]))

    def test_std_eps_is_added_to_the_std(self):
        advantages, _ = self.run("grpo", std_eps=7**0.5)
        # std = sqrt(7), so the denominator is 2·sqrt(7): 3 / 5.2915026
        assert advantages[3, 0].item() == pytest.approx(0.5669467)

    def test_binary_rewards_as_in_a_verifiable_task(self):
        mask = torch.ones(4, 1).bool()
        advantages, _ = estimate(
            "grpo", torch.tensor([[1.0], [0.0], [0.0], [0.0]]), mask, group_ids=torch.zeros(4).long()
        )
        # mean 0.25, squares 0.5625 + 3·0.0625 = 0.75, std sqrt(0.75/3) = 0.5: 0.75/0.5, -0.25/0.5
        torch.testing.assert_close(advantages.flatten(), torch.tensor([1.5, -0.5, -0.5, -0.5]), rtol=1e-5, atol=0)

    @pytest.mark.parametrize("name", ["rloo", "grpo"])
    @pytest.mark.parametrize("score", [0.0, 0.1, -1e6, 1 / 3])
    @pytest.mark.parametrize("std_eps", [1e-6, 0.0])
    def test_equal_scores_give_an_exact_zero(self, name, score, std_eps):
        # in float32 the mean of seven 0.1 is off by 7e-9, and /1e-6 would make advantages of 0.7% out of nothing
        rewards, mask = torch.full((7, 1), score), torch.ones(7, 1).bool()
        advantages, _ = estimate(name, rewards, mask, group_ids=torch.zeros(7).long(), std_eps=std_eps)
        assert torch.equal(advantages, torch.zeros(7, 1))

    @pytest.mark.parametrize("name", ["rloo", "grpo"])
    def test_a_sample_without_trained_tokens_leaves_the_statistics(self, name):
        rewards = torch.tensor([[1.0], [2.0], [6.0], [0.0]])
        mask = torch.tensor([[True], [True], [True], [False]])
        scores = torch.tensor([1.0, 2.0, 6.0, NAN])
        four = estimate(name, rewards, mask, scores=scores, group_ids=torch.zeros(4).long())
        three = estimate(name, rewards[:3], mask[:3], group_ids=torch.zeros(3).long())
        for got, expected in zip(four, three):
            assert torch.equal(got, torch.cat([expected, torch.zeros(1, 1)]))

    @pytest.mark.parametrize("name", ["rloo", "grpo"])
    def test_the_only_sample_left_has_nothing_to_compare_with(self, name):
        mask = torch.tensor([[True], [False]])
        advantages, _ = estimate(name, torch.tensor([[5.0], [0.0]]), mask, group_ids=torch.zeros(2).long())
        assert torch.equal(advantages, torch.zeros(2, 1))

    @pytest.mark.parametrize("name", ["rloo", "grpo"])
    def test_groups_do_not_see_each_other(self, name):
        generator = torch.Generator().manual_seed(0)
        rewards, mask = torch.randn(6, 4, generator=generator), torch.ones(6, 4).bool()
        groups = torch.tensor([1, 0, 1, 0, 0, 1])
        whole, _ = estimate(name, rewards, mask, group_ids=groups)
        for group in (0, 1):
            rows = groups == group
            alone, _ = estimate(name, rewards[rows], mask[rows], group_ids=groups[rows])
            torch.testing.assert_close(alone, whole[rows])

    @pytest.mark.parametrize("name", ["rloo", "grpo"])
    def test_advantages_of_a_group_sum_to_zero(self, name):
        rewards = torch.randn(8, 1, generator=torch.Generator().manual_seed(0))
        advantages, _ = estimate(name, rewards, torch.ones(8, 1).bool(), group_ids=torch.arange(8) % 2)
        torch.testing.assert_close(advantages.view(4, 2).sum(0), torch.zeros(2), rtol=0, atol=1e-6)

    def test_the_kl_in_the_reward_counts(self):
        # scores 1 - 0.4 and 1 - 0: RLOO gives ∓0.4
        rewards = torch.tensor([[-0.1, 0.7], [0.0, 1.0]])
        advantages, _ = estimate("rloo", rewards, torch.ones(2, 2).bool(), group_ids=torch.zeros(2).long())
        torch.testing.assert_close(advantages, torch.tensor([[-0.4, -0.4], [0.4, 0.4]]))

    @pytest.mark.parametrize("name", ["rloo", "grpo"])
    def test_returns_are_the_rewards_to_go(self, name):
        rewards = torch.tensor([[0.5, 9.0, 1.0], [1.0, 2.0, 4.0]])
        mask = torch.tensor([[True, False, True], [True, True, True]])
        _, returns = estimate(name, rewards, mask, group_ids=torch.zeros(2).long(), gamma=0.5)
        # 0.5 + 0.5·1, hole, 1;  1 + 0.5·(2 + 0.5·4), 2 + 0.5·4, 4
        assert returns.tolist() == [[1.0, 0.0, 1.0], [3.0, 4.0, 4.0]]

    @pytest.mark.parametrize("name", ["rloo", "grpo"])
    def test_a_group_of_one_is_an_error(self, name):
        with pytest.raises(ValueError, match=r"group 9 has 1 sample\(s\).*set --n_samples_per_prompt to 2 or more"):
            estimate(name, torch.zeros(3, 1), torch.ones(3, 1).bool(), group_ids=torch.tensor([4, 9, 4]))

    @pytest.mark.parametrize("name", ["rloo", "grpo"])
    def test_bad_input(self, name):
        with pytest.raises(ValueError, match="group_ids must be given"):
            estimate(name, torch.zeros(2, 1), torch.ones(2, 1).bool())
        with pytest.raises(ValueError, match=r"group_ids \(3,\)"):
            estimate(name, torch.zeros(2, 1), torch.ones(2, 1).bool(), group_ids=torch.zeros(3).long())
        with pytest.raises(ValueError, match=r"token_rewards \(2, 2\), action_mask \(2, 1\)"):
            estimate(name, torch.zeros(2, 2), torch.ones(2, 1).bool(), group_ids=torch.zeros(2).long())
