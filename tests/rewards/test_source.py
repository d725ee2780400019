import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards import CombinedReward, RewardOutput, RewardSource, check_output, score_rollouts


class Fixed:
    def __init__(self, name: str, output: Any) -> None:
        self.name = name
        self.output = output

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        return self.output


def test_check_makes_plain_floats(rollouts: list[Rollout]) -> None:
    output = RewardOutput(
        [True, np.float32(0.5), torch.tensor(2.0), None, 3], {"m": torch.arange(5)}, [[1]] + [None] * 4
    )
    checked = check_output(output, rollouts, "s")
    assert checked.scores == [1.0, 0.5, 2.0, None, 3.0]
    assert [type(score) for score in checked.scores] == [float, float, float, type(None), float]
    assert checked.metrics == {"m": [0.0, 1.0, 2.0, 3.0, 4.0]}
    assert checked.token_scores == [[1.0], None, None, None, None]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "1.0", [1.0], 10**400, torch.tensor(math.nan)])
@pytest.mark.parametrize("where", ["score", "metric"])
def test_check_names_source_sample_and_prompt_of_a_bad_number(rollouts: list[Rollout], bad: Any, where: str) -> None:
    values = [0.0, 0.0, bad, 0.0, 0.0]
    output = RewardOutput(values) if where == "score" else RewardOutput([0.0] * 5, {"len": values})
    with pytest.raises(
        RewardError, match=rf"^judge: the {where}.* of sample 2 \(prompt row 102, .*'question 2: '\) is"
    ):
        check_output(output, rollouts, "judge")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (RewardOutput([1.0] * 4), "judge: 4 scores for 5 samples"),
        (RewardOutput([1.0] * 5, {"m": [1.0]}), "judge: 1 metric 'm's for 5 samples"),
        (RewardOutput([1.0] * 5, {1: [1.0] * 5}), "metric names must be non-empty strings, got 1"),
        (RewardOutput(torch.zeros(5, 1)), r"must have shape \(B,\), got \(5, 1\)"),
        (RewardOutput(0.5), "must be a list or tensor with one number per sample, got float"),
        (RewardOutput([1.0] * 5, {}, [None]), "1 rows of token scores for 5 samples"),
        (RewardOutput([1.0] * 5, {}, [None, [1.0], None, None, None]), "1 token scores for the 2 response tokens"),
        (RewardOutput([1.0] * 5, {}, [None, [1.0, math.nan], None, None, None]), "token score 1 of sample 1 .* is nan"),
        ([1.0] * 5, "must return a RewardOutput, got list"),
    ],
)
def test_check_refuses(rollouts: list[Rollout], output: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        check_output(output, rollouts, "judge")


def test_score_rollouts_writes_into_the_samples(rollouts: list[Rollout]) -> None:
    rollouts[0].extras["kept"] = 7.0
    output = RewardOutput([1, None, 0, 0, 0], {"acc": [1, None, 0, 0, 0]}, [[0.5]] + [None] * 4)
    score_rollouts(Fixed("s", output), rollouts)
    assert [rollout.reward for rollout in rollouts] == [1.0, None, 0.0, 0.0, 0.0]
    assert rollouts[0].extras == {"kept": 7.0, "acc": 1.0}
    assert rollouts[1].extras == {}
    assert rollouts[0].token_rewards == [0.5]
    assert rollouts[1].token_rewards is None


def test_score_rollouts_changes_nothing_on_error(rollouts: list[Rollout]) -> None:
    with pytest.raises(RewardError, match=r"^s: the score of sample 4"):
        score_rollouts(Fixed("s", RewardOutput([1.0, 1.0, 1.0, 1.0, math.nan])), rollouts)
    assert all(rollout.reward is None and rollout.extras == {} for rollout in rollouts)


def test_combined_is_the_weighted_sum(make_rollout: Callable[..., Rollout]) -> None:
    rollouts = [make_rollout(i) for i in range(3)]
    task = Fixed("task", RewardOutput([1.0, 0.0, None], {"acc": [1.0, 0.0, None]}))
    style = Fixed("style", RewardOutput([0.5, -2.0, 1.0], {}, [None, [1.0, 2.0], None]))
    output = CombinedReward({task: 2.0, style: 0.5}).score(rollouts)
    # 2·1 + 0.5·0.5 = 2.25; 2·0 + 0.5·(−2) = −1; unscored by task
    assert output.scores == [2.25, -1.0, None]
    assert output.metrics == {"task": [1.0, 0.0, None], "task/acc": [1.0, 0.0, None], "style": [0.5, -2.0, 1.0]}
    assert output.token_scores == [None, [0.5, 1.0], None]  # 0.5·[1, 2]


def test_combined_adds_token_scores(make_rollout: Callable[..., Rollout]) -> None:
    a, b = Fixed("a", RewardOutput([0.0], {}, [[1.0]])), Fixed("b", RewardOutput([0.0], {}, [[3.0]]))
    assert CombinedReward({a: 2.0, b: -1.0}).score([make_rollout(0)]).token_scores == [[-1.0]]  # 2·1 − 1·3


def test_combined_blames_the_source_that_is_wrong(rollouts: list[Rollout]) -> None:
    sources = {Fixed("fine", RewardOutput([1.0] * 5)): 1.0, Fixed("broken", RewardOutput([1.0])): 0.0}
    with pytest.raises(RewardError, match=r"^broken: 1 scores for 5 samples"):
        CombinedReward(sources).score(rollouts)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({}, "at least one source"),
        ({Fixed("a", None): 1.0, Fixed("a", None): 2.0}, "several sources are named a"),
        ({Fixed("a", None): math.inf}, "weight of a must be a finite number, got inf"),
        ({Fixed("a", None): "1"}, "weight of a must be a finite number, got '1'"),
    ],
)
def test_combined_refuses(sources: dict[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CombinedReward(sources)


def test_combined_is_a_source() -> None:
    assert isinstance(CombinedReward({Fixed("a", None): 1.0}), RewardSource)
