"""Evaluations in files and as a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fakes import FakeEngine, FakeReward, FakeStrategy, make_rollout
from support.tiny import read_jsonl

from lightppo.data.records import Prompt
from lightppo.logging.evaluations import by_source, table, write_evaluation
from lightppo.rollout.engine import SamplingParams
from lightppo.trainer.evaluation import EvalSample, Evaluator, eval_metrics


def sample(
    index: int, score: float | None, source: str = "default", length: int = 2, finish: str = "stop"
):
    rollout = make_rollout(
        [1], range(length), reward=score, index=index, data_source=source, finish_reason=finish
    )
    return EvalSample.of(rollout)


PROMPTS = [
    Prompt(f"prompt {i}", [i + 1], index=i, label={"gold": i}, data_source="ab"[i % 2])
    for i in range(5)
]
SCORES = {(i, j): (i + j) / 5 for i in range(5) for j in range(2)}


def written(folder: Path, step: int, prompts: list[Prompt], n: int = 2) -> None:
    """The files of an evaluation of these prompts."""
    own = Evaluator(FakeEngine(), FakeReward(SCORES), prompts, SamplingParams(n=n), FakeStrategy())
    metrics = own.evaluate(step)
    write_evaluation(folder, step, own.samples, metrics)


def test_metrics_by_source():
    samples = [sample(0, 1.0, "math"), sample(1, 0.0, "math"), sample(2, 1.0, "code")]
    metrics = eval_metrics(samples, threshold=0.5)
    assert by_source(metrics)["math"]["accuracy"] == 0.5
    assert by_source(metrics)["all"] == {
        name[5:]: value for name, value in metrics.items() if name.count("/") == 1
    }


def test_the_table_has_a_line_per_source():
    """One of the sources begins with the other's name; three samples: pass@3 too."""
    samples = [
        sample(i, float(i + j == 0), source)
        for i, source in enumerate(("a", "a/b"))
        for j in range(3)
    ]
    metrics = eval_metrics(samples, threshold=0.5)
    assert table(metrics | {"perf/time_eval": 1.0}) == [
        "     accuracy  reward  mean@3  best@3  pass@1  pass@2  pass@3  response_length  truncated  samples",
        "all    0.1667  0.1667  0.1667     0.5  0.1667  0.3333     0.5                2          0        6",
        "  a    0.3333  0.3333  0.3333       1  0.3333  0.6667       1                2          0        3",
        "a/b         0       0       0       0       0       0       0                2          0        3",
    ]


def test_all_samples_are_kept_in_the_order_of_prompts(tmp_path):
    written(tmp_path, 7, PROMPTS)
    rows = read_jsonl(tmp_path / "step7.jsonl")
    assert [(row["index"], row["score"]) for row in rows] == [
        (i, (i + j) / 5) for i in range(5) for j in range(2)
    ]
    metrics = json.loads((tmp_path / "step7.json").read_text())
    assert metrics["all"]["samples"] == 10
    assert metrics["b"]["reward"] == pytest.approx(
        sum(r["score"] for r in rows if r["data_source"] == "b") / 4
    )
    assert rows[3] == {
        "prompt": "prompt 1",
        "response": "answer 1.1",
        "label": {"gold": 1},
        "score": 0.4,
        "data_source": "b",
        "response_length": 2,
        "finish_reason": "stop",
        "index": 1,
        "extras": {},
    }


def test_labels_that_are_no_json_are_written_as_text(tmp_path):
    prompts = [Prompt("p", [1], label={1, 2}, index=0)]
    written(tmp_path, 0, prompts, n=1)
    assert json.loads((tmp_path / "step0.jsonl").read_text())["label"] == "{1, 2}"
