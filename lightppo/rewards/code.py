"""Rewards for programs: the last fenced block of a response runs on the test cases of its row.

The sandbox or a service (:mod:`lightppo.rewards.services`) runs it. Outputs are compared here, outside, so that no
program sees the expected ones.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RewardError
from lightppo.rewards.source import OnFailure, RewardOutput, check_failure_options, describe_sample
from lightppo.sandbox import ProgramRun, SandboxPool

logger = logging.getLogger(__name__)

CodeScore = Literal["all", "share"]
COMPARISONS = ("exact", "lines", "float", "set")  # each also accepts what the ones before it accept

_PYTHON_TAGS = ("", "python", "py", "python3")
_LONGEST_INT = 4000  # digits; longer integers, which Python may refuse to convert, are compared as text
_FENCE = re.compile(r"([ \t]*)(`{3,})([^`]*)$")


class BadTestsError(ValueError):
    """A row has no usable test cases; the message says what is missing."""


@dataclass(frozen=True)
class CodeCase:
    """One test case."""

    given: str  # standard input; for calls the arguments as a JSON list
    expected: Any  # the text to print; for calls the list of right values
    raw: tuple[str, str]  # the row's own input and output, as text


@dataclass(frozen=True)
class CodeTests:
    """All test cases of a row."""

    function: str | None  # None: programs read standard input
    cases: tuple[CodeCase, ...]


def find_tests(prompt: Prompt, most: int | None = None) -> CodeTests:
    """The first ``most`` test cases of a row, in AReaL's or verl's form: an object with ``inputs`` and ``outputs``."""
    model = prompt.extra.get("reward_model")
    places = {
        "input_output": prompt.extra.get("input_output"),
        "reward_model.ground_truth": model.get("ground_truth") if isinstance(model, Mapping) else None,
        "ground_truth": prompt.extra.get("ground_truth"),
        "label": prompt.label,
    }
    place, value = next(((place, value) for place, value in places.items() if value is not None), ("", None))
    if not place:
        raise BadTestsError(f"no test cases: the row has none of {', '.join(places)}")
    table = _object(value, place)
    inputs, outputs = table.get("inputs"), table.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadTestsError(f"{place} must have the lists 'inputs' and 'outputs', has {', '.join(map(str, table))}")
    if len(inputs) != len(outputs) or not inputs:
        raise BadTestsError(f"{place} has {len(inputs)} inputs and {len(outputs)} outputs")
    if table.get("remote"):
        raise BadTestsError(f"{place}: inputs that are addresses of files ('remote') are not supported")
    function = table.get("fn_name") or None
    make = _script_case if function is None else _call_case
    return CodeTests(function, tuple(make(*pair, place) for pair in list(zip(inputs, outputs))[:most]))


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = _load(value)
        except (ValueError, RecursionError) as error:
            raise BadTestsError(f"{place} is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise BadTestsError(f"{place} must be an object with 'inputs' and 'outputs', is of type {type(value).__name__}")
    return value


def _load(text: str) -> Any:
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < _LONGEST_INT else digits)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "\n".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def _script_case(given: Any, expected: Any, place: str) -> CodeCase:
    texts = (_text(given), _text(expected))
    return CodeCase(*texts, raw=texts)


def _call_case(given: Any, expected: Any, place: str) -> CodeCase:
    """Reads a call: one line of JSON per argument or a list; the expected value as JSON, bare or in a list."""
    if isinstance(given, str):
        try:
            arguments = [_load(line) for line in given.split("\n") if line.strip()]
        except (ValueError, RecursionError) as error:
            raise BadTestsError(f"{place}: an input is not one JSON value a line: {error}") from None
    else:
        arguments = list(given) if isinstance(given, (list, tuple)) else [given]
    values = [expected]
    if isinstance(expected, str):
        with contextlib.suppress(ValueError, RecursionError):  # otherwise it is plain text
            values = [_load(expected)]
    elif isinstance(expected, list) and len(expected) == 1:
        values.append(expected[0])
    raw = (given if isinstance(given, str) else "\n".join(map(json.dumps, arguments)), _text_of_value(expected))
    return CodeCase(json.dumps(arguments), values, raw)


def _text_of_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def last_program(response: str) -> str | None:
    """The last closed fenced block outside ``<think>…</think>`` that is tagged as Python or untagged, if any."""
    program = None
    block: list[str] | None = None
    fence, indent, tag = "", "", ""
    for line in response.rpartition("</think>")[2].replace("\r\n", "\n").split("\n"):
        match = _FENCE.fullmatch(line.rstrip())
        if block is None:
            if match:
                (indent, fence, tag), block = match.groups(), []
        elif match and len(match[2]) >= len(fence) and not match[3].strip():
            if tag.strip().lower().split(" ")[0] in _PYTHON_TAGS:
                program = textwrap.dedent("\n".join(block)) if indent else "\n".join(block)
            block = None
        else:
            block.append(line)
    return program if program and program.strip() else None


@dataclass(frozen=True)
class Comparison:
    """When an output is right.

    Args:
        code_compare: the most lenient comparison that counts; each one also accepts what those before it accept.

            - ``exact``: the same text;
            - ``lines``: the same lines, ignoring spaces around them and empty lines;
            - ``float``: the same words per line; two numbers may differ by the tolerance unless both are whole;
            - ``set``: the same lines in any order, with the same words in any order.

            For return values, ``exact`` and ``lines`` mean equal, and ``set`` ignores the order of the outermost list.
        code_float_tolerance: relative to the expected number; a thousandth of it is added as absolute tolerance.
    """

    code_compare: str = "float"
    code_float_tolerance: float = 1e-5

    def __post_init__(self) -> None:
        if self.code_compare not in COMPARISONS:
            raise ValueError(f"--code_compare must be one of {', '.join(COMPARISONS)}, got {self.code_compare!r}")
        if not 0 <= self.code_float_tolerance < 1:
            raise ValueError(f"--code_float_tolerance must be in [0, 1), got {self.code_float_tolerance}")

    def printed(self, printed: str, case: CodeCase) -> bool:
        """Whether a program printed the right text."""
        if printed == case.expected:
            return True
        ours, theirs = (
            [line.strip() for line in text.split("\n") if line.strip()] for text in (printed, case.expected)
        )
        if self.code_compare == "exact" or len(ours) != len(theirs):
            return False
        if ours == theirs:
            return True
        our_words, their_words = ([line.split() for line in lines] for lines in (ours, theirs))
        if self._allows("float") and all(map(self._close_lines, our_words, their_words)):
            return True
        return self._allows("set") and _bag(our_words) == _bag(their_words)

    def returned(self, answer: str, case: CodeCase) -> bool:
        """Whether a function returned the right value; ``answer`` is the value as JSON, where tuples are lists."""
        # an answer far longer than the expected one is wrong, and not worth the memory
        if len(answer) > 32 * max(len(json.dumps(value)) for value in case.expected) + 1024:
            return False
        try:
            value = _load(answer)
            return any(self._equal(value, _load(json.dumps(right))) for right in case.expected)
        except (ValueError, RecursionError, OverflowError):
            return False

    def _allows(self, name: str) -> bool:
        return COMPARISONS.index(self.code_compare) >= COMPARISONS.index(name)

    def _close_lines(self, ours: Sequence[str], theirs: Sequence[str]) -> bool:
        return len(ours) == len(theirs) and all(a == b or self._close_words(a, b) for a, b in zip(ours, theirs))

    def _close_words(self, ours: str, theirs: str) -> bool:
        if all(word.removeprefix("-").isdecimal() for word in (ours, theirs)):
            return False  # whole numbers are right or wrong
        try:
            return self._close(float(ours), float(theirs))
        except ValueError:
            return False

    def _close(self, ours: float, theirs: float) -> bool:
        if not (math.isfinite(ours) and math.isfinite(theirs)):
            return ours == theirs or (math.isnan(ours) and math.isnan(theirs))
        return abs(ours - theirs) <= self.code_float_tolerance * abs(theirs) + self.code_float_tolerance / 1000

    def _equal(self, ours: Any, theirs: Any) -> bool:
        if ours == theirs or (self._allows("float") and self._close_values(ours, theirs)):
            return True
        if not self._allows("set") or not (isinstance(ours, list) and isinstance(theirs, list)):
            return False
        bags = [Counter(json.dumps(item, sort_keys=True) for item in items) for items in (ours, theirs)]
        return bags[0] == bags[1]

    def _close_values(self, ours: Any, theirs: Any) -> bool:
        if isinstance(ours, list) and isinstance(theirs, list):
            return len(ours) == len(theirs) and all(map(self._close_values, ours, theirs))
        if isinstance(ours, dict) and isinstance(theirs, dict):
            return ours.keys() == theirs.keys() and all(self._close_values(ours[key], theirs[key]) for key in ours)
        numbers = isinstance(ours, (int, float)) and isinstance(theirs, (int, float))
        if numbers and not (isinstance(ours, int) and isinstance(theirs, int)):
            return self._close(float(ours), float(theirs))
        return ours == theirs


def _bag(lines: Sequence[Sequence[str]]) -> Counter[tuple[str, ...]]:
    return Counter(tuple(sorted(words)) for words in lines)


@dataclass
class CodeVerdict:
    """How a program did on its tests."""

    passed: list[bool] = field(default_factory=list)  # in the order of the tests; shorter if the run stopped early
    timeouts: int = 0  # tests that took too long
    compile_error: bool = False  # the program is not valid Python


class CodeVerifier(Protocol):
    """Runs programs on test cases; up to ``concurrency`` threads call ``verify`` at a time.

    ``verify`` raises :class:`RewardError` if it learned nothing about the program.
    """

    concurrency: int

    def verify(self, code: str, tests: CodeTests, *, first_failure_ends: bool) -> CodeVerdict: ...

    def close(self) -> None: ...


class SandboxVerifier:
    """Runs programs in the sandboxes of this rank.

    Tests that do not begin within ``code_total_timeout`` seconds of one program count as timed out.
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
        """Runs the program on all tests; raises :class:`SandboxError` if the sandbox failed twice."""
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
        """Runs one test in a process of its own; returns the seconds it took."""
        run = self.pool.run(code, stdin=cases[0].given, total_seconds=left)
        verdict.compile_error = "compile_error" in _line(run, 0)
        good = run.ended == "exit" and run.code == 0
        verdict.passed.append(good and self.comparison.printed(run.stdout, cases[0]))
        verdict.timeouts += run.ended == "timeout"
        return run.seconds

    def _judge_calls(
        self, code: str, function: str, cases: Sequence[CodeCase], left: float, verdict: CodeVerdict
    ) -> float:
        """Runs as many tests as one process survives; it fails the test it dies in. Returns the seconds it took."""
        run = self.pool.run(code, function=function, calls=[case.given for case in cases], total_seconds=left)
        loading = _line(run, 0)
        verdict.compile_error = "compile_error" in loading
        if "loaded" not in loading:  # the program cannot be loaded
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
    """One line of the answers, or ``{}`` if it is missing or malformed: the program may have written it itself."""
    try:
        content = json.loads(run.answers[position][:2000])
    except (IndexError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


_VALUE = '{"value":'


def _value_text(answer: str) -> str:
    """The returned value as unparsed JSON; empty, which is not JSON, if the call failed."""
    return answer[len(_VALUE) : -1] if answer.startswith(_VALUE) else ""


class CodeReward:
    """Scores a response by running the program in its last fenced block; a response without a program scores 0.

    If the verifier learns nothing about a program, ``on_reward_failure`` applies; if that happens to all programs, it
    is an error. Metrics: ``pass_share``, ``timeouts`` (tests), ``compile_errors``, ``no_code``, ``failures``.

    Args:
        code_score: ``all``: 1 if all tests pass, else 0; ``share``: the share of tests that pass.
        code_max_tests: use only the first so many test cases; None: all.
        extract: takes the program out of a response; returns None if there is no program.
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
        """Scores the samples, as many at a time as the verifier allows."""
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
