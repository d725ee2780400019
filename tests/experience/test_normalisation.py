"""Scores and advantages normalised by mean and deviation of all samples or of each group."""

from __future__ import annotations

import pytest
import torch
from support.tables import answer, maker
from torch import Tensor

from lightppo.algorithms.option_values import Norm
from lightppo.config import PPOConfig
from lightppo.errors import ConfigError
from lightppo.experience.normalisation import normalize_by

# two prompts; the third position of the second row is a hole
VALUES = torch.tensor([[1.0, 3.0, 0.0], [5.0, 9.0, 99.0], [2.0, 0.0, 0.0], [6.0, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]]).bool()
GROUPS = torch.tensor([7, 7, 3, 3])


def normalised(words: str, **more) -> list[float]:
    """Of the values 1 3 5, and 2 6."""
    result = normalize_by(VALUES, MASK, GROUPS, Norm.parse(words.split()), **more)
    assert not result[~MASK].any()
    return result[MASK].tolist()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # means 3, 4; of all 17/5 = 3.4
        ("mean=group", [-2, 0, 2, -2, 2]),
        ("mean=batch", [-2.4, -0.4, 1.6, -1.4, 2.6]),
        # of the others: 4, 3, 2, and 6, 2
        ("mean=group leave_one_out", [-3, 0, 3, -4, 4]),
        # squares 4 0 4 / 2 and 4 4 / 1: deviations 2, √8
        ("mean=group std=group unbiased", [-1, 0, 1, -(0.5**0.5), 0.5**0.5]),
        # all squares 16 over 5 or 4
        ("mean=group std=batch", [x / 3.2**0.5 for x in (-2, 0, 2, -2, 2)]),
        ("mean=group std=batch unbiased", [x / 2 for x in (-2, 0, 2, -2, 2)]),
        # around 0: 35/3 and 40/2
        ("std=group", [0.2927700, 0.8783101, 1.4638501, 0.4472136, 1.3416408]),
        ("mean=group std=batch unbiased eps=2", [x / 4 for x in (-2, 0, 2, -2, 2)]),
    ],
)  # fmt: skip
def test_by_hand(words, expected):
    assert normalised(words) == pytest.approx(expected, rel=1e-4)


def test_padding_order_and_what_is_masked_change_nothing():
    norm = Norm.parse(["mean=group", "std=batch"])
    whole = normalize_by(VALUES, MASK, GROUPS, norm)
    dirty = VALUES.masked_fill(~MASK, torch.nan)
    pad = torch.nn.functional.pad
    wide = normalize_by(pad(dirty, (0, 2), value=torch.nan), pad(MASK, (0, 2)), GROUPS, norm)
    assert torch.equal(wide, pad(whole, (0, 2)))
    order = torch.tensor([2, 1, 3, 0])
    torch.testing.assert_close(
        normalize_by(VALUES[order], MASK[order], GROUPS[order], norm), whole[order]
    )


@pytest.mark.parametrize("words", ["mean=group std=batch", "mean=batch leave_one_out std=group"])
def test_two_ranks_and_one_without_samples(words, simulate_ranks):
    norm = Norm.parse(words.split())
    shares = [GROUPS == 7, GROUPS == 3, GROUPS == 0]

    def on(rank: int, all_reduce_sum) -> Tensor:
        rows = shares[rank]
        return normalize_by(
            VALUES[rows], MASK[rows], GROUPS[rows], norm, all_reduce_sum=all_reduce_sum
        )

    whole = normalize_by(VALUES, MASK, GROUPS, norm)
    for rows, got in zip(shares, simulate_ranks(3, on)):
        torch.testing.assert_close(got, whole[rows])


def test_a_single_value_and_equal_values():
    one, mask, group = torch.tensor([[5.0]]), torch.ones(1, 1).bool(), torch.zeros(1).long()
    for words, expected in (
        ("mean=group leave_one_out std=group unbiased", 5.0),
        ("mean=group std=group", 0.0),
    ):
        got = normalize_by(one, mask, group, Norm.parse(words.split()))
        assert got.item() == pytest.approx(expected, rel=1e-4)
    equal = torch.full((7, 1), 0.1)
    got = normalize_by(
        equal,
        torch.ones(7, 1).bool(),
        torch.zeros(7).long(),
        Norm.parse(["mean=batch", "std=batch"]),
    )
    assert got.abs().max() < 1e-9


# -- in the trainer --------------------------------------------------------------------------------------------------

SAMPLES = [answer(reward, sample_index=i) for i, reward in enumerate((0.0, 2.0))] + [
    answer(reward, sample_index=i, index=1) for i, reward in enumerate((5.0, 9.0))
]
OPTIONS = {"coef": 0.0, "critic": False, "n_samples_per_prompt": 2}


def test_scores_before_the_estimator():
    made = maker(
        **OPTIONS,
        advantage_estimator="reinforce",
        adv_norm=False,
        reward_norm_by=("mean=group", "std=batch"),
    )
    (experience,) = made.make_experience_list(SAMPLES)
    # ±1 and ±2 over √(10/4)
    expected = torch.tensor([-1.0, 1, -2, 2]) / 2.5**0.5
    torch.testing.assert_close(experience.advantages[:, 0], expected, rtol=1e-4, atol=0)
    assert experience.info["reward"].tolist() == [0, 2, 5, 9]


def test_advantages_in_place_of_whitening():
    made = maker(
        **OPTIONS, advantage_estimator="reinforce", adv_norm_by=("mean=group", "std=batch")
    )
    (experience,) = made.make_experience_list(SAMPLES)
    expected = torch.tensor([-1.0, 1, -2, 2]) / 2.5**0.5
    torch.testing.assert_close(experience.advantages[:, 0], expected, rtol=1e-4, atol=0)
    assert not made.algorithm.adv_norm


RUN = {
    "pretrain": "m",
    "prompt_data": "d",
    "reward_fn": "r.py",
    "n_samples_per_prompt": 2,
    "advantage_estimator": "reinforce",
}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"adv_norm_by": ("mean=all",)}, r"--adv_norm_by mean=all: 'mean=all' is none of mean=batch"),
        ({"adv_norm_by": ("mean=batch", "mean=group")}, "'mean' stands twice"),
        ({"adv_norm_by": ("unbiased",)}, "neither a mean nor a std"),
        ({"reward_norm_by": ("std=group", "leave_one_out")}, r"--reward_norm_by .*leave_one_out needs mean="),
        ({"reward_norm_by": ("mean=group", "eps=1")}, "eps needs std="),
        ({"reward_norm_by": ("std=group", "eps=0")}, "'eps=0' is none of"),
        ({"reward_norm_by": ("std=group", "eps=x")}, "'eps=x' is none of"),
        ({"adv_norm_by": ("mean=group",), "adv_norm": True}, r"--adv_norm_by takes the place of --adv_norm"),
        ({"reward_norm_by": ("mean=group",), "advantage_estimator": "remax"}, "remax compares with scores"),
        ({"reward_norm_by": ("mean=group",), "use_dense_reward": True}, "--use_dense_reward of its tokens"),
        (
            {"reward_norm_by": ("mean=group",), "advantage_estimator": "on_policy_distill", "teacher_pretrain": "t"},
            "--reward_norm_by needs scores that are trained on",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        PPOConfig.from_flat(RUN | options).validate()


def test_a_resolved_config_stays_valid():
    resolved = PPOConfig.from_flat(RUN | {"adv_norm_by": ("mean=group", "std=batch")}).resolved()
    resolved.validate()
    assert resolved.algorithm.adv_norm is False
