"""The core's reward functions: our own convention, one call with all samples."""

import pytest

from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.rewards.function import FunctionReward


def test_gets_lists_of_all_samples(rollouts):
    seen = []

    def reward_func(queries, prompts, labels):
        seen.append((queries[1], prompts[1], labels))
        return [float(label) for label in labels]

    source = FunctionReward(reward_func)
    assert source.name == "reward_func"
    assert source.score(rollouts).scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert seen == [("question 1: answer 1", "question 1: ", list("01234"))]


def test_gets_what_it_names_of_samples_and_columns(make_rollout):
    rollouts = [
        make_rollout(0, extra={"level": 3, "responses": "mine"}),
        make_rollout(1, data_source="gsm8k"),
    ]
    seen = {}

    def named(q, p, labels, level, data_sources=None):
        seen.update(level=level, data_sources=data_sources)
        return [0, 0]

    FunctionReward(named).score(rollouts)
    assert seen == {"level": [3, None], "data_sources": ["default", "gsm8k"]}
    FunctionReward(lambda q, p, labels, **extra: seen.update(extra) or [0, 0]).score(rollouts)
    assert seen["responses"] == ["answer 0", "answer 1"]  # the sample's, not the column
    assert seen["finish_reasons"] == ["stop", "stop"]
    assert "labels" not in seen


def test_an_exception_is_an_error_with_its_cause(rollouts):
    def broken(queries, prompts, labels):
        raise KeyError("gold")

    with pytest.raises(
        RewardError, match=r"reward function broken raised on a batch of 5: KeyError: 'gold'"
    ) as caught:
        FunctionReward(broken).score(rollouts)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        ([1.0] * 4, RewardError, "4 scores for 5 samples"),
        (1.0, RewardError, "the result .* float"),
        ([1.0, float("nan"), 1.0, 1.0, 1.0], NonFiniteRewardError, "score of sample 1 "),
    ],
)
def test_other_results_are_errors(rollouts, result, error, message):
    with pytest.raises(error, match=f"reward function f.*{message}"):
        FunctionReward(lambda q, p, labels: result, "f").score(rollouts)


def test_no_sample_no_call():
    assert FunctionReward(lambda q, p, labels: 1 / 0).score([]).scores == []


def test_a_function_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"function f must take \(queries, prompts, labels"):
        FunctionReward(lambda queries, prompts: [], "f")
