"""Reward functions of our own convention, with what is around their calls."""

from functools import partial

import numpy as np
import pytest
import torch

from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.rewards import FunctionReward, RewardSource, load_python_function, score_rollouts
from lightppo.rewards.reward_source import join_outputs


def test_gets_queries_prompts_labels(rollouts):
    seen = []

    def reward_func(queries, prompts, labels):
        seen.append((queries, prompts, labels))
        return [float(label) for label in labels]

    source = FunctionReward(reward_func)
    assert isinstance(source, RewardSource)
    assert source.name == "reward_func"
    assert source.score(rollouts).scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert seen == [
        (
            [f"question {i}: answer {i}" for i in range(5)],
            [f"question {i}: " for i in range(5)],
            list("01234"),
        )
    ]


def test_extra_has_columns_and_the_sample(make_rollout):
    rollouts = [
        make_rollout(0, extra={"level": 3, "labels": "x", "responses": "mine"}),
        make_rollout(1, data_source="gsm8k"),
    ]
    seen = {}
    FunctionReward(lambda queries, prompts, labels, **extra: seen.update(extra) or [0, 0]).score(
        rollouts
    )
    assert seen == {
        "level": [3, None],
        "responses": ["answer 0", "answer 1"],  # the sample's; the column of that name is in extras
        "prompt_ids": [[10], [11]],
        "response_ids": [[3], [3, 3]],
        "finish_reasons": ["stop", "stop"],
        "data_sources": ["default", "gsm8k"],
        "extras": [{"level": 3, "labels": "x", "responses": "mine"}, {}],
    }


def test_only_named_extra_is_passed(make_rollout):
    rollouts = [make_rollout(0, extra={"level": 3, "other": 1})]
    assert FunctionReward(lambda q, p, labels, level, data_sources: level).score(
        rollouts
    ).scores == [3]
    assert FunctionReward(lambda q, p, labels, *, level=None: level).score(rollouts).scores == [3]
    assert FunctionReward(partial(lambda k, q, p, labels: [k], 5.0)).score(rollouts).scores == [5.0]


def test_token_scores_reach_the_samples(rollouts):
    def reward_func(queries, prompts, labels, response_ids, **extra):
        rows = [[float(t) for t in range(len(ids))] for ids in response_ids]
        return {"rewards": [row[-1] for row in rows], "token_scores": rows}

    score_rollouts(FunctionReward(reward_func), rollouts)
    assert [r.token_rewards for r in rollouts[:3]] == [[0.0], [0.0, 1.0], [0.0, 1.0, 2.0]]
    assert [r.reward for r in rollouts] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "result",
    [
        [1, 0.5, None, 0, 2],
        (1, 0.5, None, 0, 2),
        {"rewards": [1, 0.5, None, 0, 2]},
    ],
)
def test_list_forms(rollouts, result):
    score_rollouts(FunctionReward(lambda q, p, labels: result, "f"), rollouts)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.5, None, 0.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensor_and_dict_forms(rollouts, dtype):
    values = torch.arange(5, dtype=dtype)
    score_rollouts(FunctionReward(lambda q, p, labels: values, "f"), rollouts)
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 2.0, 3.0, 4.0]
    result = {
        "rewards": values,
        "scores": np.ones(5),
        "extra_logs": {"len": values, "share": torch.tensor(0.5)},
    }
    score_rollouts(FunctionReward(lambda q, p, labels: result, "f"), rollouts)
    assert rollouts[3].extras == {"score": 1.0, "len": 3.0, "share": 0.5}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0] * 4, "4 scores for 5 samples"),
        (torch.zeros(5, 1), r"the result .*\(5, 1\)"),
        (1.0, "the result .* float"),
        (None, "the result .* NoneType"),
        ({"reward": [1.0] * 5}, r"'rewards' .*\['reward'\]"),
        ({"rewards": [1.0] * 5, "logs": {}}, r"\['rewards', 'logs'\]"),
        (
            {"rewards": [1.0] * 5, "scores": [1.0] * 5, "extra_logs": {"score": 1}},
            "'extra_logs' .*'score'",
        ),
        ({"rewards": [1.0] * 5, "extra_logs": {"a": "x"}}, r"extra_logs\['a'\]"),
        ([1.0, 1.0, float("nan"), 1.0, 1.0], r"score of sample 2 \(prompt row 102, .* is nan"),
    ],
)
def test_other_results_are_errors(rollouts, result, message):
    with pytest.raises(RewardError, match=message):
        score_rollouts(FunctionReward(lambda q, p, labels: result, "f"), rollouts)
    assert all(rollout.reward is None for rollout in rollouts)


def raising(name, base=float):
    """A class one of whose own methods raises."""

    def method(self, *args):
        raise ValueError(f"boom in {name}")

    return type("Mine", (base,), {name: method})


NAN_INSIDE = type("Mine", (float,), {"__float__": lambda self: float("nan")})


@pytest.mark.parametrize("bad", [raising("__float__")(1.0), raising("__float__", int)(1)])
def test_a_score_that_cannot_be_read_is_a_failure_of_its_sample(rollouts, rows, bad):
    def per_sample(data_source, solution_str, ground_truth, extra_info):
        return 1.0 if ground_truth == "4" else bad

    def whole(queries, prompts, labels):
        return [1.0, 1.0, bad, 1.0, 1.0]

    with pytest.raises(
        RewardError,
        match=r"sample 1 \(prompt row 101.*: it returned 1.*ValueError: boom in __float__",
    ):
        FunctionReward(per_sample).score(rows)
    with pytest.raises(
        RewardError,
        match=r"score of sample 2 \(prompt row 102.* is 1.*ValueError: boom in __float__",
    ):
        FunctionReward(whole).score(rollouts)
    for manager, fn, samples, scores in (
        ("naive", per_sample, rows, [1.0, None]),
        ("batch", whole, rollouts, [1.0, 1.0, None, 1.0, 1.0]),
    ):
        output = FunctionReward(fn, reward_manager=manager, on_reward_failure="unscored").score(
            samples
        )
        assert output.scores == scores
        assert output.metrics["failures"] == [float(score is None) for score in scores]


def test_under_dapo_a_bare_score_is_the_accuracy_too(rollouts):
    def bare(q, p, labels):
        return [1.0, None, 0.0, 1.0, 0.5]

    def with_numbers(q, p, labels):
        return {"rewards": [1.0] * 5, "extra_logs": {"format": [0.0] * 5}}

    output = FunctionReward(bare, reward_manager="dapo").score(rollouts)
    assert output.metrics == {"acc": [1.0, None, 0.0, 1.0, 0.5]}
    assert FunctionReward(bare).score(rollouts).metrics == {}
    output = FunctionReward(with_numbers, reward_manager="dapo").score(rollouts)
    assert output.metrics == {"format": [0.0] * 5}


def test_under_dapo_it_does_not_matter_which_samples_come_together(rollouts):
    def numbers_of_some(solution_str, ground_truth):
        return {"score": 1.0, "format": 0.0} if solution_str == rollouts[0].response_text else 0.5

    source = FunctionReward(numbers_of_some, reward_manager="dapo")
    together = source.score(rollouts)
    assert together == join_outputs([source.score([rollout]) for rollout in rollouts])
    assert together.metrics == {"format": [0.0, *[None] * 4], "acc": [None, *[0.5] * 4]}


def test_a_number_is_what_its_float_says(rollouts):
    with pytest.raises(NonFiniteRewardError, match="score of sample 0"):
        FunctionReward(lambda q, p, labels: [NAN_INSIDE(1.0)] * 5, "f").score(rollouts)


@pytest.mark.parametrize(
    "answer",
    [
        raising("__len__", list)([1.0]),
        raising("__iter__", list)([1.0]),
        raising("tolist", object)(),
        raising("get", dict)(rewards=[1.0]),
        raising("__repr__", object)(),
        {"rewards": raising("__len__", list)([1.0])},
        {"rewards": [raising("__repr__", object)()] * 5},
        {"rewards": [1.0] * 5, "extra_logs": {"a": raising("__float__")(1.0)}},
        {"rewards": [1.0] * 5, "extra_logs": raising("items", dict)(a=1.0)},
        {
            "rewards": [1.0] * 5,
            "token_scores": [[raising("__float__")(1.0)], None, None, None, None],
        },
    ],
)
def test_an_answer_whose_own_methods_raise_is_a_failure(rollouts, answer):
    with pytest.raises(RewardError, match="reward function f"):
        FunctionReward(lambda q, p, labels: answer, "f").score(rollouts)
    output = FunctionReward(lambda q, p, labels: answer, "f", on_reward_failure="unscored").score(
        rollouts
    )
    assert output.metrics["failures"] in ([1.0] * 5, [0.0] * 5)
    assert set(output.scores) <= {None, 1.0}


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_an_exception_without_a_text_is_a_failure_too(rows, tmp_path, manager):
    (tmp_path / "mute.py").write_text(MUTE)
    fn = load_python_function(f"{tmp_path}/mute.py", "compute_score")
    options = {
        "reward_manager": manager,
        "reward_timeout": 60.0,
        "spec": f"{tmp_path}/mute.py:compute_score",
    }
    with pytest.raises(
        RewardError,
        match=r"Mute \(and ValueError while its text was made\).*mute.py:6 in compute_score",
    ):
        FunctionReward(fn, **options).score(rows)


MUTE = """\
class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")

def compute_score(data_source, solution_str, ground_truth):
    raise Mute
"""


def test_an_exception_is_an_error_with_its_cause(rollouts):
    def broken(queries, prompts, labels):
        raise KeyError("gold")

    with pytest.raises(
        RewardError, match=r"reward function broken .* batch of 5: KeyError: 'gold'"
    ) as caught:
        FunctionReward(broken).score(rollouts)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RewardError, match=r"reward function f.*'level'"):
        FunctionReward(lambda q, p, labels, level: labels, "f").score(rollouts)


def test_no_sample_no_call():
    assert FunctionReward(lambda q, p, labels: 1 / 0, "f").score([]).scores == []


@pytest.mark.parametrize(
    "fn", [lambda queries, prompts: [], lambda *, queries, prompts, labels: []]
)
def test_a_function_of_another_shape_is_refused(fn):
    with pytest.raises(
        ValueError, match=r"reward function f.*\(queries, prompts, labels, \*\*extra\)"
    ):
        FunctionReward(fn, "f")


def test_no_parameters_to_read():
    class Builtin:
        __call__ = max

    with pytest.raises(ValueError, match=r"reward function f: .*parameters"):
        FunctionReward(Builtin(), "f")
