"""Best of n and the filter of groups, on scores worked out by hand."""

from __future__ import annotations

import pytest
import torch
from support.fakes import make_rollout

from lightppo.data.records import Rollout, group_by_prompt
from lightppo.rollout.sampler import GroupFilter, best_of_n


def group(*samples: tuple[float, int], **fields) -> list[Rollout]:
    """One prompt's samples from (score, length)."""
    return [
        make_rollout(response_ids=[6] * length, sample_index=i, reward=score, **fields)
        for i, (score, length) in enumerate(samples)
    ]


def kept(rollouts: list[Rollout]) -> list[int]:
    return [r.sample_index for r in rollouts]


def test_the_highest_scores_are_kept_in_the_order_they_were_sampled():
    samples = group((1, 1), (5, 1), (-2, 1), (3, 1))
    assert kept(best_of_n(samples, 2)) == [1, 3]
    assert kept(best_of_n(samples, 1)) == [1]
    assert kept(best_of_n(samples, 3)) == [0, 1, 3]
    assert kept(best_of_n(samples, 4)) == [0, 1, 2, 3]
    assert kept(best_of_n(samples, 9)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("tie", "expected"), [("shorter", [1, 2]), ("longer", [0, 3])])
def test_equal_scores_go_by_length(tie, expected):
    # 7 tokens and 9 against 2 and 4; the worse score is the shortest of all and stays out
    samples = group((1, 7), (1, 2), (1, 4), (1, 9), (0, 1))
    assert kept(best_of_n(samples, 2, tie)) == expected


@pytest.mark.parametrize("tie", ["shorter", "longer"])
def test_of_equal_samples_the_first_is_kept(tie):
    assert kept(best_of_n(group((1, 3), (1, 3), (1, 3)), 1, tie)) == [0]


def test_groups_are_told_apart_by_prompt_and_sample_number():
    samples = [
        make_rollout(index=i, sample_index=j)
        for i, j in [(4, 0), (4, 2), (7, 0), (7, 1), (7, 0), (7, 1)]
    ]
    # The prompt in row 7 comes twice: two groups.
    assert [kept(g) for g in group_by_prompt(samples)] == [[0, 2], [0, 1], [0, 1]]
    assert group_by_prompt([]) == []


def test_groups_whose_samples_differ_are_kept():
    keep = GroupFilter()
    assert keep(group((0, 1), (1, 1))) is None
    # three times 0.1 has a mean that is not 0.1, and a deviation above 0
    for score in (0.0, 1.0, 0.1):
        assert keep(group((score, 1), (score, 1), (score, 1))) == "rejected_equal"
    assert keep(group((1, 1))) == "rejected_equal"  # one sample has nothing to compare with


def test_a_range_looks_at_the_mean_and_excludes_its_ends():
    keep = GroupFilter(limits=(0.25, 0.75))
    means = {
        0.0: "rejected_low",
        0.25: "rejected_low",
        0.5: None,
        0.75: "rejected_high",
        1.0: "rejected_high",
    }
    for mean, reason in means.items():
        # four samples: 0, 1, 2, 3 or 4 of them are right
        right = int(4 * mean)
        assert keep(group(*[(1, 1)] * right, *[(0, 1)] * (4 - right))) == reason
    assert keep(group((0.5, 1), (0.5, 1))) is None  # equal, and inside


def test_accuracy_between_nothing_and_everything_is_the_same_as_differing():
    by_range, by_spread = GroupFilter(limits=(0, 1)), GroupFilter()
    for right in range(5):
        samples = group(*[(1, 1)] * right, *[(0, 1)] * (4 - right))
        assert (by_range(samples) is None) == (by_spread(samples) is None) == (0 < right < 4)


def test_other_metrics():
    samples = group((1, 2), (1, 2))
    samples[0].extras, samples[1].extras = (
        {"accuracy": 0.0, "format": 1.0},
        {"accuracy": 1.0, "format": 1.0},
    )
    assert GroupFilter("score")(samples) == "rejected_equal"
    assert GroupFilter("acc")(samples) is None
    assert GroupFilter("format")(samples) == "rejected_equal"
    samples[0].extras["acc"] = samples[1].extras["acc"] = 1.0  # the exact name comes first
    assert GroupFilter("acc")(samples) == "rejected_equal"
    samples[0].token_rewards, samples[1].token_rewards = [0.5, 0.25], [0.5, 0.5]
    assert GroupFilter("seq_reward", (0.874, 0.876))(samples) is None  # the mean of 0.75 and 1
    assert GroupFilter("seq_reward", (2.9, 3.1))(group((2, 1), (4, 1))) is None
    shaped = {
        "metric": "seq_final_reward",
        "final_scores": lambda rollouts: torch.tensor([1.0, -1.0]),
    }
    assert (
        GroupFilter(**shaped)(samples) is GroupFilter(**shaped, limits=(-0.1, 0.1))(samples) is None
    )


def test_a_sample_without_the_metric_rejects_its_group():
    samples = group((1, 2), (1, 2))
    samples[0].extras = {"format": 1.0}
    for name in ("acc", "format", "seq"):
        assert GroupFilter(name)(samples) == "rejected_unmeasured"
