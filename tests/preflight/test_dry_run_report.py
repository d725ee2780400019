"""What the rehearsal of rewards says of answers that it made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightppo.data.records import Prompt
from lightppo.preflight.dry_run_report import _scores
from lightppo.rewards.reward_source import RewardOutput

SOLUTION = "Natalia sold 48 / 2 = <<48/2=24>>24 clips in May. " * 3 + "\n#### 72"
CONFIG = SimpleNamespace(
    rollout=SimpleNamespace(rollout_batch_size=8), sampling=SimpleNamespace(generation_size=1)
)


class Rows(list):
    @staticmethod
    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] * len(text)}


Rows.tokenizer.eos_token_id = 2


def said(source: Any, *labels: Any) -> list[str]:
    prompts = Rows(Prompt(f"question {i}", [1], label=label) for i, label in enumerate(labels))
    return list(_scores(CONFIG, prompts, source))


def constant(score: float) -> Any:
    return SimpleNamespace(
        name="fixed", score=lambda rollouts: RewardOutput([score] * len(rollouts))
    )


@pytest.mark.parametrize("label", [SOLUTION, [SOLUTION], "72", 72])
def test_a_reward_that_finds_the_answer_is_right(label: Any) -> None:
    pytest.importorskip("latex2sympy2_extended")
    from lightppo.verifiers.math import MathReward

    source = MathReward(reward_workers=1)
    assert said(source, label, label) == []
    source.close()


def test_a_reward_that_finds_no_answer() -> None:
    (line,) = said(constant(0.0), SOLUTION)
    assert "gave 0 to all of 3 made-up answers, right and wrong" in line
    (line,) = said(constant(0.0), "72")
    assert "to all of 7 made-up answers" in line


@pytest.mark.parametrize("label", [None, '{"inputs": ["1"], "outputs": ["2"]}', {"a": 1}, [], ""])
def test_nothing_is_said_where_no_label_is_an_answer(label: Any) -> None:
    assert said(constant(0.0), label) == []
