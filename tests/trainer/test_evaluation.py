"""Evaluation metrics against brute force and by hand; the evaluator on one and two ranks; files and the table."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from support.fakes import FakeEngine, FakeReward, FakeStrategy, make_rollout, on_ranks
from support.tiny import read_jsonl

from lightppo.data.records import Prompt
from lightppo.errors import RewardError
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampler import seed_of_step
from lightppo.trainer.evaluation import (
    EvalSample,
    Evaluator,
    by_source,
    eval_metrics,
    pass_at_k,
    table,
    write_evaluation,
)


def sample(
    index: int, score: float | None, source: str = "default", length: int = 2, finish: str = "stop"
):
    rollout = make_rollout(
        [1], range(length), reward=score, index=index, data_source=source, finish_reason=finish
    )
    return EvalSample.of(rollout)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_answer(n):
    """Chen et al. 2021: all subsets of size k of n answers, c of them right, counted one by one."""
    for correct in range(n + 1):
        answers = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(answers, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_one_sample_per_prompt():
    samples = [
        sample(0, 1.0, length=2),
        sample(1, 0.0, length=6, finish="length"),
        sample(2, 0.5, length=4),
    ]
    assert eval_metrics(samples, threshold=0.5) == pytest.approx(
        {
            "eval/accuracy": 2 / 3,  # 1 and 0.5 reach the threshold
            "eval/reward": 0.5,
            "eval/response_length": 4.0,
            "eval/truncated": 1 / 3,
            "eval/samples": 3.0,
            "eval/mean@1": 0.5,
        }
    )


def test_four_samples_per_prompt():
    scores = {0: [1.0, 0.0, 0.0, 0.25], 1: [0.5, 1.0, 0.75, 0.0], 2: [0.0, 0.0, 0.0, 0.25]}
    metrics = eval_metrics(
        [sample(i, s) for i, group in scores.items() for s in group], threshold=0.5
    )
    expected = {
        "eval/accuracy": 4 / 12,
        "eval/mean@4": 3.75 / 12,
        "eval/best@4": (1 + 1 + 0.25) / 3,
        # Right answers 1, 3, 0 of 4. pass@1: 1/4, 3/4, 0. pass@2: 1 - 3/6, 1 - 0, 0. pass@4: 1, 1, 0.
        "eval/pass@1": 1 / 3,
        "eval/pass@2": (0.5 + 1 + 0) / 3,
        "eval/pass@4": 2 / 3,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "eval/pass@3" not in metrics


def judged(index: int, score: float | None = 0.0, **extras: float | str) -> EvalSample:
    texts = {name: value for name, value in extras.items() if isinstance(value, str)}
    numbers = {name: value for name, value in extras.items() if name not in texts}
    return EvalSample.of(
        make_rollout([1], [2], reward=score, index=index, extras=numbers, texts=texts)
    )


def test_the_worst_answer_and_the_spread():
    metrics = eval_metrics(
        [sample(i, s) for i, s in [(0, 1.0), (0, 0.0), (1, 0.5), (1, 0.5)]], threshold=0.5
    )
    assert metrics["eval/worst@2"] == (0 + 0.5) / 2
    assert metrics["eval/std@2"] == (0.5 + 0) / 2  # of the scores themselves: divided by n


def test_acc_of_the_reward_source_is_the_accuracy():
    samples = [
        judged(0, -1.0, acc=1.0),
        judged(0, 5.0, acc=0.0),
        judged(1, 0.2, accuracy=1.0),
        judged(1, 0.7),
    ]
    metrics = eval_metrics(samples, threshold=0.5)
    assert metrics["eval/accuracy"] == (1 + 0 + 1 + 1) / 4  # the last has its score alone
    assert metrics["eval/pass@1"] == (0.5 + 1) / 2
    assert metrics["eval/reward"] == pytest.approx((-1 + 5 + 0.2 + 0.7) / 4)
    assert metrics["eval/acc"] == 0.5  # of the two that have it
    shares = eval_metrics([judged(0, acc=0.75), judged(1, acc=0.25)], threshold=0.9)
    assert shares["eval/accuracy"] == 0.5
    combined = {"judge/acc": 0.0, "style": 1.0}  # one source of several
    assert eval_metrics([judged(0, 1.0, **combined)], threshold=0.5)["eval/accuracy"] == 0


def test_half_right_counts_for_pass_at_k():
    metrics = eval_metrics([judged(0, acc=0.5), judged(0, acc=0.49)], threshold=0.5)
    assert metrics["eval/accuracy"] == pytest.approx(0.495)
    assert metrics["eval/pass@1"] == 0.5  # the first answer of two
    assert metrics["eval/pass@2"] == 1


def test_extras_are_means_and_never_take_a_name_of_the_evaluation():
    samples = [judged(0, 1.0, steps=3.0, reward=9.0), judged(1, 0.0, steps=5.0, pred="x")]
    metrics = eval_metrics([*samples, judged(2, None, timeouts=1.0)], threshold=0.5)
    assert (metrics["eval/steps"], metrics["eval/timeouts"], metrics["eval/reward"]) == (
        4.0,
        1.0,
        0.5,
    )
    assert "eval/pred" not in metrics
    # one sample has no majority
    assert not [name for name in metrics if name.startswith("eval/maj@")]


def test_the_majority_decides():
    right = [judged(0, acc=float(text == "7"), pred=text) for text in ("7", "3", "7", "4")]
    tie = [
        judged(1, acc=acc, pred=text)
        for acc, text in [(1.0, "7"), (0.0, "3"), (1.0, "7"), (0.0, "3")]
    ]
    wrong = [judged(2, acc=float(text == "7"), pred=text) for text in ("3", "3", "7")] + [judged(2)]
    silent = [judged(3) for _ in range(4)]
    metrics = eval_metrics([*right, *tie, *wrong, *silent], threshold=0.5)
    assert metrics["eval/maj@4"] == (1 + 0.5 + 0 + 0) / 4
    assert metrics["eval/mean@4"] == 0
    assert "eval/maj@4" not in eval_metrics(silent, threshold=0.5)
    combined = eval_metrics(
        [judged(0, 1.0, **{"math/pred": "7"}), judged(0, 1.0, **{"math/pred": "7"})], threshold=0.5
    )
    assert combined["eval/maj@2"] == 1


def test_each_data_source_has_its_own_metrics():
    samples = [sample(0, 1.0, "math"), sample(1, 0.0, "math"), sample(2, 1.0, "code")]
    metrics = eval_metrics(samples, threshold=0.5)
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3)
    assert metrics["eval/math/accuracy"] == 0.5
    assert metrics["eval/code/accuracy"] == 1.0
    assert metrics["eval/math/samples"] == 2.0
    # one source: once
    assert not [name for name in eval_metrics(samples[:2], 0.5) if name.startswith("eval/math")]


def test_unscored_samples_are_counted_and_count_nowhere_else():
    samples = [
        sample(0, 1.0),
        sample(0, None),
        sample(1, 0.0),
        sample(1, 1.0),
        sample(2, None),
        sample(2, None),
    ]
    metrics = eval_metrics(samples, threshold=0.5)
    assert metrics["eval/unscored"] == 3.0
    assert metrics["eval/samples"] == 6.0
    assert metrics["eval/accuracy"] == pytest.approx(2 / 3)
    assert metrics["eval/mean@1"] == pytest.approx((1.0 + 0.5) / 2)  # prompt 2 has no score at all
    assert "eval/unscored" not in eval_metrics(samples[2:4], 0.5)


def test_a_source_that_is_unscored_as_a_whole_has_no_metrics():
    metrics = eval_metrics([sample(0, 1.0, "math"), sample(1, None, "code")], threshold=0.5)
    assert metrics["eval/math/reward"] == 1.0
    assert not [name for name in metrics if name.startswith("eval/code")]
    assert metrics["eval/unscored"] == 1.0


@pytest.mark.parametrize(
    "samples", [[], [sample(0, None), sample(1, None)]], ids=["none", "unscored"]
)
def test_evaluation_without_a_score_is_an_error(samples):
    with pytest.raises(RewardError, match=f"{len(samples)} samples"):
        eval_metrics(samples, 0.5)


PROMPTS = [
    Prompt(f"prompt {i}", [i + 1], index=i, label={"gold": i}, data_source="ab"[i % 2])
    for i in range(5)
]
SCORES = {(i, j): (i + j) / 5 for i in range(5) for j in range(2)}


def evaluator(strategy, scores=SCORES, threshold=0.5) -> Evaluator:
    sampling = SamplingParams(n=2, seed=42, temperature=0.6)
    return Evaluator(
        FakeEngine(),
        FakeReward(scores),
        PROMPTS,
        sampling,
        strategy,
        threshold=threshold,
    )


def test_prompts_are_shared_out_and_every_rank_gets_all_metrics():
    whole = evaluator(FakeStrategy())
    alone = whole.evaluate(3)

    def evaluate(strategy: FakeStrategy) -> tuple[dict, list[int], list]:
        mine = evaluator(strategy)
        return mine.evaluate(3), mine.engine.calls[0][0], mine.samples

    (first, indices, samples), (second, others, _) = on_ranks(2, evaluate)
    assert (indices, others) == ([0, 2, 4], [1, 3])
    assert first == second == alone
    # (i + j)/5 over i < 5, j < 2: 0 .2 .4 .6 .8 and .2 .4 .6 .8 1 have the mean (2 + 3)/10
    assert alone["eval/reward"] == pytest.approx(0.5)
    assert alone["eval/best@2"] == pytest.approx(0.6)
    assert samples == whole.samples


def test_more_ranks_than_prompts():
    def evaluate(strategy: FakeStrategy) -> float:
        mine = Evaluator(FakeEngine(), FakeReward(SCORES), PROMPTS[:2], SamplingParams(), strategy)
        return mine.evaluate(0)["eval/reward"]

    assert on_ranks(3, evaluate) == [pytest.approx(0.1)] * 3


def test_samples_are_the_same_at_every_step_and_not_those_of_training():
    strategy = FakeStrategy()
    mine = evaluator(strategy)
    mine.evaluate(1)
    mine.evaluate(2)
    (_, first), (_, second) = mine.engine.calls
    assert first == second
    assert (first.n, first.temperature) == (2, 0.6)
    assert first.seed not in {seed_of_step(seed, step) for seed in range(50) for step in range(200)}
    other = Evaluator(FakeEngine(), FakeReward(SCORES), PROMPTS, SamplingParams(seed=43), strategy)
    assert other.sampling.seed != first.seed


def test_threshold_decides_what_is_correct():
    # Scores 0 .2 .4 .6 .8 .2 .4 .6 .8 1: five of ten reach 0.5 or 0.6, one reaches 1
    for threshold, share in ((0.5, 0.5), (0.6, 0.5), (1.0, 0.1), (-1.0, 1.0)):
        assert evaluator(FakeStrategy(), threshold=threshold).evaluate(0)["eval/accuracy"] == share


# -- evaluations in files and as a table -----------------------------------------------------------------------------


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
