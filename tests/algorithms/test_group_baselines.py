from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightppo.algorithms.advantages import OnEveryToken, group_normalize
from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS

NAN = float("nan")
BY_SCORES = [name for name, entry in ADVANTAGE_ESTIMATORS.items() if isinstance(entry.fn, OnEveryToken)]


def advantages_of(
    name: str, scores: list[float] | Tensor, groups: list[int] | None = None, tokens: list[int] | None = None, **given
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
    advantages, _ = ADVANTAGE_ESTIMATORS[name].fn(
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

    @pytest.mark.parametrize("name", ["dr_grpo", "reinforce++_baseline"])
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
        mask = torch.tensor([[True, False, False, True], [True, False, True, False], [False, True, False, False]])
        rewards = torch.tensor([[0.0, 9.0, 9.0, 1.0], [3.0, 9.0, 2.0, 9.0], [9.0, 0.0, 9.0, 9.0]])
        advantages, _ = ADVANTAGE_ESTIMATORS["opo"].fn(
            token_rewards=rewards, action_mask=mask, scores=(rewards * mask).sum(1), group_ids=torch.zeros(3).long()
        )
        # b = (2·1 + 2·5 + 1·0) / 5 = 2.4; 1 - 2.4, 5 - 2.4, 0 - 2.4
        expected = torch.where(mask, torch.tensor([[-1.4], [2.6], [-2.4]]), 0.0)
        torch.testing.assert_close(advantages, expected)

    def test_opo_with_very_different_lengths(self):
        # a wrong answer of 999 tokens and a right one of 1: b = 1/1000; the mean would give ±0.5
        assert advantages_of("opo", [0.0, 1.0], tokens=[999, 1]) == pytest.approx([-0.001, 0.999], rel=1e-6)

    def test_gpg(self):
        # 5 samples, all with s ≠ 0: α = 1
        assert self.run("gpg") == [-2.0, 0.0, -1.0, 3.0, 0.0]
        # 6 samples, 2 with s ≠ 0: α = 3. mean 1/2: ±0.5·3; the others are equal
        scores, groups = [1.0, 0.0, 0.0, 0.0, -1.0, -1.0], [0, 0, 1, 1, 2, 2]
        assert advantages_of("gpg", scores, groups) == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]  # 3 of 6: α = 2
        assert advantages_of("gpg", [*scores[:4], 0.0, 1.0], groups) == [1.5, -1.5, 0.0, 0.0, -1.5, 1.5]

    def test_gpg_counts_samples_with_trained_tokens(self):
        # 4 of 5 rows count, 2 of them with s ≠ 0: α = 2; mean 1/2
        assert advantages_of("gpg", [1.0, 0.0, 9.0, 0.0, 1.0], tokens=[1, 2, 0, 1, 3]) == [1.0, -1.0, 0.0, -1.0, 1.0]

    def test_passk(self):
        # prompt 30: 6 - 2 = 4 for the best; prompt -1: a tie
        assert self.run("grpo_passk", divide_std=False) == [0.0, 0.0, 0.0, 4.0, 0.0]
        # ÷ (sqrt(7) + 1e-6) = 2.6457523
        assert self.run("grpo_passk") == pytest.approx([0.0, 0.0, 0.0, 1.5118573, 0.0], abs=1e-7)

    @pytest.mark.parametrize(
        ("scores", "expected"),
        [
            ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0]),
            ([0.0, 1.0, 1.0], [0.0, 0.0, 0.0]),  # two share the maximum: without either the best is the same
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
        advantages, _ = ADVANTAGE_ESTIMATORS["rloo"].fn(
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
        assert first + second == pytest.approx(advantages_of("gpg", scores[0] + scores[1], groups[0] + groups[1]))
        assert advantages_of("gpg", scores[0], groups[0]) == [1.0, -1.0]  # alone, the first rank would use α = 2

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
        assert advantages_of(name, scores, tokens=[1, 2, 3, 4, 5, 6, 77], std_eps=std_eps) == [0.0] * 7

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
        scores, groups, tokens = torch.randn(6, generator=generator), [1, 0, 1, 0, 0, 1], [5, 1, 2, 300, 7, 1]
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
        with pytest.raises(ValueError, match=r"group 9 has 1 sample\(s\).*set --n_samples_per_prompt to 2 or more"):
            advantages_of(name, [0.0, 1.0, 2.0], [4, 9, 4])

    def test_bad_input(self, name):
        run = ADVANTAGE_ESTIMATORS[name].fn
        given = {"token_rewards": torch.zeros(2, 1), "action_mask": torch.ones(2, 1).bool(), "scores": torch.zeros(2)}
        with pytest.raises(ValueError, match="group_ids must be given"):
            run(**given, group_ids=None)
        with pytest.raises(ValueError, match=r"group_ids \(3,\)"):
            run(**given, group_ids=torch.zeros(3).long())
        with pytest.raises(ValueError, match=r"scores \(2, 1\)"):
            run(**(given | {"scores": torch.zeros(2, 1)}), group_ids=torch.zeros(2).long())


@pytest.mark.parametrize("name", ["rloo", "group_norm", "dr_grpo", "reinforce++_baseline", "gpg", "cpgd"])
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
        torch.testing.assert_close(out, torch.tensor([[-a, 0.0, a], [0.0] * 3, [0.0] * 3, [0.0] * 3]))

    def test_eps_is_added_to_the_standard_deviation(self):
        out = group_normalize(torch.tensor([[1.0, 3.0]]), torch.ones(1, 2).bool(), torch.tensor([0]), eps=1.0)
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
        out = group_normalize(torch.tensor([[1.0, 3.0], [7.0, 9.0]]), torch.ones(2, 2).bool(), torch.tensor([0, 1]))
        torch.testing.assert_close(out, torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]), rtol=0, atol=2e-5)

    def test_scale_and_offset_of_a_group_do_not_matter(self):
        generator = torch.Generator().manual_seed(0)
        values, groups = torch.randn(6, 5, generator=generator), torch.tensor([3, 1, 3, 1, 1, 3])
        mask = torch.rand(6, 5, generator=generator) > 0.3
        out = group_normalize(values, mask, groups, eps=0.0)
        other = torch.where((groups == 3)[:, None], values * 100 + 50, values)
        torch.testing.assert_close(group_normalize(other, mask, groups, eps=0.0), out, rtol=1e-4, atol=1e-5)
        for group in (1, 3):
            tokens = out[groups == group][mask[groups == group]]
            assert tokens.mean().item() == pytest.approx(0.0, abs=1e-6)
            assert tokens.std(unbiased=False).item() == pytest.approx(1.0, rel=1e-5)

    def test_order_and_padding_do_not_matter(self):
        groups, order = torch.tensor([6, 0, 6, 6]), torch.tensor([2, 3, 1, 0])
        out = group_normalize(self.VALUES, self.MASK, groups)
        torch.testing.assert_close(group_normalize(self.VALUES[order], self.MASK[order], groups[order]), out[order])
        pad = torch.nn.functional.pad
        wide = group_normalize(pad(self.VALUES, (0, 2), value=NAN), pad(self.MASK, (0, 2)), groups)
        assert torch.equal(wide, pad(out, (0, 2)))

    def test_nothing_to_normalise(self):
        assert group_normalize(torch.zeros(0, 4), torch.zeros(0, 4).bool(), torch.zeros(0).long()).shape == (0, 4)
        masked = group_normalize(torch.full((2, 2), NAN), torch.zeros(2, 2), torch.zeros(2).long())
        assert torch.equal(masked, torch.zeros(2, 2))

    def test_low_precision_comes_back_in_float32(self):
        out = group_normalize(torch.tensor([[1.0, 3.0]]).bfloat16(), torch.ones(1, 2), torch.tensor([0]), eps=0.0)
        assert out.dtype == torch.float32
        assert out.tolist() == [[-1.0, 1.0]]

    def test_bad_input(self):
        values, mask = torch.zeros(2, 2), torch.ones(2, 2).bool()
        with pytest.raises(ValueError, match="group_ids must be given"):
            group_normalize(values, mask, None)
        with pytest.raises(ValueError, match=r"group_ids \(2, 2\)"):
            group_normalize(values, mask, torch.zeros(2, 2).long())
        with pytest.raises(ValueError, match=r"advantages \(2, 2\), action_mask \(2, 1\)"):
            group_normalize(values, mask[:, :1], torch.zeros(2).long())
