r"""Rewards for mathematical answers: 1 where the response's final answer equals the label, else 0.

Most answers are numbers or the same text, which :mod:`lightppo.rewards.answers` decides at once. The rest (LaTeX,
algebra, sets, intervals) is compared by the math-verify library in worker processes that are killed at their limit.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.answers import compare, find_answer, gold_answers, tidy
from lightppo.rewards.runners import KillablePool
from lightppo.rewards.source import (
    Call,
    OnFailure,
    RewardOutput,
    Settled,
    check_failure_options,
    describe_sample,
    settle,
)
from lightppo.sandbox import default_processes

_LIBRARY = "math_verify"
_MEMORY_MB = 2048
_TIMEOUT = 5.0  # seconds; comparisons that end at all take milliseconds

Pair = tuple[str, str]


class MathReward:
    r"""Scores responses by their final answer (see :func:`lightppo.rewards.answers.find_answer`).

    A response without an answer, or with one that is no mathematics, is wrong. A comparison that runs into the limit of
    time or memory, or takes its worker down, is a failure: never a score.

    Metrics per sample: ``answered`` (1 where an answer was found), ``failures`` and ``timeouts`` (tries of the
    comparison that failed; those that ran into the time limit).

    Args:
        reward_timeout: wall-clock seconds for one comparison; ``None``: 5.
        reward_workers: processes for comparisons that take algebra, which start when the first one comes. ``None``: as
            many as this rank has cores.
        on_reward_failure: ``"unscored"``: the sample gets ``None``; ``"error"``: a :class:`RewardError`.
        reward_retries: further tries of a failed comparison. As the same expression takes as long the second time, only
            of use on machines with little memory or time to spare.
        math_unmarked: a response that marks no answer is taken at its last formula or number.
        name: what errors and metrics call it.

    Raises:
        ValueError: math-verify is not installed, or an argument out of range.
    """

    minimum = 0.0

    def __init__(
        self,
        *,
        reward_timeout: float | None = None,
        reward_workers: int | None = None,
        on_reward_failure: OnFailure = "unscored",
        reward_retries: int = 0,
        math_unmarked: bool = True,
        name: str = "math",
    ) -> None:
        check_failure_options(on_reward_failure, reward_retries, reward_timeout)
        if importlib.util.find_spec(_LIBRARY) is None:
            raise ValueError("rewards for mathematics need math-verify: pip install 'lightppo[math]'")
        self.name = name
        self.on_reward_failure = on_reward_failure
        self.reward_retries = reward_retries
        self.math_unmarked = math_unmarked
        self._pool = KillablePool(
            f"{__name__}:equal_by_library",
            workers=default_processes() if reward_workers is None else reward_workers,
            timeout=_TIMEOUT if reward_timeout is None else reward_timeout,
            memory_mb=_MEMORY_MB,
            preload=(_LIBRARY,),
            quiet=True,
        )

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples; equal questions (the same label and answer) are compared once.

        Raises:
            RewardError: a label that is no answer, or a failure with ``on_reward_failure="error"``.
        """
        golds = [self._golds(rollouts, i) for i in range(len(rollouts))]
        answers = [find_answer(rollout.response_text, unmarked=self.math_unmarked) for rollout in rollouts]
        pairs = [[] if answer is None else [(gold, answer) for gold in row] for row, answer in zip(golds, answers)]
        verdicts = {pair: compare(*pair) for pair in dict.fromkeys(pair for row in pairs for pair in row)}
        right = [any(verdicts[pair] for pair in row) for row in pairs]
        open_pairs = [[] if right[i] else [p for p in row if verdicts[p] is None] for i, row in enumerate(pairs)]
        settled = self._compare_by_library(list(dict.fromkeys(pair for row in open_pairs for pair in row)))
        output = RewardOutput([], {"answered": [], "failures": [], "timeouts": []})
        for i, row in enumerate(open_pairs):
            states = [settled[pair] for pair in row]
            found = right[i] or any(state.result for state in states)
            problem = next((state.problem for state in states if state.problem is not None and not found), None)
            if problem is not None and self.on_reward_failure == "error":
                raise RewardError(
                    f"{self.name}: comparing the answer of {describe_sample(rollouts, i)} failed: {problem}. "
                    "Raise --reward_timeout, or set --on_reward_failure unscored"
                )
            output.scores.append(None if problem is not None else float(found))
            output.metrics["answered"].append(float(answers[i] is not None))
            output.metrics["failures"].append(float(sum(state.failures for state in states)))
            output.metrics["timeouts"].append(float(sum(state.timeouts for state in states)))
        return output

    def close(self) -> None:
        """Ends the worker processes; they also end with this object and with the program."""
        self._pool.close()

    def _golds(self, rollouts: list[Rollout], i: int) -> list[str]:
        label = rollouts[i].prompt.label
        if label is None:
            raise RewardError(f"{self.name}: {describe_sample(rollouts, i)} has no label; set --label_key")
        try:
            return gold_answers(label)
        except ValueError as error:
            raise RewardError(f"{self.name}: {describe_sample(rollouts, i)}: {error}") from None

    def _compare_by_library(self, pairs: list[Pair]) -> dict[Pair, Settled]:
        settled = settle(self._pool.run, [Call(pair) for pair in pairs], _read, self.reward_retries)
        return dict(zip(pairs, settled))


def _read(_: int, value: Any) -> tuple[Any, str | None]:
    return (value, None) if isinstance(value, bool) else (None, f"the worker answered {value!r}")


def equal_by_library(gold: str, answer: str) -> bool:
    """Equality of two answers by math-verify; runs in a worker process, where nothing bounds it but being killed.

    Raises:
        MemoryError, RecursionError: it cannot be told.
    """
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Basic, MatrixBase

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def parsed(text: str) -> list[Any]:
        # only ever as LaTeX: the plain form goes through sympy's parse_expr, which evaluates Python
        found = parse(f"${tidy(text)}$", (LatexExtractionConfig(),), parsing_timeout=None)
        return [expression for expression in found if isinstance(expression, (Basic, MatrixBase))]

    try:
        return bool(verify(parsed(gold), parsed(answer), timeout_seconds=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # of kinds that cannot be compared, e.g. a number and a matrix
        return False
