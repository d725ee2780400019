import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards import FunctionReward, RewardSource, load_python_function, score_rollouts


def test_gets_queries_prompts_labels(rollouts: list[Rollout]) -> None:
    seen = []

    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
        seen.append((queries, prompts, labels))
        return [float(label) for label in labels]

    source = FunctionReward(reward_func)
    assert isinstance(source, RewardSource)
    assert source.name == "reward_func"
    assert source.score(rollouts).scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert seen == [
        ([f"question {i}: answer {i}" for i in range(5)], [f"question {i}: " for i in range(5)], list("01234"))
    ]


def test_extra_has_columns_and_the_sample(make_rollout: Callable[..., Rollout]) -> None:
    rollouts = [
        make_rollout(0, extra={"level": 3, "labels": "x", "responses": "mine"}),
        make_rollout(1, data_source="gsm8k"),
    ]
    seen: dict[str, Any] = {}
    FunctionReward(lambda queries, prompts, labels, **extra: seen.update(extra) or [0, 0]).score(rollouts)
    assert seen == {
        "level": [3, None],
        "responses": ["answer 0", "answer 1"],  # the sample's; the column of that name is in extras
        "prompt_ids": [[10], [11]],
        "response_ids": [[3], [3, 3]],
        "finish_reasons": ["stop", "stop"],
        "data_sources": ["default", "gsm8k"],
        "extras": [{"level": 3, "labels": "x", "responses": "mine"}, {}],
    }


def test_only_named_extra_is_passed(make_rollout: Callable[..., Rollout]) -> None:
    rollouts = [make_rollout(0, extra={"level": 3, "other": 1})]
    assert FunctionReward(lambda q, p, labels, level, data_sources: level).score(rollouts).scores == [3]
    assert FunctionReward(lambda q, p, labels, *, level=None: level).score(rollouts).scores == [3]
    assert FunctionReward(partial(lambda k, q, p, labels: [k], 5.0)).score(rollouts).scores == [5.0]


def test_token_scores_reach_the_samples(rollouts: list[Rollout]) -> None:
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
def test_list_forms(rollouts: list[Rollout], result: Any) -> None:
    score_rollouts(FunctionReward(lambda q, p, labels: result, "f"), rollouts)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.5, None, 0.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensor_and_dict_forms(rollouts: list[Rollout], dtype: torch.dtype) -> None:
    values = torch.arange(5, dtype=dtype)
    score_rollouts(FunctionReward(lambda q, p, labels: values, "f"), rollouts)
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 2.0, 3.0, 4.0]
    result = {"rewards": values, "scores": np.ones(5), "extra_logs": {"len": values, "share": torch.tensor(0.5)}}
    score_rollouts(FunctionReward(lambda q, p, labels: result, "f"), rollouts)
    assert rollouts[3].extras == {"score": 1.0, "len": 3.0, "share": 0.5}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0] * 4, "4 scores for 5 samples"),
        (torch.zeros(5, 1), r"shape \(B,\), got \(5, 1\)"),
        (1.0, "must be a list or tensor .* got float"),
        (None, "got NoneType"),
        ({"reward": [1.0] * 5}, r"the keys must be 'rewards' .* got \['reward'\]"),
        ({"rewards": [1.0] * 5, "logs": {}}, r"got \['rewards', 'logs'\]"),
        ({"rewards": [1.0] * 5, "scores": [1.0] * 5, "extra_logs": {"score": 1}}, "'extra_logs' has a 'score'"),
        ({"rewards": [1.0] * 5, "extra_logs": {"a": "x"}}, r"extra_logs\['a'\] must be a list"),
        ([1.0, 1.0, float("nan"), 1.0, 1.0], r"score of sample 2 \(prompt row 102, .* is nan"),
    ],
)
def test_other_results_are_errors(rollouts: list[Rollout], result: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score_rollouts(FunctionReward(lambda q, p, labels: result, "f"), rollouts)
    assert all(rollout.reward is None for rollout in rollouts)


def test_an_exception_is_an_error_with_its_cause(rollouts: list[Rollout]) -> None:
    def broken(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(RewardError, match="reward function broken raised on a batch of 5: KeyError: 'gold'") as caught:
        FunctionReward(broken).score(rollouts)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RewardError, match="missing a required argument: 'level'"):
        FunctionReward(lambda q, p, labels, level: labels, "f").score(rollouts)


def test_no_sample_no_call() -> None:
    assert FunctionReward(lambda q, p, labels: 1 / 0, "f").score([]).scores == []


@pytest.mark.parametrize("fn", [lambda queries, prompts: [], lambda *, queries, prompts, labels: []])
def test_a_function_of_another_shape_is_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"must take \(queries, prompts, labels, \*\*extra\)"):
        FunctionReward(fn, "f")


MODULE = """
from dataclasses import dataclass
from os.path import join

CONSTANT = 1

@dataclass
class Scorer:
    weight: float = 1.0

def reward_func(queries, prompts, labels):
    return [Scorer(2.0).weight for _ in queries]

def other(queries, prompts, labels):
    return [0.0 for _ in queries]
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "math.py"  # a name that hides nothing and is hidden by nothing
    path.write_text(MODULE)
    return path


def test_load_default_and_named(module: Path) -> None:
    assert load_python_function(str(module), "reward_func")([1], [], []) == [2.0]
    assert load_python_function(f"{module}:other", "reward_func")([1], [], []) == [0.0]
    import math

    assert math.pi > 3


def test_load_relative_and_anew(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(module.parent)
    assert load_python_function("math.py", "reward_func")([1], [], []) == [2.0]
    module.write_text(MODULE.replace("Scorer(2.0)", "Scorer(33.0)"))
    assert load_python_function("./math.py", "reward_func")([1], [], []) == [33.0]


def test_load_leaves_the_search_path_alone(module: Path) -> None:
    (module.parent / "neighbour_of_math.py").write_text("")
    module.write_text("import neighbour_of_math")
    before = list(sys.path)
    with pytest.raises(ValueError, match=r"math.py fails when run: ModuleNotFoundError"):
        load_python_function(str(module), "reward_func")
    assert sys.path == before


def test_load_does_not_look_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "away"))
    with pytest.raises(ValueError, match=r"no file .*mine.py"):
        load_python_function(str(tmp_path / "mine.py"), "reward_func")


def test_load_names_what_was_found(module: Path) -> None:
    folder = module.parent
    with pytest.raises(ValueError, match=r"--reward_fn: .*math.py has no 'rewrad'; it has Scorer, reward_func, other"):
        load_python_function(f"{module}:rewrad", "x", option="--reward_fn")
    with pytest.raises(ValueError, match=r"math.py:CONSTANT' is of type int, not a function"):
        load_python_function(f"{module}:CONSTANT", "x")
    with pytest.raises(ValueError, match=f"--reward_fn: no file {folder}/maths.py; {folder} has math.py"):
        load_python_function(f"{folder}/maths.py", "x", option="--reward_fn")
    with pytest.raises(ValueError, match=f"there is no directory {folder}/none"):
        load_python_function(f"{folder}/none/math.py", "x")


@pytest.mark.parametrize("spec", ["reward.json", "reward", "reward.py:", "reward.py:a b", "", ":name", "reward:name"])
def test_load_refuses_other_forms(spec: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form path.py or path.py:name"):
        load_python_function(spec, "reward_func")


def test_a_file_that_fails_leaves_nothing_behind(module: Path) -> None:
    module.write_text("1 / 0")
    before = set(sys.modules)
    with pytest.raises(ValueError, match=r"math.py fails when run: ZeroDivisionError") as caught:
        load_python_function(str(module), "reward_func")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert set(sys.modules) == before
