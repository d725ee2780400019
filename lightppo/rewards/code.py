"""Rewards for programs: the last fenced block of a response is run on test cases.

Who runs it is a verifier: the sandbox on this machine, or a service (:mod:`lightppo.rewards.services`). What
a program prints or returns is compared here, outside: no program sees what is expected of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards.code_tests import (
    COMPARISONS,
    BadTestsError,
    CodeCase,
    CodeTests,
    find_tests,
    last_program,
    printed_right,
    returned_right,
)
from lightppo.rewards.source import OnFailure, RewardOutput, check_failure_options, describe_sample
from lightppo.sandbox import ProgramRun, SandboxPool

logger = logging.getLogger(__name__)

CodeScore = Literal["all", "share"]


@dataclass
class CodeVerdict:
    """What is known of a program.

    Attributes:
        passed: one answer per test, in their order; shorter where it was not worth going on.
        timeouts: tests that took too long.
        compile_error: it is no Python.
    """

    passed: list[bool] = field(default_factory=list)
    timeouts: int = 0
    compile_error: bool = False


class CodeVerifier(Protocol):
    """Runs programs on test cases. ``verify`` is called by ``concurrency`` threads at a time.

    It raises :class:`RewardError` where nothing is known about the program; with ``first_failure_ends`` it may stop at
    the first test that fails.
    """

    concurrency: int

    def verify(self, code: str, tests: CodeTests, *, first_failure_ends: bool) -> CodeVerdict: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Comparison:
    """When an output is right; see :func:`~lightppo.rewards.code_tests.printed_right`.

    Attributes:
        code_compare: the laxest comparison that counts: ``exact`` | ``lines`` | ``float`` | ``set``.
        code_float_tolerance: how far numbers may be off, relative to the expected one.
    """

    code_compare: str = "float"
    code_float_tolerance: float = 1e-5

    def __post_init__(self) -> None:
        if self.code_compare not in COMPARISONS:
            raise ValueError(f"--code_compare must be one of {', '.join(COMPARISONS)}, got {self.code_compare!r}")
        if not 0 <= self.code_float_tolerance < 1:
            raise ValueError(f"--code_float_tolerance must be in [0, 1), got {self.code_float_tolerance}")

    def printed(self, printed: str, case: CodeCase) -> bool:
        tolerance = self.code_float_tolerance
        return printed_right(printed, case.expected, compare=self.code_compare, tolerance=tolerance)

    def returned(self, answer: str, case: CodeCase) -> bool:
        tolerance = self.code_float_tolerance
        return returned_right(answer, case.expected, compare=self.code_compare, tolerance=tolerance)


class SandboxVerifier:
    """Runs programs in the sandboxes of this rank.

    Args:
        pool: the sandboxes.
        comparison: when an output is right.
        code_total_timeout: seconds that all tests of one program may take together; tests after that count as timed
            out.
    """

    def __init__(
        self, pool: SandboxPool, comparison: Comparison | None = None, *, code_total_timeout: float = 60.0
    ) -> None:
        if not code_total_timeout > 0:
            raise ValueError(f"--code_total_timeout must be > 0, got {code_total_timeout}")
        self.pool = pool
        self.comparison = comparison or Comparison()
        self.code_total_timeout = code_total_timeout
        self.concurrency = pool.size

    def verify(self, code: str, tests: CodeTests, *, first_failure_ends: bool) -> CodeVerdict:
        """Runs the program on all tests.

        Raises:
            SandboxError: the sandbox failed, twice.
        """
        verdict = CodeVerdict()
        left = self.code_total_timeout
        while len(verdict.passed) < len(tests.cases) and left > 0:
            rest = tests.cases[len(verdict.passed) :]
            judge = self._judge_script if tests.function is None else self._judge_calls
            left -= judge(code, tests.function, rest, left, verdict)
            if verdict.compile_error or (first_failure_ends and not all(verdict.passed)):
                return verdict
        verdict.timeouts += len(tests.cases) - len(verdict.passed)
        return verdict

    def close(self) -> None:
        """Ends the sandboxes."""
        self.pool.close()

    def _judge_script(
        self, code: str, function: None, cases: Sequence[CodeCase], left: float, verdict: CodeVerdict
    ) -> float:
        """One test, which is one run; returns the seconds it took."""
        run = self.pool.run(code, stdin=cases[0].given, total_seconds=left)
        verdict.compile_error = "compile_error" in _line(run, 0)
        good = run.ended == "exit" and run.code == 0
        verdict.passed.append(good and self.comparison.printed(run.stdout, cases[0]))
        verdict.timeouts += run.ended == "timeout"
        return run.seconds

    def _judge_calls(
        self, code: str, function: str, cases: Sequence[CodeCase], left: float, verdict: CodeVerdict
    ) -> float:
        """As many tests as one process gets through; the one that it dies in has failed."""
        run = self.pool.run(code, function=function, calls=[case.given for case in cases], total_seconds=left)
        loading = _line(run, 0)
        verdict.compile_error = "compile_error" in loading
        if "loaded" not in loading:  # it never will
            verdict.passed += [False] * len(cases)
            verdict.timeouts += len(cases) * (run.ended == "timeout")
            return run.seconds
        answers = run.answers[1 : 1 + len(cases)]
        for case, answer in zip(cases, answers):
            verdict.passed.append(self.comparison.returned(_value_text(answer), case))
        if len(answers) < len(cases):
            verdict.passed.append(False)
            verdict.timeouts += run.ended == "timeout"
        return run.seconds


def _line(run: ProgramRun, position: int) -> dict[str, Any]:
    """A line of answers, or nothing where there is none or it makes no sense: it may be the program's own."""
    try:
        content = json.loads(run.answers[position][:2000])
    except (IndexError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


_VALUE = '{"value":'


def _value_text(answer: str) -> str:
    """The JSON of a returned value, not yet looked at; empty, which is no JSON, where the call failed."""
    return answer[len(_VALUE) : -1] if answer.startswith(_VALUE) else ""


class CodeReward:
    """Scores responses by running the program in their last fenced block.

    A response without a program scores 0, as does a program that fails. A program about which the verifier knows
    nothing is unscored, or an error, by ``on_reward_failure``; where that is so for all programs it is an error.

    Metrics: ``pass_share``, ``timeouts`` (tests), ``compile_errors``, ``no_code`` and ``failures`` (0 or 1).

    Args:
        verifier: who runs programs.
        code_score: ``all``: 1 where all tests pass, else 0; ``share``: the share of tests that pass.
        code_max_tests: number of test cases to look at, from the first; all by default.
        on_reward_failure: ``unscored`` or ``error``.
        name: what errors and metrics call it.
        extract: takes the program out of a response; None where there is none.

    Raises:
        ValueError: a name or number out of range.
    """

    minimum = 0.0

    def __init__(
        self,
        verifier: CodeVerifier,
        *,
        code_score: CodeScore = "all",
        code_max_tests: int | None = None,
        on_reward_failure: OnFailure = "unscored",
        name: str = "code",
        extract: Callable[[str], str | None] = last_program,
    ) -> None:
        if code_score not in ("all", "share"):
            raise ValueError(f"--code_score must be 'all' or 'share', got {code_score!r}")
        if code_max_tests is not None and code_max_tests < 1:
            raise ValueError(f"--code_max_tests must be at least 1, got {code_max_tests}")
        check_failure_options(on_reward_failure, 0, None)
        self.name = name
        self._verifier = verifier
        self._all = code_score == "all"
        self._most = code_max_tests
        self._on_failure = on_reward_failure
        self._extract = extract

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples, as many at a time as the verifier takes.

        Raises:
            RewardError: a row without usable test cases; or the verifier failed and ``on_reward_failure`` is
                ``error``, or it failed with every program.
        """
        tests = self._find_tests(rollouts)
        programs = [self._extract(rollout.response_text) for rollout in rollouts]
        work = [i for i, program in enumerate(programs) if program is not None]
        outcomes: dict[int, CodeVerdict | RewardError] = {}
        if work:
            with ThreadPoolExecutor(min(len(work), self._verifier.concurrency), "code") as threads:
                outcomes = dict(zip(work, threads.map(lambda i: self._verify(programs[i], tests[i]), work)))
        self._look_at_failures(rollouts, outcomes)
        return self._output(tests, outcomes)

    def close(self) -> None:
        """Ends what the verifier has started."""
        self._verifier.close()

    def _find_tests(self, rollouts: list[Rollout]) -> list[CodeTests]:
        known: dict[int, CodeTests] = {}  # the samples of a group share their prompt
        for i, rollout in enumerate(rollouts):
            if id(rollout.prompt) in known:
                continue
            try:
                known[id(rollout.prompt)] = find_tests(rollout.prompt, self._most)
            except BadTestsError as error:
                raise RewardError(f"{self.name}: {describe_sample(rollouts, i)}: {error}") from None
        return [known[id(rollout.prompt)] for rollout in rollouts]

    def _verify(self, program: str, tests: CodeTests) -> CodeVerdict | RewardError:
        try:
            return self._verifier.verify(program, tests, first_failure_ends=self._all)
        except RewardError as error:
            return error

    def _look_at_failures(self, rollouts: list[Rollout], outcomes: dict[int, CodeVerdict | RewardError]) -> None:
        failures = {i: outcome for i, outcome in outcomes.items() if isinstance(outcome, RewardError)}
        if not failures:
            return
        i, first = next(iter(failures.items()))
        if self._on_failure == "error" or len(failures) == len(outcomes):
            raise RewardError(f"{self.name}: {len(failures)} of {len(outcomes)} programs could not be verified; "
                              f"{describe_sample(rollouts, i)}: {first}")  # fmt: skip
        logger.warning(
            "%s: %d of %d programs are unscored; the first: %s", self.name, len(failures), len(outcomes), first
        )

    def _output(self, tests: list[CodeTests], outcomes: dict[int, CodeVerdict | RewardError]) -> RewardOutput:
        scores: list[float | None] = []
        names = ("pass_share", "timeouts", "compile_errors", "no_code", "failures")
        metrics: dict[str, list[float | None]] = {name: [] for name in names}
        for i, row in enumerate(tests):
            outcome = outcomes.get(i, CodeVerdict())
            failed = isinstance(outcome, RewardError)
            share = None if failed else sum(outcome.passed) / len(row.cases)
            scores.append(float(share == 1.0) if self._all and not failed else share)
            metrics["pass_share"].append(share)
            metrics["timeouts"].append(None if failed else float(outcome.timeouts))
            metrics["compile_errors"].append(None if failed else float(outcome.compile_error))
            metrics["no_code"].append(float(i not in outcomes))
            metrics["failures"].append(float(failed))
        return RewardOutput(scores, metrics)
