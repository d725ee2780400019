"""GDPO: each reward normalised in its group; where its numbers come from, and what is refused."""

from __future__ import annotations

import pytest
import torch
from support.fakes import FakeStrategy
from support.tables import answer, maker
from torch import Tensor

from lightppo.algorithms.advantages import OnEveryToken, gdpo, group_norm
from lightppo.algorithms.option_values import weights_of_parts
from lightppo.config import PPOConfig
from lightppo.errors import ConfigError

# two prompts of three samples, the first with one token each and a hole, the second with two
MASK = torch.tensor([[1, 0], [1, 0], [1, 0], [1, 1], [1, 1], [1, 1]]).bool()
GROUPS = torch.tensor([5, 5, 5, 2, 2, 2])
RIGHT, STYLE = torch.tensor([0.0, 1, 2, 4, 4, 4]), torch.tensor([0.0, 10, 5, 3, 1, 2])
PARTS = torch.stack([RIGHT, STYLE], dim=1)  # (B, K)


def advantages(parts: Tensor | None = PARTS, weights=(1.0, 0.5), **more) -> Tensor:
    """(B, A)."""
    more = {"std_eps": 0.0, "group_ids": GROUPS, "scores": RIGHT + STYLE} | more
    rewards = torch.zeros(MASK.shape)
    return gdpo(
        token_rewards=rewards, action_mask=MASK, part_scores=parts, part_weights=weights, **more
    )[0]


def test_by_hand():
    # right: mean 1, std 1: -1 0 1; all equal: 0 0 0. style: mean 5, std 5: -1 1 0; mean 2, std 1: 1 -1 0
    expected = torch.tensor([-1.0 - 0.5, 0 + 0.5, 1 + 0, 0 + 0.5, 0 - 0.5, 0])
    torch.testing.assert_close(advantages(), expected[:, None] * MASK)


def test_without_the_deviation_it_is_the_weighted_sum_of_differences():
    # right: -1 0 1, 0 0 0; style: -5 5 0, 1 -1 0
    expected = torch.tensor([-1.0 - 2.5, 2.5, 1, 0.5, -0.5, 0])
    torch.testing.assert_close(advantages(divide_std=False), expected[:, None] * MASK)


def test_with_the_deviation_of_the_batch():
    # of right: mean 2.5, squares 6.25 + 2.25 + .25 + 3·2.25 = 15.5; style: mean 3.5, squares 12.25 + 42.25 + 2.25
    # + .25 + 6.25 + 2.25 = 65.5; each over n - 1 = 5
    right, style = (15.5 / 5) ** 0.5, (65.5 / 5) ** 0.5
    expected = torch.tensor([-1 / right - 2.5 / style, 2.5 / style, 1 / right])
    got = advantages(batch_std=True)
    torch.testing.assert_close(got[:3, 0], expected)


def test_the_scale_of_a_reward_does_not_matter():
    scaled = PARTS * torch.tensor([1.0, 1000.0])
    torch.testing.assert_close(advantages(scaled), advantages())
    torch.testing.assert_close(advantages(PARTS + 7), advantages(), rtol=0, atol=1e-6)


def test_what_has_one_sum_is_told_apart():
    """The point of the method: 1 + 0 and 0 + 1 are alike in a sum, and 1 + 0 is rarer here than 0 + 1."""
    parts = torch.tensor([[1.0, 0], [0, 1], [0, 1]])
    given = {"group_ids": torch.zeros(3).long(), "token_rewards": torch.zeros(3, 1)}
    mask = torch.ones(3, 1).bool()
    summed = OnEveryToken(group_norm)(action_mask=mask, scores=parts.sum(1), **given)[0]
    assert not summed.any()
    apart, _ = gdpo(
        action_mask=mask,
        scores=parts.sum(1),
        part_scores=parts,
        part_weights=(2.0, 1.0),
        **given,
    )
    # right: ±: (1 - 1/3)/.57735 = 1.1547, -.57735; the other way round: -1.1547, .57735; weights 2 and 1
    torch.testing.assert_close(apart[:, 0], torch.tensor([1.1547005, -0.5773503, -0.5773503]))


def test_of_one_reward_it_is_grpo():
    alone = advantages(RIGHT[:, None], (1.0,))
    given = {"token_rewards": torch.zeros(MASK.shape), "action_mask": MASK, "group_ids": GROUPS}
    assert torch.equal(alone, OnEveryToken(group_norm)(scores=RIGHT, std_eps=0.0, **given)[0])


def test_samples_in_any_order_and_a_row_without_trained_tokens():
    order = torch.tensor([3, 0, 5, 2, 4, 1])
    rewards = torch.zeros(MASK.shape)
    given = {"part_weights": (1.0, 0.5), "std_eps": 0.0, "scores": RIGHT}
    shuffled, _ = gdpo(
        token_rewards=rewards,
        action_mask=MASK[order],
        part_scores=PARTS[order],
        group_ids=GROUPS[order],
        **given,
    )
    assert torch.equal(shuffled, advantages()[order])
    masked = MASK & (torch.arange(6) != 1)[:, None]
    broken = PARTS.clone()
    broken[1] = torch.nan
    got, _ = gdpo(
        token_rewards=rewards, action_mask=masked, part_scores=broken, group_ids=GROUPS, **given
    )
    # left: right 0 2, mean 1, std √2; style 0 5: ∓(1 + .5)/√2
    torch.testing.assert_close(got[:3, 0], torch.tensor([-1.5, 0.0, 1.5]) / 2**0.5)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"part_scores \(5,\)"):
        advantages(PARTS[:5])
    with pytest.raises(ValueError, match="zip"):
        advantages(PARTS, (1.0,))


# -- in the trainer --------------------------------------------------------------------------------------------------

OPTIONS = {
    "advantage_estimator": "gdpo",
    "n_samples_per_prompt": 3,
    "gdpo_rewards": ("right", "style=0.5"),
    "coef": 0.0,
    "critic": False,
    "grpo_std_eps": 0.0,
}


def samples() -> list:
    """The first prompt of above; the score is another number."""
    return [
        answer(9.0, sample_index=i, extras={"right": float(right), "style": float(style), "n": 1.0})
        for i, (right, style) in enumerate(zip(RIGHT[:3], STYLE[:3]))
    ]


def test_the_trainer_reads_the_numbers_beside_the_score():
    (experience,) = maker(**OPTIONS).make_experience_list(samples())
    expected = torch.tensor([-1.5, 0.5, 1.0])
    torch.testing.assert_close(experience.advantages[:, 0], expected)
    assert experience.info["reward"].tolist() == [9.0] * 3


def test_a_rank_without_samples():
    assert maker(FakeStrategy(), **OPTIONS).make_experience_list([]) == []


def test_a_sample_that_lacks_a_reward_is_named():
    rollouts = samples()
    del rollouts[2].extras["style"]
    with pytest.raises(ValueError, match=r"--gdpo_rewards style: prompt 0, sample 2 .*: n, right"):
        maker(**OPTIONS).make_experience_list(rollouts)


RUN = {
    "pretrain": "m",
    "prompt_data": "d",
    "reward_fn": "r.py",
    "n_samples_per_prompt": 2,
    "advantage_estimator": "gdpo",
    "gdpo_rewards": ("right", "style=0.5"),
}


def test_it_whitens_and_has_its_kl_in_the_loss():
    algorithm = PPOConfig.from_flat(RUN).resolved().algorithm
    assert (algorithm.adv_norm, algorithm.use_kl_loss, algorithm.use_kl_in_reward) == (
        True,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gdpo_rewards": ()}, r"gdpo .*at least two .*--gdpo_rewards"),
        ({"gdpo_rewards": ("right",)}, r"gdpo .*at least two"),
        ({"gdpo_rewards": ("right", "right=2")}, "names right twice"),
        ({"gdpo_rewards": ("right", "style=much")}, r"'style=much': write NAME or NAME=WEIGHT"),
        ({"gdpo_rewards": ("right", "style=0")}, "other than 0"),
        ({"gdpo_rewards": ("right", "=2")}, "'=2'"),
        ({"advantage_estimator": "grpo"}, r"--gdpo_rewards .*--advantage_estimator gdpo"),
        ({"reward_scaling": 2.0}, r"--reward_scaling changes the sum .*gdpo"),
        ({"overlong_buffer_len": 4}, r"--overlong_buffer_len changes the sum"),
        ({"reward_clip_range": (-1.0, 1.0)}, r"--reward_clip_range changes the sum"),
        ({"use_kl_in_reward": True}, r"--use_kl_in_reward adds to the sum"),
        ({"n_samples_per_prompt": 1}, r"gdpo compares samples .*--n_samples_per_prompt"),
    ],
)
def test_what_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        PPOConfig.from_flat(RUN | options).validate()


def test_weights():
    assert weights_of_parts(("a", "b=0.5", "c/d=-1")) == {"a": 1.0, "b": 0.5, "c/d": -1.0}
    PPOConfig.from_flat(RUN).validate()
