import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.reward_source import RewardSource, score_rollouts
from lightppo.verifiers.math import MathReward, find_answer, gold_answers
from lightppo.verifiers.math_numbers import as_number, compare

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
Make = Callable[..., Rollout]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed 7", "7"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),  # escaped braces are text
        (r"first \boxed{3}. No: \boxed{4}", "4"),  # the last one
        (r"\boxed{1}, \boxed{2} and $\boxed{3}$", "1, 2, 3"),  # one answer of three parts
        (r"\boxed{3} or \boxed{4}", "3, 4"),  # hedging is an answer of two parts, and so is not 3
        (r"\boxed{4}, \boxed{4}", "4"),
        (r"\boxed{3}" + "\n\n" + r"\boxed{4}", "4"),
        (r"\boxed{1}\quad\boxed{2}\ \boxed{3}\,\boxed{4}", "1, 2, 3, 4"),
        (r"\[\boxed{-2} \quad \text{and} \quad \boxed{1}.\]", "-2, 1"),
        (r"\(\boxed{1}\) and \(\boxed{2}\)", "1, 2"),
        (r"It is \boxed{5}, so I wrote 5 in \boxed{}", "5"),
        (r"I write it in \boxed{ }: the answer is 5", "5"),
        (r"\boxed{12", None),  # cut off: 12 may be the start of 123
        (r"\boxed{5} and then \boxed{12", "5"),
        ("3 * 24 = 72\n#### 72\n", "72"),
        ("####\n\n 1,000 apples\nbye", "1,000 apples"),
        ("#### 5 no, #### **6**", "6"),
        ("####: 55", "55"),
        ("It costs 25 000 euros", "25 000"),
        ("The answer is 25 000 euros.", "25 000 euros"),
        ("The answer is 18 dollars because 3*6=18. Bye 7", "18"),
        ("The final answer is: $x = \\frac{1}{2}$.", r"x = \frac{1}{2}"),
        ("Thus the answer is\n$$\\frac{3}{4}$$", r"\frac{3}{4}"),
        ("**Answer:** **42**", "42"),
        ("Answer: 3. Wait. Answer: 4.", "4"),
        ("The answer to the last question is 12.5%.", "12.5%"),
        ("The answer is 5 and 6.", "5 and 6"),  # not 5
        ("The answer is 5x + 3.", "5x + 3"),
        ("Answer: B. because", "B"),
        ("The answer is $18.", "$18"),  # money, no formula
        ("She pays $5 and gets $18", "$18"),
        ("So we get $x = 2 + 3 = 5$.", "5"),
        ("the value of $x$ is $5$", "5"),  # the last formula
        ("The answer: the value of $x$ is $5$.", "5"),
        # the last one before the reason
        ("The answer is the number $5$, because $y$ is $3$.", "5"),
        ("The answer is $5$, and $y$ is $3$.", "5"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("The answer is $B$ (3 points)", "B"),
        ("So it is $x = 5 $", "5"),
        ("So it is $ 5$.", "5"),
        (r"So it is $x \text{ is } \frac12 $", r"x \text{ is } \frac12"),
        ("It costs $5 and then $x$", "x"),  # money has words behind it
        (r"So $x \le 2 $", r"x \le 2"),
        ("So $x <= 2$", "x <= 2"),
        ("So $x != 2$", "x != 2"),
        (r"So $3!=6$", "6"),
        ("So she has 1,234.50 left. ", "1,234.50"),
        ("I do not know", None),
        ("", None),
        (r"<think>\boxed{3}</think> hm \boxed{4}", "4"),
        # the template had <think>: what comes before its end are thoughts
        (r"\boxed{3}</think> so", None),
        (r"<think> \boxed{3}", None),  # still thinking
        ("<think>x</think><answer> Monday </answer>", "Monday"),
        (r"<think>x</think>\boxed{1}<answer>it is \boxed{2}</answer> 3", "2"),
        ("<answer>1</answer><answer>2</answer>", "2"),
    ],
)
def test_where_the_answer_is(response: str, answer: str | None) -> None:
    assert find_answer(response) == answer


def test_only_marked_answers_where_asked_for() -> None:
    assert find_answer("So we get $5$, that is 5", unmarked=False) is None
    assert find_answer("#### 5", unmarked=False) == "5"


@pytest.mark.parametrize("label", ["72", 72, "a\n#### 72", r"so \boxed{72}", ["72"]])
def test_forms_of_labels(label: Any) -> None:
    assert gold_answers(label) == ["72"]


@pytest.mark.parametrize("label", ["", " ", [], ["1", ""], True, {"a": 1}, None])
def test_what_is_no_label(label: Any) -> None:
    with pytest.raises(ValueError, match="label"):
        gold_answers(label)


@pytest.mark.parametrize(
    "text",
    [
        "\\(" * 50_000,
        "\\[a" * 30_000,
        "$a" * 50_000,
        "\\boxed{" * 15_000,
        "{" * 100_000,
        "answer " + " " * 100_000,
        "the answer is " * 10_000,
        "the answer is " + "1" * 100_000,
        "1 " * 50_000,
        "1," * 50_000,
        "<answer>" * 12_000,
        "#### " * 20_000,
        "5 " + "ab " * 30_000,
        "$ " + r"\text{a}" * 12_000,
        "$ " + "\\a" * 30_000,
        r"\boxed{1}" + r"\, " * 30_000 + r"\boxed{2}",
        r"\boxed{1}, and " * 8_000,
    ],
    ids=lambda text: text[:8],
)
def test_no_response_takes_long_to_read(text: str) -> None:
    start = time.process_time()
    answer = find_answer(text)
    if answer is not None:
        compare("5", answer)
        as_number(answer)
    assert time.process_time() - start < 30  # patterns that backtrack take hours


def gsm8k_rows() -> list[dict[str, str]]:
    return [
        json.loads(line) for name in ("train", "test") for line in (GSM8K / f"{name}.jsonl").open()
    ]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not there")
def test_gsm8k_gold_answers_are_right_and_changed_ones_wrong() -> None:
    rows = gsm8k_rows()
    assert len(rows) == 7473 + 1319
    for row in rows:
        solution = row["answer"]
        (gold,) = gold_answers(solution)
        assert compare(gold, find_answer(solution) or "") is True, solution
        changed = re.sub(r"\d(?=\D*$)", lambda match: str((int(match.group()) + 1) % 10), solution)
        assert compare(gold, find_answer(changed) or "") is False, changed


pytest.importorskip("latex2sympy2_extended")


@pytest.fixture(scope="module")
def source() -> Iterator[Any]:
    source = MathReward(reward_workers=2, reward_timeout=60)
    yield source
    source.close()


def test_gsm8k_as_a_source(source: Any, make_rollout: Make) -> None:
    rollouts = [
        make_rollout(0, "... #### 72", label="x\n#### 72"),
        make_rollout(1, "... #### 73", label="x\n#### 72"),
        make_rollout(2, "no number", label="x\n#### 72"),
    ]
    assert isinstance(source, RewardSource)
    score_rollouts(source, rollouts)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 0.0]
    assert [rollout.extras for rollout in rollouts] == [
        {"answered": answered, "failures": 0.0, "timeouts": 0.0} for answered in (1.0, 1.0, 0.0)
    ]
    assert [rollout.texts.get("pred") for rollout in rollouts] == ["72", "73", None]
    assert source.score([]).scores == []


ALGEBRA = [
    (r"2\sqrt{2}", r"\sqrt{8}", 1.0),
    (r"\frac{\pi}{4}", r"\pi/4", 1.0),
    ("x^2+2x+1", "(x+1)^2", 1.0),
    ("x^2+2x+1", "(x-1)^2", 0.0),
    ("144", "12^2", 1.0),
    ("(1,2)", "(2,1)", 0.0),
    (r"\{1,2\}", "2, 1", 1.0),
    ("3", "3 or 4", 0.0),
    ("5", "x = 2 + 3", 1.0),
    (r"(-\infty, 2]", r"(-\infty,2)", 0.0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "3", 0.0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1.0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", 0.0),
    ("1024", "2**10", 1.0),
    ("1/8", "2**(-3)", 1.0),
    ("20", "2**10", 0.0),
    ("Monday", "Tuesday", 0.0),
    ("5", "}{ no $ mathematics \\", 0.0),
    ("60 km/h", r"60\text{ km}/\text{h}", 1.0),
    ("2ab", "2ba", 1.0),  # letters commute, and are no units
    (r"\pi r h", r"h\pi r", 1.0),
    ("2ab", "2ac", 0.0),
    ("3+4i", "3+4I", 1.0),
    ("2i", "(1+i)^2", 1.0),
    ("2i", "-2I", 0.0),
    (r"x \leq 2", "$x <= 2$", 1.0),
    (r"2\sqrt{3}", r"2\sqrt{3}\text{ cm}", 1.0),
    (["1/2", r"\sqrt 3"], r"\frac{3}{\sqrt{3}}", 1.0),  # any of the labels
]


def test_algebra(source: Any, make_rollout: Make) -> None:
    rollouts = [
        make_rollout(i, f"\\boxed{{{answer}}}", label=gold)
        for i, (gold, answer, _) in enumerate(ALGEBRA)
    ]
    output = source.score(rollouts)
    assert dict(zip(map(str, ALGEBRA), output.scores)) == {str(row): row[2] for row in ALGEBRA}


def test_an_answer_cannot_run_python(source: Any, make_rollout: Make, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for attack in (
        f"__import__('os').system('touch {mark}')",
        f"\\text{{open('{mark}','w')}}",
        f"open('{mark}','w')",
    ):
        assert source.score([make_rollout(0, f"<answer>{attack}</answer>", label="5")]).scores == [
            0.0
        ]
    assert not mark.exists()


def test_labels_must_be_there(source: Any, make_rollout: Make) -> None:
    with pytest.raises(RewardError, match=r"math: sample 1 \(prompt row 101, .*--label_key"):
        source.score([make_rollout(0, label="1"), make_rollout(1, "no answer", label=None)])
    with pytest.raises(RewardError, match=r"math: sample 0 .*label"):
        source.score([make_rollout(0, label={"answer": 1})])


@pytest.mark.long
def test_a_machine_without_time_for_it_does_not_end_a_comparison(make_rollout: Make) -> None:
    """A worker that is stopped for longer than the limit, as a loaded machine may do, still answers."""
    source = MathReward(reward_workers=1, reward_timeout=2)
    source.score([make_rollout(0, r"\boxed{x+x}", label="2x")])  # the worker is loaded
    (process_id,) = source._pool.process_ids
    worker = psutil.Process(process_id)
    worker.suspend()
    timer = threading.Timer(3, worker.resume)
    timer.start()
    output = source.score([make_rollout(0, r"\boxed{(x+1)^2}", label="x^2+2x+1")])
    timer.join()
    assert output.scores == [1.0]
    assert output.metrics["timeouts"] == [0.0]
    source.close()


ENDLESS = r"\boxed{10^{10^{10}}}"


def test_an_endless_expression_is_killed_and_counted(make_rollout: Make) -> None:
    source = MathReward(reward_workers=1, reward_timeout=0.7)
    rollouts = [
        make_rollout(0, ENDLESS, label="5"),
        make_rollout(1, r"\boxed{5}", label="5"),
        make_rollout(2, ENDLESS, label="5"),  # the same question: asked once
        make_rollout(3, ENDLESS, label=["7", ENDLESS]),  # right by another label
        make_rollout(4, r"\boxed{6}", label="5"),
    ]
    output = source.score(rollouts)
    assert output.scores == [None, 1.0, None, 1.0, 0.0]
    assert output.metrics == {
        "answered": [1.0] * 5,
        "failures": [1.0, 0.0, 1.0, 0.0, 0.0],
        "timeouts": [1.0, 0.0, 1.0, 0.0, 0.0],
    }
    source.on_reward_failure = "error"
    with pytest.raises(RewardError, match=r"sample 0 .* --reward_timeout, .* --on_reward_failure"):
        source.score(rollouts)
    source.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("on_reward_failure", "zero"),
        ("reward_retries", -1),
        ("reward_timeout", 0.0),
        ("reward_workers", 0),
    ],
)
def test_options_out_of_range(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"--{option}"):
        MathReward(**{option: value})


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lightppo\[math\]'"):
        MathReward()
