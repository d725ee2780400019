"""The example reward functions, loaded as ``--reward_fn`` loads them."""

import json
from pathlib import Path

import pytest

from lightppo.errors import RewardError
from lightppo.rewards import build_reward_source

ROOT = Path(__file__).parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.fixture
def score(make_rollout):
    def run(example, response, label):
        source = build_reward_source(
            reward_fn=str(ROOT / "examples" / "reward_functions" / example)
        )
        rollout = make_rollout(0, label=label)
        rollout.response_text = response
        return source.score([rollout]).scores[0]

    return run


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("42", "42", 1.0),
        (" 42\n", "42", 1.0),
        ("42", 42, 1.0),
        ("7+35 is\n#### 42", "42", 1.0),
        ("#### 41 no #### 42", "so it is #### 42", 1.0),
        ("two  words", "two words", 1.0),
        ("042", "42", 0.0),
        ("42.", "42", 0.0),
        ("", "42", 0.0),
        ("the answer is 42", "42", 0.0),
    ],
)
def test_exact_match(score, response, label, expected):
    assert score("exact_match.py", response, label) == expected


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("She has 3 + 4 = 7 eggs.", "3+4\n#### 7", 1.0),
        ("#### 7", "7", 1.0),
        ("#### 7 eggs, of 12", "7", 1.0),  # the first number after the marker
        ("7\n#### none", "7", 0.0),  # nothing after the marker
        ("no idea", "7", 0.0),
        ("It costs $1,234.50", "#### 1234.5", 1.0),
        ("-$5", "#### -5", 1.0),
        ("5", "#### -5", 0.0),
        ("70000.00", "#### 70,000", 1.0),
        ("7 then 8", "#### 7", 0.0),  # the last number counts
        ("The answer is 18.", "#### 18", 1.0),
        (".5", "#### 0.5", 1.0),
    ],
)
def test_gsm8k(score, response, label, expected):
    assert score("gsm8k.py", response, label) == expected


@pytest.mark.parametrize(
    ("example", "label", "message"),
    [
        ("exact_match.py", None, "has no label; set --label_key"),
        ("gsm8k.py", "no number", "label 'no number' has no single number"),
        ("gsm8k.py", None, "label 'None' has no single number"),
    ],
)
def test_rows_without_gold_are_errors(score, example, label, message):
    with pytest.raises(RewardError, match=message):
        score(example, "42", label)


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K rows are not on this machine")
def test_gsm8k_gold_answers_score_one(make_rollout):
    source = build_reward_source(reward_fn=str(ROOT / "examples" / "reward_functions" / "gsm8k.py"))
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    rollouts = [make_rollout(i, response=answer, label=answer) for i, answer in enumerate(answers)]
    rotated = [
        make_rollout(i, response=answers[i - 1], label=answer) for i, answer in enumerate(answers)
    ]
    assert source.score(rollouts).scores == [1.0] * 1319
    wrong = source.score(rotated).scores
    assert sum(wrong) < 100  # another row's answer is seldom the same number
