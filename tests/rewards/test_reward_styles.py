"""Reward functions as other trainers take them, run unmodified."""

import asyncio
import functools
import re

import numpy as np
import pytest
import torch
from support.fixtures.rollouts import make_rollout, rows

from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.plugin import REWARD_STYLES
from lightppo.rewards import FunctionReward, score_rollouts
from lightppo.rewards.reward_styles import BoundFunction, recognise

__all__ = ["make_rollout", "rows"]


# verl


def test_verl(rows):
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, dict(extra_info)))
        extra_info["mine"] = 1  # some write into it
        return float(solution_str.endswith(ground_truth))

    score_rollouts(FunctionReward(compute_score, reward_workers=1), rows)
    assert [rollout.reward for rollout in rows] == [1.0, 0.0]
    always = {"num_turns": None, "rollout_reward_scores": {}}
    assert seen == [
        ("openai/gsm8k", "it is 4", "4", always | {"split": "train", "index": 7}),
        # no such column: all that there is
        ("default", "it is 5", "6", always | {"solution": "6", "level": 3}),
    ]
    assert "mine" not in rows[0].prompt.extra["extra_info"]


@pytest.mark.parametrize(
    ("result", "reward", "extras"),
    [
        (0.5, 0.5, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        (torch.tensor(2.0), 2.0, {}),
        ({"score": 1.0, "acc": True, "pred": "4"}, 1.0, {"acc": 1.0}),  # texts are no metrics
        ((0.25, "why"), 0.25, {}),
        (None, None, {}),
        ({"score": None, "acc": 0}, None, {"acc": 0.0}),
    ],
)
def test_verl_results(rows, result, reward, extras):
    score_rollouts(
        FunctionReward(lambda data_source, solution_str, ground_truth, extra_info: result, "f"),
        rows,
    )
    assert [rollout.reward for rollout in rows] == [reward, reward]
    assert [rollout.extras for rollout in rows] == [extras, extras]
    texts = {"pred": "4"} if isinstance(result, dict) and "pred" in result else {}
    assert [rollout.texts for rollout in rows] == [texts, texts]


def test_a_list_of_texts_is_kept_and_must_be_whole(rows):
    def answered(texts):
        return FunctionReward(
            lambda queries, prompts, labels: {"rewards": [1, 0], "extra_logs": {"pred": texts}}, "f"
        )

    score_rollouts(answered(["4", None]), rows)
    assert [rollout.texts for rollout in rows] == [{"pred": "4"}, {}]
    for texts in (["4"], ["4", 5]):
        with pytest.raises(
            RewardError, match="'pred' must be a text or None for each of 2 samples"
        ):
            answered(texts).score(rows)


def test_a_metric_of_some_samples(rows):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"score": 1.0, "acc": 1.0} if ground_truth == "4" else 0.0

    assert FunctionReward(compute_score).score(rows).metrics == {"acc": [1.0, None]}


@pytest.mark.parametrize(
    "result", ["1.0", float("nan"), float("inf"), {}, {"reward": 1.0}, [], object(), 10**400]
)
def test_verl_garbage_is_an_error_that_names_the_sample(rows, result):
    def f(data_source, solution_str, ground_truth, extra_info):
        return 1.0 if ground_truth == "4" else result

    with pytest.raises(
        RewardError, match=r"reward function f .*sample 1 \(prompt row 101.*: it returned"
    ) as caught:
        FunctionReward(f).score(rows)
    assert type(caught.value) is (
        NonFiniteRewardError if isinstance(result, float) else RewardError
    )


def test_verl_with_fewer_names_and_with_filled_in_ones(rows):
    def countdown(solution_str, ground_truth, method="strict", score=1.0):
        return score if method == "flexible" else 0.0

    assert FunctionReward(functools.partial(countdown, method="flexible", score=3.0), "f").score(
        rows
    ).scores == [3, 3]

    def needy(data_source, solution_str, ground_truth, extra_info, sandbox):
        return 1.0

    with pytest.raises(RewardError, match=r"'sandbox'; .* data_source"):
        FunctionReward(needy).score(rows)
    assert FunctionReward(functools.partial(needy, sandbox=None), "f").score(rows).scores == [
        1.0,
        1.0,
    ]


def test_verl_with_names_of_its_own(rows):
    def compute_score(dataset, output, ground_truth, extra_info=None):
        return {"score": float(output.endswith(ground_truth)), "n": len(dataset)}

    output = FunctionReward(compute_score).score(rows)
    assert output.scores == [1.0, 0.0]
    assert output.metrics["n"] == [float(len(row.prompt.data_source)) for row in rows]
    two = FunctionReward(
        lambda predict_str, ground_truth, **more: float(predict_str.endswith(ground_truth)), "f"
    )
    assert two.score(rows).scores == [1.0, 0.0]
    batch = FunctionReward(
        lambda predicts, ground_truths: [
            float(p[-1:] == g) for p, g in zip(predicts, ground_truths)
        ],
        "f",
    )
    assert batch.score(rows).scores == [1.0, 0.0]


def test_verl_batch(rows):
    def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
        assert data_sources == ["openai/gsm8k", "default"]
        assert extra_infos[0]["index"] == 7
        return [
            {"score": float(s.endswith(g)), "n": len(s)}
            for s, g in zip(solution_strs, ground_truths)
        ]

    output = FunctionReward(compute_score_batched).score(rows)
    assert output.scores == [1.0, 0.0]
    assert output.metrics == {"n": [7.0, 7.0]}
    short = FunctionReward(
        lambda data_sources, solution_strs, ground_truths, extra_infos: [1.0], "f"
    )
    with pytest.raises(RewardError, match=r"f .*batch of 2: .*\[1.0\]"):
        short.score(rows)
    arrays = FunctionReward(lambda solution_strs, ground_truths: np.ones(2), "f")
    assert arrays.score(rows).scores == [1.0, 1.0]
    bad = FunctionReward(lambda solution_strs, ground_truths: [1.0, "x"], "f")
    with pytest.raises(RewardError, match=r"sample 1 \(prompt row 101.*it returned x"):
        bad.score(rows)


# TRL


def test_trl(rows):
    seen = {}

    def reward_func(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        kwargs["log_metric"]("share", 0.5)
        kwargs["log_extra"]("column", ["a", "b"])
        return [1.0, None]  # None: not mine to score

    score_rollouts(FunctionReward(reward_func), rows)
    assert [rollout.reward for rollout in rows] == [1.0, None]
    assert seen.pop("log_metric") is seen.pop("log_extra")
    assert seen == {
        "prompts": ["question 0: ", [{"role": "user", "content": "question 1"}]],
        # a chat answers a chat
        "completions": ["it is 4", [{"role": "assistant", "content": "it is 5"}]],
        "completion_ids": [[3], [3, 3]],
        "reward_model": [{"style": "rule", "ground_truth": "4"}, None],
        "extra_info": [{"split": "train", "index": 7}, None],
        "solution": [None, "6"],
        "level": [None, 3],
    }


def test_trl_functions_that_name_columns(rows):
    def accuracy(completions, solution, log_extra=None, **kwargs):
        return [
            None if gold is None else float(gold in str(text))
            for text, gold in zip(completions, solution)
        ]

    assert FunctionReward(accuracy).score(rows).scores == [None, 0.0]
    assert FunctionReward(lambda completions: [1.0, 0.5], "f").score(rows).scores == [1.0, 0.5]
    assert FunctionReward(lambda completions, level: level, "f").score(rows).scores == [None, 3.0]

    def think_format(completions, **kwargs):
        return [float(bool(re.match("it", completion[0]["content"]))) for completion in completions]

    assert FunctionReward(think_format).score(rows[1:]).scores == [1.0]

    class Scaled:  # TRL has callables of classes as well
        __name__ = "scaled"

        def __call__(self, completions, completion_ids, **kwargs):
            return [len(ids) / 10 for ids in completion_ids]

    assert FunctionReward(Scaled()).name == "scaled"
    assert FunctionReward(Scaled()).score(rows).scores == [0.1, 0.2]

    def needs_state(completions, trainer_state, **kwargs):
        return [0.0]

    with pytest.raises(RewardError, match="'trainer_state'"):
        FunctionReward(needs_state).score(rows)


# AReaL


def test_areal(rows):
    seen = []

    def gsm8k_reward_fn(prompt, completions, prompt_ids, completion_ids, solution="4", **kwargs):
        seen.append((prompt, completions, prompt_ids, completion_ids, kwargs))
        return int(completions.endswith(solution))

    assert FunctionReward(gsm8k_reward_fn, reward_workers=1).score(rows).scores == [1.0, 0.0]
    assert seen == [
        ("question 0: ", "it is 4", [10], [3], rows[0].prompt.extra),
        (
            "question 1: ",
            "it is 5",
            [11],
            [3, 3],
            {"level": 3, "messages": rows[1].prompt.messages},
        ),
    ]


# OpenRLHF


def test_openrlhf(rows):
    def reward_func(queries, prompts, labels, **kwargs):
        right = [
            float(query[len(prompt) :].endswith(label))
            for query, prompt, label in zip(queries, prompts, labels)
        ]
        reward = torch.tensor(right)
        return {"rewards": reward, "scores": reward, "extra_logs": {"accuracy": reward.mean()}}

    score_rollouts(FunctionReward(reward_func), rows)
    assert [rollout.reward for rollout in rows] == [1.0, 0.0]
    assert rows[1].extras == {"score": 0.0, "accuracy": 0.5}


# async


async def verl_async(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return float(solution_str.endswith(ground_truth))


async def verl_batch_async(solution_strs, ground_truths):
    await asyncio.sleep(0)
    return [float(s.endswith(g)) for s, g in zip(solution_strs, ground_truths)]


async def trl_async(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0, 0.0]


async def areal_async(prompt, completions, prompt_ids, completion_ids, **kwargs):
    await asyncio.sleep(0)
    return float(completions == "it is 4")


async def openrlhf_async(queries, prompts, labels):
    await asyncio.sleep(0)
    return torch.tensor([1.0, 0.0])


class Awaited:
    async def __call__(self, queries, prompts, labels):
        return [1.0, 0.0]


ASYNC = [verl_async, verl_batch_async, trl_async, areal_async, openrlhf_async, Awaited()]


@pytest.mark.parametrize("fn", ASYNC, ids=lambda fn: getattr(fn, "__name__", "Awaited"))
@pytest.mark.parametrize("wrapped", [False, True])
def test_async_functions_of_all_conventions(rows, fn, wrapped):
    if wrapped:

        @functools.wraps(fn.__call__ if isinstance(fn, Awaited) else fn)
        def hidden(*args, **kwargs):  # a plain function that returns a coroutine
            return fn(*args, **kwargs)

        assert FunctionReward(hidden, "f").score(rows).scores == [1.0, 0.0]
    source = FunctionReward(fn, "f", reward_timeout=60)
    assert source.score(rows).scores == [1.0, 0.0]
    assert source.score(rows).scores == [1.0, 0.0]  # the event loop is still there


# recognition


def queries_1(queries, prompts, labels): ...
def queries_2(q, p, labels, level, data_sources): ...
def queries_3(*args, **kwargs): ...
def verl_1(data_source, solution_str, ground_truth, extra_info=None, **kwargs): ...
def verl_2(*, ground_truth, solution_str): ...
def trl_1(completions, **kwargs): ...
def trl_2(prompts, completions, answer, **kwargs): ...
def trl_3(completions, answer): ...
def trl_4(completions): ...
def trl_5(completions, ground_truth, **kwargs): ...
def verl_3(predict_str, ground_truth): ...
def verl_4(response, ground_truth, extra_info=None): ...
def verl_5(dataset, solution_str, ground_truth, extra_info=None): ...
def verl_6(task, model_output, ground_truth): ...
def verl_batch_2(predicts, ground_truths): ...
def areal_1(prompt, completions, prompt_ids, completion_ids, answer, **kwargs): ...
def areal_2(prompt, completions, prompt_ids, completion_ids): ...
def verl_batch_1(data_sources, solution_strs, ground_truths, extra_infos, **kwargs): ...


KNOWN = [
    queries_1,
    queries_2,
    queries_3,
    verl_1,
    verl_2,
    verl_3,
    verl_4,
    verl_5,
    verl_6,
    verl_batch_1,
    verl_batch_2,
]
KNOWN += [trl_1, trl_2, trl_3, trl_4, trl_5, areal_1, areal_2]


@pytest.mark.parametrize("fn", KNOWN)
def test_recognised_by_parameter_names(fn):
    assert recognise(fn, "f") == fn.__name__.rpartition("_")[0]


def unknown_1(prompts, responses, labels): ...
def unknown_2(prompt, response, label): ...
def unknown_3(prompt, response, ground_truth): ...
def unknown_4(prompt, completions): ...
def unknown_5(queries, labels, prompts): ...
def unknown_6(solution_str): ...
def unknown_7(queries, prompts, labels, completions, **kwargs): ...
def unknown_8(completions, solution_str, ground_truth, **kwargs): ...


UNKNOWN = [unknown_1, unknown_2, unknown_3, unknown_4, unknown_5, unknown_6, unknown_7, unknown_8]


@pytest.mark.parametrize("fn", UNKNOWN)
def test_what_cannot_be_told_is_refused(fn):
    with pytest.raises(ValueError, match=r"--reward_fn_style: queries: .* verl: .*areal: "):
        FunctionReward(fn)


def test_the_style_may_be_named(rows):
    def f(completions, answer=("4",)):
        return [float(answer[0] in str(text)) for text in completions]

    assert FunctionReward(f, reward_fn_style="trl").score(rows).scores == [1.0, 0.0]
    assert BoundFunction(f, "f", "trl").style is REWARD_STYLES["trl"].fn
    with pytest.raises(
        ValueError, match=r"--reward_fn_style .* auto, queries, verl, verl_batch, trl, areal"
    ):
        FunctionReward(f, reward_fn_style="openrlhf")
    with pytest.raises(
        ValueError, match=r"\(prompt, completions, prompt_ids, completion_ids, \*\*row\)"
    ):
        FunctionReward(f, reward_fn_style="areal")
