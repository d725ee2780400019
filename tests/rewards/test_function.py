"""Our own convention, and functions as other trainers take them, run unmodified."""

import asyncio
import functools
import re
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from lightppo.data.records import Rollout
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.rewards import FunctionReward, RewardSource, load_python_function, score_rollouts
from lightppo.rewards.function import STYLES, BoundFunction, OneByOne, recognise
from lightppo.rewards.source import Call, RunnerRequest


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


# --- other trainers' conventions


Make = Callable[..., Rollout]


@pytest.fixture
def rows(make_rollout):
    """Two samples: a verl row, and a chat with columns of its own."""
    verl_row = {
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 7},
    }
    chat = [{"role": "user", "content": "question 1"}]
    return [
        make_rollout(0, "it is 4", label="4", data_source="openai/gsm8k", extra=verl_row),
        make_rollout(1, "it is 5", label="6", extra={"solution": "6", "level": 3}, messages=chat),
    ]


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
    assert BoundFunction(f, "f", "trl").style is STYLES["trl"]
    with pytest.raises(
        ValueError, match=r"--reward_fn_style .* auto, queries, verl, verl_batch, trl, areal"
    ):
        FunctionReward(f, reward_fn_style="openrlhf")
    with pytest.raises(
        ValueError, match=r"\(prompt, completions, prompt_ids, completion_ids, \*\*row\)"
    ):
        FunctionReward(f, reward_fn_style="areal")


def test_no_parameters_to_read():
    class Builtin:
        __call__ = max

    with pytest.raises(ValueError, match=r"reward function f: .*parameters"):
        FunctionReward(Builtin(), "f")


# -- calls, where no plugin makes them ------------------------------------------------------------------------


def one_by_one(function: Callable) -> OneByOne:
    return OneByOne(RunnerRequest(function, "score"))


def test_calls_are_made_in_their_order_in_this_thread():
    seen = []

    def score(number: int, *, factor: int = 1) -> int:
        seen.append((number, threading.current_thread()))
        return number * factor

    outcomes = one_by_one(score).run([Call((3,)), Call((1,), {"factor": 5}), Call((2,))])
    assert [outcome.value for outcome in outcomes] == [3, 5, 2]
    assert seen == [(number, threading.current_thread()) for number in (3, 1, 2)]


def test_what_a_call_raises_is_in_its_outcome():
    def score(number: int) -> float:
        if number == 0:
            raise SystemExit("no more")
        return 1 / (number - 1)

    ended, fails, scored = one_by_one(score).run([Call((0,)), Call((1,)), Call((2,))])
    assert isinstance(ended.cause, SystemExit)
    assert "ZeroDivisionError" in fails.error
    assert isinstance(fails.cause, ZeroDivisionError)
    assert (scored.value, scored.error) == (1.0, None)


def test_coroutines_are_awaited():
    async def score(number: int) -> int:
        return number + 1

    assert [outcome.value for outcome in one_by_one(score).run([Call((1,)), Call((2,))])] == [2, 3]
