"""Advantage estimators: by hand, and what holds for every one in the table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightppo.algorithms.advantages import (
    advantage_fn,
    gae,
    group_normalize,
    reward_to_go,
)
from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS
from lightppo.algorithms.masking import identity, whiten

NAN = float("nan")
CRITIC_FREE = [name for name, traits in ADVANTAGE_ESTIMATORS.items() if not traits.needs_critic]


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


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
        "score_norms": mask.float(),
        "all_reduce_sum": identity,
        "a_later_argument": None,  # the others take no notice
    } | given
    if scores is None:
        scores = (rewards * mask).sum(1)
    return advantage_fn(ADVANTAGE_ESTIMATORS[name])(
        token_rewards=rewards, action_mask=mask, scores=scores, **arguments
    )


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
        "score_norms": torch.rand(6, 5, generator=generator),
        "group_ids": torch.tensor([7, 7, -2, -2, 7, -2]),
        "scores": rewards.sum(1),
    }


class TestTable:
    @pytest.mark.parametrize(
        ("name", "other"), [("reinforce", "reinforce++"), ("grpo", "group_norm")]
    )
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
        assert (whole[0].abs().sum() > 0) != ADVANTAGE_ESTIMATORS[name].ignores_scores

        order = torch.tensor([5, 2, 0, 3, 1, 4])
        shuffled = estimate(
            name, **{key: tensor[order] for key, tensor in batch.items()}, gamma=0.9
        )
        for got, expected in zip(shuffled, whole):
            torch.testing.assert_close(got, expected[order])

        pad = torch.nn.functional.pad
        dirty = {
            key: pad(batch[key].masked_fill(~mask, NAN), (0, 3), value=NAN)
            for key in ("rewards", "values", "score_norms")
        }
        empty_row = {
            key: batch[key].masked_fill(~mask.any(1), NAN) for key in ("scores", "baseline_scores")
        }
        wide = estimate(
            name, **(batch | dirty | empty_row | {"mask": pad(mask, (0, 3))}), gamma=0.9
        )
        for got, expected in zip(wide, whole):
            assert torch.equal(got, pad(expected, (0, 3)))

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_two_ranks_give_what_one_gives(self, name, simulate_ranks):
        batch = random_batch()
        # the samples of a prompt are on one rank
        rows = [batch["group_ids"] == 7, batch["group_ids"] == -2]
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
        full, empty = simulate_ranks(
            2, lambda rank, s: estimate(name, **shares[rank], all_reduce_sum=s)
        )
        assert all(x.shape == (0, 5) for x in empty)
        assert all(
            torch.equal(got, expected) for got, expected in zip(full, estimate(name, **batch))
        )

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_every_estimator_takes_an_all_masked_batch(self, name):
        zeros, mask = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
        ones = torch.ones(2)
        given = {"values": zeros + 5, "bootstrap_values": ones, "baseline_scores": ones}
        out = estimate(name, zeros, mask, group_ids=torch.zeros(2).long(), **given)
        assert all(torch.equal(x, zeros) for x in out)

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_no_gradient_leaks_into_the_targets(self, name):
        values, rewards = (
            torch.zeros(2, 2, requires_grad=True),
            torch.ones(2, 2, requires_grad=True),
        )
        given = {"values": values, "baseline_scores": torch.zeros(2, requires_grad=True)}
        out = estimate(
            name, rewards, torch.ones(2, 2).bool(), group_ids=torch.zeros(2).long(), **given
        )
        assert not any(x.requires_grad for x in out)

    @pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
    def test_precision_of_the_result(self, name):
        batch = random_batch()
        single = estimate(name, **batch)
        assert all(x.dtype == torch.float32 for x in single)
        wide = {
            key: tensor.double() if tensor.is_floating_point() else tensor
            for key, tensor in batch.items()
        }
        double = estimate(name, **wide)
        for got, expected in zip(double, single):
            assert got.dtype == torch.float64
            torch.testing.assert_close(got.float(), expected, rtol=1e-5, atol=1e-6)
        narrow = {
            key: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for key, tensor in batch.items()
        }
        assert all(x.dtype == torch.float32 for x in estimate(name, **narrow))

    @pytest.mark.parametrize("name", CRITIC_FREE)
    def test_without_a_critic_values_and_bootstraps_count_for_nothing(self, name):
        batch = random_batch()
        without = estimate(name, **(batch | {"values": None, "bootstrap_values": None}))
        assert all(
            torch.equal(got, expected) for got, expected in zip(without, estimate(name, **batch))
        )

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
        given = {
            "values": torch.zeros(2, 2),
            "baseline_scores": torch.zeros(2),
            "group_ids": torch.zeros(2).long(),
        }
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
        dense = estimate(
            "gae", rewards, torch.ones(1, 3).bool(), values=values, gamma=0.9, lambd=0.8
        )
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
            "gae",
            rewards,
            mask,
            values=values,
            bootstrap_values=torch.tensor([3.0, 0.0]),
            gamma=0.5,
            lambd=1.0,
        )
        # row 0: A1 = 0 + 0.5·3 - 1 = 0.5; A0 = 0.5·1 - 1 + 0.5·0.5 = -0.25
        assert advantages[0].tolist() == [-0.25, 0.5, 0.0, 0.0]
        # returns: 0.5·3 = 1.5, 0.25·3 = 0.75: the discounted bootstrap
        assert returns[0].tolist() == [0.75, 1.5, 0.0, 0.0]
        # row 1 finished: A3 = -1, A2 = -0.5 - 0.5, A1 = -0.5 - 0.5, A0 = -0.5 - 0.5
        assert advantages[1].tolist() == [-1.0, -1.0, -1.0, -1.0]

    def test_lambda_one_gives_monte_carlo_and_lambda_zero_one_step(self):
        generator = torch.Generator().manual_seed(0)
        rewards, values = (
            torch.randn(3, 6, generator=generator),
            torch.randn(3, 6, generator=generator),
        )
        mask = torch.tensor([6, 2, 1])[:, None] > torch.arange(6)
        _, returns = estimate("gae", rewards, mask, values=values, gamma=0.9, lambd=1.0)
        torch.testing.assert_close(returns, reward_to_go(rewards, mask, 0.9))
        advantages, _ = estimate("gae", rewards, mask, values=values, gamma=0.9, lambd=0.0)
        following = torch.nn.functional.pad((values * mask)[:, 1:], (0, 1))
        torch.testing.assert_close(advantages, (rewards + 0.9 * following - values) * mask)

    def test_rows_do_not_see_each_other(self):
        generator = torch.Generator().manual_seed(0)
        rewards, values = (
            torch.randn(4, 50, generator=generator),
            torch.randn(4, 50, generator=generator),
        )
        mask = torch.tensor([50, 1, 3, 0])[:, None] > torch.arange(50)  # very different lengths
        whole = estimate("gae", rewards, mask, values=values)
        for row in range(4):
            alone = estimate("gae", rewards[[row]], mask[[row]], values=values[[row]])
            assert all(torch.equal(got, expected[[row]]) for got, expected in zip(alone, whole))

    def test_bfloat16_values_are_used_in_float32(self):
        values = torch.tensor([[1.0, 1.0]]).bfloat16()
        advantages, returns = estimate(
            "gae", torch.tensor([[0.0, 1.001]]), torch.ones(1, 2).bool(), values=values
        )
        assert advantages.dtype == returns.dtype == torch.float32
        torch.testing.assert_close(advantages[0, 1], torch.tensor(0.001), rtol=0, atol=1e-7)

    def test_bad_input(self):
        rewards, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
        with pytest.raises(ValueError, match="--critic_pretrain"):
            estimate("gae", rewards, mask)
        with pytest.raises(ValueError, match=r"values \(2, 1\)"):
            estimate("gae", rewards, mask, values=torch.zeros(2, 1))
        with pytest.raises(ValueError, match=r"bootstrap_values \(2, 1\)"):
            estimate("gae", rewards, mask, values=rewards, bootstrap_values=torch.zeros(2, 1))


class TestReinforce:
    def test_discounted_reward_to_go_by_hand(self):
        rewards = torch.tensor([[-0.5, 7.0, 0.0, 2.0], [1.0, NAN, NAN, NAN]])
        mask = torch.tensor([[True, False, True, True], [True, False, False, False]])
        advantages, returns = estimate(
            "reinforce++", rewards, mask, scores=torch.tensor([1.5, 1.0]), gamma=0.5
        )
        # A3 = 2, A2 = 0 + 0.5·2 = 1, hole, A0 = -0.5 + 0.5·1 = 0; the answer of one token: 1
        assert advantages.tolist() == [[0.0, 0.0, 1.0, 2.0], [1.0, 0.0, 0.0, 0.0]]
        assert torch.equal(returns, advantages)

    def test_without_discount_there_is_no_step_per_token(self):
        generator = torch.Generator().manual_seed(0)
        rewards, mask = (
            torch.randn(5, 300, generator=generator),
            torch.rand(5, 300, generator=generator) < 0.8,
        )
        rewards = torch.where(mask, rewards, NAN)
        zeros = torch.zeros_like(rewards)
        with Operations() as at_once:
            found = reward_to_go(rewards, mask)
        with Operations() as one_by_one:
            expected, _ = gae(token_rewards=rewards, action_mask=mask, values=zeros, lambd=1.0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert at_once.count < 20
        assert one_by_one.count > 300

    def test_a_penalty_counts_for_the_tokens_before_it_only(self):
        # -β·KL of 0.25 on the middle token: (1 - 0.25, 1 - 0.25, 1)
        advantages, _ = estimate(
            "reinforce", torch.tensor([[0.0, -0.25, 1.0]]), torch.ones(1, 3).bool()
        )
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
        advantages, _ = estimate(
            "remax", torch.tensor([[0.0, 0.0, 4.0]]), torch.ones(1, 3).bool(), **given
        )
        assert advantages.tolist() == [[0.0, 1.0, 3.0]]  # (1, 2, 4) - 1

    def test_an_answer_as_good_as_the_greedy_one_gets_zero(self):
        given = {"baseline_scores": torch.full((2,), 0.1)}
        rewards = torch.tensor([[0.0, 0.0, 0.1], [0.1, 0.0, 0.0]])
        advantages, _ = estimate(
            "remax", rewards, torch.tensor([[1, 1, 1], [1, 0, 0]]).bool(), **given
        )
        assert torch.equal(advantages, torch.zeros(2, 3))

    def test_bad_input(self):
        rewards, mask = torch.zeros(2, 1), torch.ones(2, 1).bool()
        with pytest.raises(ValueError, match="baseline_scores"):
            estimate("remax", rewards, mask)
        with pytest.raises(ValueError, match=r"baseline_scores \(2, 1\)"):
            estimate("remax", rewards, mask, baseline_scores=torch.zeros(2, 1))


class TestGroupAdvNorm:
    def test_by_hand(self):
        # prompt 5: rewards to go (2, 2) and (1), (-1); prompt 3: (4, 4, 4) and (0)
        rewards = torch.tensor(
            [[0.0, 2.0, 0.0], [0.0, 0.0, 4.0], [1.0, 0.0, 0.0], [-1.0, 9.0, 9.0], [9.0, 0.0, 9.0]]
        )
        mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0], [0, 1, 0]]).bool()
        advantages, _ = estimate(
            "group_adv_norm", rewards, mask, group_ids=torch.tensor([5, 3, 5, 5, 3])
        )
        # prompt 5: mean 4/4 = 1, squares 1 + 1 + 0 + 4 = 6, σ = sqrt(6/4) = 1.2247449; 1/(σ + 1e-5), -2/(σ + 1e-5)
        a, b = 0.8164899, -1.6329798
        # prompt 3: mean 12/4 = 3, squares 1 + 1 + 1 + 9 = 12, σ = sqrt(3) = 1.7320508
        c, d = 0.5773469, -1.7320408
        expected = torch.tensor(
            [[a, a, 0.0], [c, c, c], [0.0, 0.0, 0.0], [b, 0.0, 0.0], [0.0, d, 0.0]]
        )
        torch.testing.assert_close(advantages, expected, rtol=0, atol=2e-7)

    def test_discounted(self):
        mask = torch.tensor([[1, 1], [1, 0]]).bool()
        rewards = torch.tensor([[0.0, 4.0], [0.0, 0.0]])
        advantages, _ = estimate(
            "group_adv_norm", rewards, mask, group_ids=torch.zeros(2).long(), gamma=0.5
        )
        # (2, 4) and (0): mean 2, σ = sqrt(8/3) = 1.6329932: 0, 2/1.6330032, -2/1.6330032
        torch.testing.assert_close(advantages, torch.tensor([[0.0, 1.2247374], [-1.2247374, 0.0]]))

    def test_bad_input(self):
        rewards, mask = torch.zeros(3, 1), torch.ones(3, 1).bool()
        with pytest.raises(ValueError, match="group_ids"):
            estimate("group_adv_norm", rewards, mask)
        with pytest.raises(ValueError, match=r"group 9 .*--n_samples_per_prompt"):
            estimate("group_adv_norm", rewards, mask, group_ids=torch.tensor([4, 9, 4]))


BY_SCORES = [name for name, entry in ADVANTAGE_ESTIMATORS.items() if entry.per_sample]


def advantages_of(
    name: str,
    scores: list[float] | Tensor,
    groups: list[int] | None = None,
    tokens: list[int] | None = None,
    **given,
) -> list[float]:
    """A of each sample, which must be the same on its trained tokens and 0 elsewhere.

    The score is the reward of the last token; without ``groups`` all are samples of one prompt, of one token each.
    """
    scores = torch.as_tensor(scores, dtype=getattr(scores, "dtype", torch.float32))
    lengths = torch.tensor(tokens or [1] * len(scores))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]  # (B, A)
    rewards = torch.zeros(mask.shape, dtype=scores.dtype)
    rewards[torch.arange(len(scores)), (lengths - 1).clamp(min=0)] = scores
    ids = torch.zeros(len(scores)).long() if groups is None else torch.tensor(groups)
    advantages, _ = advantage_fn(ADVANTAGE_ESTIMATORS[name])(
        token_rewards=rewards,
        action_mask=mask,
        scores=scores,
        values=None,
        bootstrap_values=None,
        group_ids=ids,
        lambd=0.95,
        **({"gamma": 1.0, "std_eps": 1e-6} | given),
    )
    per_sample = advantages[:, 0]  # no token, no advantage: then 0 here too
    expected = torch.where(mask, per_sample[:, None], 0.0)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=0, equal_nan=True)
    return per_sample.tolist()


def test_which_estimators_compare_scores():
    assert BY_SCORES == [
        "reinforce++_baseline",
        "reinforce_baseline",
        "rloo",
        "grpo",
        "group_norm",
        "dr_grpo",
        "opo",
        "gpg",
        "grpo_passk",
        "cpgd",
    ]


class TestByHand:
    """Two prompts with arbitrary ids, not contiguous: scores (1, 2, 6) of (1, 3, 4) tokens, and (4, 4)."""

    SCORES = (1.0, 4.0, 2.0, 6.0, 4.0)
    GROUPS = (30, -1, 30, 30, -1)
    TOKENS = (1, 2, 3, 4, 5)

    def run(self, name: str, **given: object) -> list[float]:
        return advantages_of(name, list(self.SCORES), list(self.GROUPS), list(self.TOKENS), **given)

    def test_rloo(self):
        # 1 - (2 + 6)/2 = -3, 2 - (1 + 6)/2 = -1.5, 6 - (1 + 2)/2 = 4.5; 4 - 4 = 0
        assert self.run("rloo") == [-3.0, 0.0, -1.5, 4.5, 0.0]

    @pytest.mark.parametrize("name", ["dr_grpo", "reinforce++_baseline", "reinforce_baseline"])
    def test_minus_the_mean(self, name):
        assert self.run(name) == [-2.0, 0.0, -1.0, 3.0, 0.0]  # mean (1 + 2 + 6)/3 = 3
        assert self.run(name, divide_std=False, std_eps=7.0) == self.run(name)

    @pytest.mark.parametrize("name", ["group_norm", "cpgd"])
    def test_z_score(self, name):
        # mean 3, squares 4 + 1 + 9 = 14, unbiased std sqrt(14/2) = 2.6457513; (-2, -1, 3) / 2.6457523
        expected = [-0.7559286, 0.0, -0.3779643, 1.1338930, 0.0]
        assert self.run(name, std_eps=1e-6) == pytest.approx(expected, abs=1e-7)
        assert self.run(name, divide_std=False) == [-2.0, 0.0, -1.0, 3.0, 0.0]
        # std_eps is added to the std: sqrt(7) + sqrt(7) = 5.2915026
        assert self.run(name, std_eps=7**0.5)[3] == pytest.approx(0.5669467)

    def test_opo(self):
        # b = (1·1 + 3·2 + 4·6) / (1 + 3 + 4) = 31/8 = 3.875; (2·4 + 5·4) / 7 = 4
        assert self.run("opo") == [-2.875, 0.0, -1.875, 2.125, 0.0]

    def test_opo_with_equal_lengths_is_the_mean(self):
        assert advantages_of("opo", [1.0, 2.0, 6.0], tokens=[3, 3, 3]) == [-2.0, -1.0, 3.0]

    def test_opo_counts_trained_tokens_only(self):
        mask = torch.tensor(
            [[True, False, False, True], [True, False, True, False], [False, True, False, False]]
        )
        rewards = torch.tensor([[0.0, 9.0, 9.0, 1.0], [3.0, 9.0, 2.0, 9.0], [9.0, 0.0, 9.0, 9.0]])
        advantages, _ = advantage_fn(ADVANTAGE_ESTIMATORS["opo"])(
            token_rewards=rewards,
            action_mask=mask,
            scores=(rewards * mask).sum(1),
            group_ids=torch.zeros(3).long(),
        )
        # b = (2·1 + 2·5 + 1·0) / 5 = 2.4; 1 - 2.4, 5 - 2.4, 0 - 2.4
        expected = torch.where(mask, torch.tensor([[-1.4], [2.6], [-2.4]]), 0.0)
        torch.testing.assert_close(advantages, expected)

    def test_opo_with_very_different_lengths(self):
        # a wrong answer of 999 tokens and a right one of 1: b = 1/1000; the mean would give ±0.5
        assert advantages_of("opo", [0.0, 1.0], tokens=[999, 1]) == pytest.approx(
            [-0.001, 0.999], rel=1e-6
        )

    def test_gpg(self):
        # 5 samples, all with s ≠ 0: α = 1
        assert self.run("gpg") == [-2.0, 0.0, -1.0, 3.0, 0.0]
        # 6 samples, 2 with s ≠ 0: α = 3. mean 1/2: ±0.5·3; the others are equal
        scores, groups = [1.0, 0.0, 0.0, 0.0, -1.0, -1.0], [0, 0, 1, 1, 2, 2]
        # 3 of 6: α = 2
        assert advantages_of("gpg", scores, groups) == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
        assert advantages_of("gpg", [*scores[:4], 0.0, 1.0], groups) == [
            1.5,
            -1.5,
            0.0,
            0.0,
            -1.5,
            1.5,
        ]

    def test_gpg_counts_samples_with_trained_tokens(self):
        # 4 of 5 rows count, 2 of them with s ≠ 0: α = 2; mean 1/2
        assert advantages_of("gpg", [1.0, 0.0, 9.0, 0.0, 1.0], tokens=[1, 2, 0, 1, 3]) == [
            1.0,
            -1.0,
            0.0,
            -1.0,
            1.0,
        ]

    def test_passk(self):
        # prompt 30: 6 - 2 = 4 for the best; prompt -1: a tie
        assert self.run("grpo_passk", divide_std=False) == [0.0, 0.0, 0.0, 4.0, 0.0]
        # ÷ (sqrt(7) + 1e-6) = 2.6457523
        assert self.run("grpo_passk") == pytest.approx([0.0, 0.0, 0.0, 1.5118573, 0.0], abs=1e-7)

    @pytest.mark.parametrize(
        ("scores", "expected"),
        [
            ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0]),
            # two share the maximum: without either the best is the same
            ([0.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
            ([-3.0, -1.0, -2.0], [0.0, 1.0, 0.0]),
            ([5.0, 5.0, 5.0], [0.0, 0.0, 0.0]),
            ([2.0, 7.0], [0.0, 5.0]),
        ],
    )
    def test_passk_is_what_a_sample_adds_to_the_best(self, scores, expected):
        assert advantages_of("grpo_passk", scores, divide_std=False) == expected
        alone = [max(scores) - max(scores[:i] + scores[i + 1 :]) for i in range(len(scores))]
        assert alone == expected

    def test_binary_rewards_as_in_a_verifiable_task(self):
        # mean 0.25, squares 0.5625 + 3·0.0625 = 0.75, std sqrt(0.75/3) = 0.5: 0.75/0.5, -0.25/0.5
        expected = [1.5, -0.5, -0.5, -0.5]
        assert advantages_of("grpo", [1.0, 0.0, 0.0, 0.0]) == pytest.approx(expected, rel=1e-5)

    def test_the_kl_in_the_reward_counts(self):
        # scores 1 - 0.4 and 1 - 0: RLOO gives ∓0.4
        rewards = torch.tensor([[-0.1, 0.7], [0.0, 1.0]])
        advantages, _ = advantage_fn(ADVANTAGE_ESTIMATORS["rloo"])(
            token_rewards=rewards,
            action_mask=torch.ones(2, 2).bool(),
            scores=rewards.sum(1),
            group_ids=torch.zeros(2).long(),
        )
        torch.testing.assert_close(advantages, torch.tensor([[-0.4, -0.4], [0.4, 0.4]]))


class TestGPGOverRanks:
    def test_alpha_is_that_of_all_ranks(self, simulate_ranks):
        scores, groups = [[1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]], [[0, 0], [1, 1, 1, 2, 2, 2]]
        run = lambda rank, s: advantages_of("gpg", scores[rank], groups[rank], all_reduce_sum=s)  # noqa: E731
        first, second = simulate_ranks(2, run)
        # 8 samples, 2 with s ≠ 0: α = 4; means 1/2, 0 and 1/3
        assert first == [2.0, -2.0]
        assert second == pytest.approx([0.0, 0.0, 0.0, -4 / 3, -4 / 3, 8 / 3])
        assert first + second == pytest.approx(
            advantages_of("gpg", scores[0] + scores[1], groups[0] + groups[1])
        )
        # alone, the first rank would use α = 2
        assert advantages_of("gpg", scores[0], groups[0]) == [1.0, -1.0]

    def test_no_score_on_any_rank(self, simulate_ranks):
        run = lambda rank, s: advantages_of("gpg", [0.0, 0.0], all_reduce_sum=s)  # noqa: E731
        assert simulate_ranks(2, run) == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", BY_SCORES)
class TestEveryOne:
    @pytest.mark.parametrize("score", [0.0, 0.1, -1e6, 1 / 3])
    @pytest.mark.parametrize("std_eps", [1e-6, 0.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_equal_scores_give_an_exact_zero(self, name, score, std_eps, dtype):
        # the mean of seven 0.1 is off by 7e-9 in float32, and /1e-6 would make advantages of 0.7% out of nothing
        scores = torch.full((7,), score, dtype=dtype)
        assert (
            advantages_of(name, scores, tokens=[1, 2, 3, 4, 5, 6, 77], std_eps=std_eps) == [0.0] * 7
        )

    def test_a_sample_without_trained_tokens_leaves_the_statistics(self, name):
        four = advantages_of(name, [1.0, 2.0, NAN, 6.0], tokens=[1, 2, 0, 3])
        three = advantages_of(name, [1.0, 2.0, 6.0], tokens=[1, 2, 3])
        assert four == [*three[:2], 0.0, three[2]]
        assert any(three)

    def test_the_only_sample_left_has_nothing_to_compare_with(self, name):
        assert advantages_of(name, [5.0, 0.0], tokens=[2, 0]) == [0.0, 0.0]

    def test_a_prompt_without_any_trained_token(self, name):
        scores, groups, tokens = [NAN, 1.0, NAN, 3.0], [8, 2, 8, 2], [0, 1, 0, 2]
        both = advantages_of(name, scores, groups, tokens)
        assert both[1::2] == advantages_of(name, [1.0, 3.0], tokens=[1, 2])
        assert both[0::2] == [0.0, 0.0]

    def test_groups_do_not_see_each_other(self, name):
        generator = torch.Generator().manual_seed(0)
        scores, groups, tokens = (
            torch.randn(6, generator=generator),
            [1, 0, 1, 0, 0, 1],
            [5, 1, 2, 300, 7, 1],
        )
        whole = advantages_of(name, scores, groups, tokens)
        for group in (0, 1):
            rows = [row for row in range(6) if groups[row] == group]
            alone = advantages_of(name, scores[rows], tokens=[tokens[row] for row in rows])
            assert [whole[row] for row in rows] == alone

    def test_another_offset_changes_nothing(self, name):
        # no score is 0 before or after, so gpg's α is 1
        scores = [1.0, 0.25, 3.0, 2.0]
        shifted = advantages_of(name, [score + 4096.0 for score in scores], tokens=[1, 2, 3, 4])
        assert shifted == advantages_of(name, scores, tokens=[1, 2, 3, 4])

    def test_float64_scores_keep_their_digits(self, name):
        # 1e-12 apart: equal in float32
        scores = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
        assert advantages_of(name, scores, std_eps=0.0)[1] > 0
        assert advantages_of(name, scores.float(), std_eps=0.0) == [0.0, 0.0]

    def test_a_score_that_is_no_number_is_not_hidden(self, name):
        advantages = torch.tensor(advantages_of(name, [NAN, 1.0, 2.0, 5.0], [0, 0, 1, 1]))
        assert advantages[:2].isnan().all()
        assert advantages[2:].isfinite().all()

    def test_a_group_of_one_is_an_error(self, name):
        with pytest.raises(ValueError, match=r"group 9 .*--n_samples_per_prompt"):
            advantages_of(name, [0.0, 1.0, 2.0], [4, 9, 4])

    def test_bad_input(self, name):
        run = advantage_fn(ADVANTAGE_ESTIMATORS[name])
        given = {
            "token_rewards": torch.zeros(2, 1),
            "action_mask": torch.ones(2, 1).bool(),
            "scores": torch.zeros(2),
        }
        with pytest.raises(ValueError, match="group_ids"):
            run(**given, group_ids=None)
        with pytest.raises(ValueError, match=r"group_ids \(3,\)"):
            run(**given, group_ids=torch.zeros(3).long())
        with pytest.raises(ValueError, match=r"scores \(2, 1\)"):
            run(**(given | {"scores": torch.zeros(2, 1)}), group_ids=torch.zeros(2).long())


@pytest.mark.parametrize(
    "name", ["rloo", "group_norm", "dr_grpo", "reinforce++_baseline", "gpg", "cpgd"]
)
def test_advantages_of_a_group_sum_to_zero(name):
    scores = torch.randn(8, generator=torch.Generator().manual_seed(0))
    advantages = torch.tensor(advantages_of(name, scores, [0, 1] * 4))
    torch.testing.assert_close(advantages.view(4, 2).sum(0), torch.zeros(2), rtol=0, atol=1e-6)


def test_opo_advantages_sum_to_zero_over_the_tokens_of_a_group():
    tokens = [3, 1, 40, 7]
    advantages = advantages_of("opo", [1.0, 0.0, -2.0, 0.5], tokens=tokens)
    assert sum(a * n for a, n in zip(advantages, tokens)) == pytest.approx(0.0, abs=1e-5)


class TestGroupNormalize:
    MASK = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]]).bool()
    VALUES = torch.tensor([[1.0, NAN, 5.0], [2.0, 2.0, NAN], [NAN, 3.0, NAN], [NAN, NAN, NAN]])

    def test_by_hand(self):
        out = group_normalize(self.VALUES, self.MASK, torch.tensor([6, 0, 6, 6]), eps=0.0)
        # prompt 6: 1, 5 and 3: mean 3, σ = sqrt(8/3) = 1.6329932; ±2/σ = ±1.2247449. prompt 0: equal values
        a = 1.2247449
        torch.testing.assert_close(
            out, torch.tensor([[-a, 0.0, a], [0.0] * 3, [0.0] * 3, [0.0] * 3])
        )

    def test_eps_is_added_to_the_standard_deviation(self):
        out = group_normalize(
            torch.tensor([[1.0, 3.0]]), torch.ones(1, 2).bool(), torch.tensor([0]), eps=1.0
        )
        assert out.tolist() == [[-0.5, 0.5]]  # mean 2, σ = 1: ∓1/(1 + 1)

    def test_a_long_answer_weighs_more(self):
        mask = torch.arange(3) < torch.tensor([[3], [1]])
        values = torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]])
        out = group_normalize(values, mask, torch.tensor([0, 0]), eps=0.0)
        # mean 8/4 = 2, σ² = (3·1 + 9)/4 = 3: -1/sqrt(3), 3/sqrt(3)
        torch.testing.assert_close(out[:, 0], torch.tensor([-0.57735027, 1.7320508]))

    @pytest.mark.parametrize("eps", [1e-5, 0.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_equal_values_and_single_tokens_give_an_exact_zero(self, eps, dtype):
        values, mask = torch.full((3, 7), 0.1, dtype=dtype), torch.ones(3, 7).bool()
        mask[2, 1:] = False
        out = group_normalize(values, mask, torch.tensor([0, 0, 1]), eps=eps)
        assert torch.equal(out, torch.zeros(3, 7, dtype=dtype))

    def test_a_group_of_one_sample_is_compared_with_itself(self):
        out = group_normalize(
            torch.tensor([[1.0, 3.0], [7.0, 9.0]]), torch.ones(2, 2).bool(), torch.tensor([0, 1])
        )
        torch.testing.assert_close(out, torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]), rtol=0, atol=2e-5)

    def test_scale_and_offset_of_a_group_do_not_matter(self):
        generator = torch.Generator().manual_seed(0)
        values, groups = torch.randn(6, 5, generator=generator), torch.tensor([3, 1, 3, 1, 1, 3])
        mask = torch.rand(6, 5, generator=generator) > 0.3
        out = group_normalize(values, mask, groups, eps=0.0)
        other = torch.where((groups == 3)[:, None], values * 100 + 50, values)
        torch.testing.assert_close(
            group_normalize(other, mask, groups, eps=0.0), out, rtol=1e-4, atol=1e-5
        )
        for group in (1, 3):
            tokens = out[groups == group][mask[groups == group]]
            assert tokens.mean().item() == pytest.approx(0.0, abs=1e-6)
            assert tokens.std(unbiased=False).item() == pytest.approx(1.0, rel=1e-5)

    def test_order_and_padding_do_not_matter(self):
        groups, order = torch.tensor([6, 0, 6, 6]), torch.tensor([2, 3, 1, 0])
        out = group_normalize(self.VALUES, self.MASK, groups)
        torch.testing.assert_close(
            group_normalize(self.VALUES[order], self.MASK[order], groups[order]), out[order]
        )
        pad = torch.nn.functional.pad
        wide = group_normalize(pad(self.VALUES, (0, 2), value=NAN), pad(self.MASK, (0, 2)), groups)
        assert torch.equal(wide, pad(out, (0, 2)))

    def test_nothing_to_normalise(self):
        assert group_normalize(
            torch.zeros(0, 4), torch.zeros(0, 4).bool(), torch.zeros(0).long()
        ).shape == (0, 4)
        masked = group_normalize(torch.full((2, 2), NAN), torch.zeros(2, 2), torch.zeros(2).long())
        assert torch.equal(masked, torch.zeros(2, 2))

    def test_low_precision_comes_back_in_float32(self):
        out = group_normalize(
            torch.tensor([[1.0, 3.0]]).bfloat16(), torch.ones(1, 2), torch.tensor([0]), eps=0.0
        )
        assert out.dtype == torch.float32
        assert out.tolist() == [[-1.0, 1.0]]

    def test_bad_input(self):
        values, mask = torch.zeros(2, 2), torch.ones(2, 2).bool()
        with pytest.raises(ValueError, match="group_ids"):
            group_normalize(values, mask, None)
        with pytest.raises(ValueError, match=r"group_ids \(2, 2\)"):
            group_normalize(values, mask, torch.zeros(2, 2).long())
        with pytest.raises(ValueError, match=r"advantages \(2, 2\), action_mask \(2, 1\)"):
            group_normalize(values, mask[:, :1], torch.zeros(2).long())


class TestBatchDeviation:
    SCORES = torch.tensor([0.0, 2.0, 6.0, 6.0])
    GROUPS = torch.tensor([0, 0, 1, 1])

    def of(self, name: str, rows: slice = slice(None), **more: object) -> list[float]:
        """Scores 0 2 | 6 6: mean 3.5, squares 12.25 + 2.25 + 6.25 + 6.25 = 27, deviation √(27/3) = 3."""
        scores = self.SCORES[rows]
        rewards, mask = scores[:, None], torch.ones(len(scores), 1).bool()
        given = {"group_ids": self.GROUPS[rows], "std_eps": 0.0, "batch_std": True} | more
        return estimate(name, rewards, mask, **given)[0][:, 0].tolist()

    @pytest.mark.parametrize("name", ["grpo", "cpgd"])
    def test_by_hand(self, name):
        assert self.of(name) == pytest.approx([-1 / 3, 1 / 3, 0, 0])
        assert self.of(name, std_eps=1.0) == pytest.approx([-1 / 4, 1 / 4, 0, 0])
        assert self.of(name, divide_std=False) == pytest.approx([-1, 1, 0, 0])

    def test_pass_k_by_hand(self):
        assert self.of("grpo_passk") == pytest.approx([0, 2 / 3, 0, 0])

    def test_over_ranks(self, simulate_ranks):
        shares = [slice(0, 2), slice(2, 4), slice(0, 0)]
        parts = simulate_ranks(3, lambda rank, s: self.of("grpo", shares[rank], all_reduce_sum=s))
        assert [x for part in parts for x in part] == pytest.approx(self.of("grpo"))

    def test_equal_scores_give_an_exact_zero(self):
        rewards, mask = torch.full((3, 1), 0.1), torch.ones(3, 1).bool()
        given = {"group_ids": torch.zeros(3).long(), "std_eps": 0.0, "batch_std": True}
        assert estimate("grpo", rewards, mask, **given)[0].tolist() == [[0.0]] * 3


class TestOptimalTokenBaseline:
    def test_by_hand(self):
        """Two samples; the second's hole is passed over, so its second trained token stands beside the first's second.

        | sample | R          | norms      | W          |
        |--------|------------|------------|------------|
        | 0      | 4, 3, 1    | .5, .5, 1  | .5, 1, 2   |
        | 1      | 1, -, 2    | .25, -, 1  | .25, 1.25  |
        b_1 = (.5·4 + .25·1)/.75 = 3;  b_2 = (1·3 + 1.25·2)/2.25 = 22/9;  b_3 = 1, its own return
        """
        rewards = torch.tensor([[1.0, 2.0, 1.0], [-1.0, NAN, 2.0]])
        mask = torch.tensor([[1, 1, 1], [1, 0, 1]]).bool()
        norms = torch.tensor([[0.5, 0.5, 1.0], [0.25, NAN, 1.0]])
        given = {"group_ids": torch.tensor([3, 3]), "score_norms": norms, "scores": torch.zeros(2)}
        advantages, returns = estimate("optimal_token_baseline", rewards, mask, **given)
        torch.testing.assert_close(
            advantages, torch.tensor([[1.0, 5 / 9, 0.0], [-2.0, 0.0, -4 / 9]])
        )
        assert returns.tolist() == [[4, 3, 1], [1, 0, 2]]

    def test_alone_or_certain_it_has_no_advantage(self):
        """Norms of 0, a policy that is certain: the plain mean; the tail of the longest sample: an exact 0."""
        rewards, mask = (
            torch.tensor([[0.0, 0.3], [0.1, 0.0]]),
            torch.tensor([[1, 1], [1, 0]]).bool(),
        )
        given = {"group_ids": torch.zeros(2).long(), "score_norms": torch.zeros(2, 2)}
        advantages, _ = estimate("optimal_token_baseline", rewards, mask, **given)
        torch.testing.assert_close(advantages, torch.tensor([[0.1, 0.0], [-0.1, 0.0]]))
        assert advantages[0, 1] == 0

    def test_it_has_the_least_variance_of_all_baselines(self):
        """Of one token with two outcomes: E[(A·∇log π)²] is least at the baseline."""
        p, r = (
            torch.tensor([0.2, 0.8], dtype=torch.float64),
            torch.tensor([1.0, 5.0], dtype=torch.float64),
        )
        # ten samples in proportion
        norms = (1 - 2 * p + p.square().sum()).repeat_interleave(torch.tensor([2, 8]))
        rewards, mask = r.repeat_interleave(torch.tensor([2, 8]))[:, None], torch.ones(10, 1).bool()
        given = {"group_ids": torch.zeros(10).long(), "score_norms": norms[:, None]}
        advantages, _ = estimate("optimal_token_baseline", rewards, mask, **given)

        def variance(baseline: Tensor) -> Tensor:
            return (norms * (rewards[:, 0] - baseline).square()).sum()

        best = (rewards - advantages)[0, 0]
        assert all(variance(best) < variance(best + step) for step in (-0.01, 0.01))

    def test_needs_the_norms(self):
        with pytest.raises(ValueError, match="score_norms"):
            estimate(
                "optimal_token_baseline",
                torch.ones(2, 1),
                torch.ones(2, 1).bool(),
                score_norms=None,
            )
