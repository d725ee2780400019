"""Rewards for programs: the last fenced block of Python in a response runs on the test cases of its row.

The sandbox or a service (:mod:`lightppo.verifiers.programs`) runs it. Outputs are compared here, so that no
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
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal, Protocol, get_args

from lightppo.data.records import Prompt, Rollout
from lightppo.data.rows import first_value
from lightppo.errors import RewardError
from lightppo.ranks import heartbeat
from lightppo.rewards.function import OnFailure, check_failure_options
from lightppo.rewards.reward_source import RewardOutput, describe_sample, shown
from lightppo.verifiers.sandbox import ProgramRun, SandboxPool
from lightppo.verifiers.thinking import Thinking, after_thinking

logger = logging.getLogger(__name__)

CodeScore = Literal["all", "share"]
COMPARISONS = ("exact", "lines", "float", "set")  # each also accepts what the ones before it accept

_TEST_COLUMNS = ("input_output", "reward_model.ground_truth", "ground_truth", "label")
_METRICS = ("pass_share", "timeouts", "compile_errors", "no_code", "failures")
_PYTHON_TAGS = ("python", "py", "python3")
# digits; longer integers, which Python may refuse to convert, are compared as text
_LONGEST_INT = 4000
# Relative to the expected number. A thousandth of it is the absolute tolerance beside that.
_FLOAT_TOLERANCE = 1e-5
_VALUE = '{"value":'  # the start of an answer to a call
_SET = "lightppo.set"  # the key of what a sandbox answers for a set
_FENCE = re.compile(r"([ \t]*)(`{3,})([^`]*)$")


@dataclass(frozen=True)
class CodeCase:
    """One test case."""

    program_input: str  # standard input; for calls the arguments as a JSON list
    expected: Any  # the text to print; for calls the list of right values
    raw: tuple[str, str]  # the row's own input and output, as text


@dataclass(frozen=True)
class CodeTests:
    """All test cases of a row."""

    function: str | None  # None: programs read standard input
    cases: tuple[CodeCase, ...]


def find_tests(prompt: Prompt, most: int | None = None) -> CodeTests:
    """Return the first ``most`` test cases of a row, in AReaL's or verl's form: an object with ``inputs`` and ``outputs``.

    A row without usable ones is a ``ValueError`` that says what is missing.
    """
    column, test_table = first_value({**prompt.extra, "label": prompt.label}, _TEST_COLUMNS)
    if column is None:
        raise ValueError(f"no test cases: the row has none of {', '.join(_TEST_COLUMNS)}")
    try:
        if isinstance(test_table, str):
            test_table = _load(test_table)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{column} is not JSON: {error}") from None
    if not isinstance(test_table, Mapping) or not all(
        isinstance(test_table.get(name), list) for name in ("inputs", "outputs")
    ):
        raise ValueError(
            f"{column} must be an object with the lists 'inputs' and 'outputs', got {shown(test_table)}"
        )
    inputs = test_table["inputs"]
    outputs = test_table["outputs"]
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{column} has {len(inputs)} inputs and {len(outputs)} outputs")
    if test_table.get("remote"):
        raise ValueError(
            f"{column}: inputs that are addresses of files ('remote') are not supported"
        )
    function = test_table.get("fn_name") or None
    case_of = _script_case if function is None else _call_case
    try:
        return CodeTests(function, tuple(map(case_of, inputs[:most], outputs[:most])))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{column}: an input is not one JSON value a line: {error}") from None


def _load(text: str) -> Any:
    return json.loads(
        text, parse_int=lambda digits: int(digits) if len(digits) < _LONGEST_INT else digits
    )


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "\n".join(map(_text, value))
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _script_case(stdin: Any, expected: Any) -> CodeCase:
    texts = (_text(stdin), _text(expected))
    return CodeCase(*texts, raw=texts)


def _call_case(arguments: Any, expected: Any) -> CodeCase:
    """Return a call: one line of JSON per argument or a list; the expected value as JSON, bare or in a list."""
    if isinstance(arguments, str):
        raw_input = arguments
        arguments = [_load(line) for line in raw_input.split("\n") if line.strip()]
    else:
        if not isinstance(arguments, (list, tuple)):
            arguments = [arguments]
        raw_input = "\n".join(map(json.dumps, arguments))
    raw_output = expected if isinstance(expected, str) else json.dumps(expected)
    right_values = [expected]
    if isinstance(expected, str):
        with contextlib.suppress(ValueError, RecursionError):  # otherwise it is plain text
            right_values = [_load(expected)]
    elif isinstance(expected, list) and len(expected) == 1:
        right_values = [expected, *expected]
    return CodeCase(json.dumps(list(arguments)), right_values, (raw_input, raw_output))


def last_program(response: str) -> str | None:
    """Return the last closed fenced block outside ``<think>…</think>`` that is tagged as Python, or else that is untagged.

    A block without a tag behind the program is often what it prints.
    """
    tagged = None
    untagged = None
    block_lines: list[str] | None = None
    fence = indent = language_tag = ""
    for response_line in (after_thinking(response) or "").replace("\r\n", "\n").split("\n"):
        fence_match = _FENCE.fullmatch(response_line.rstrip())
        if block_lines is None:
            if fence_match:
                block_lines = []
                indent, fence, language_tag = fence_match.groups()
        elif fence_match and len(fence_match[2]) >= len(fence) and not fence_match[3].strip():
            program = "\n".join(block_lines)
            if indent:
                program = textwrap.dedent(program)
            language = language_tag.strip().lower().split(" ")[0]
            if program.strip() and language == "":
                untagged = program
            elif program.strip() and language in _PYTHON_TAGS:
                tagged = program
            block_lines = None
        else:
            block_lines.append(response_line)
    return tagged or untagged


@dataclass(frozen=True)
class Comparison:
    """When an output is right; docs/rewards.md says what each of :data:`COMPARISONS` accepts."""

    code_compare: str = "float"

    def __post_init__(self) -> None:
        if self.code_compare not in COMPARISONS:
            raise ValueError(
                f"--code_compare must be one of {', '.join(COMPARISONS)}, got {self.code_compare!r}"
            )

    def most_bytes(self, test_case: CodeCase) -> int:
        """Return a limit: a longer output is wrong, and not worth the memory."""
        expected = test_case.expected
        texts = [expected] if isinstance(expected, str) else map(json.dumps, expected)
        return 32 * max(map(len, texts)) + 8192

    def printed(self, output: str, test_case: CodeCase) -> bool:
        """Tell whether a program printed the right text."""
        if output == test_case.expected:
            return True
        if len(output) > self.most_bytes(test_case) or self.code_compare == "exact":
            return False
        lines = _words_of_lines(output)
        expected_lines = _words_of_lines(test_case.expected)
        if len(lines) != len(expected_lines):
            return False
        if _stripped_lines(output) == _stripped_lines(test_case.expected):
            return True
        if self._allows("float") and all(map(self._close_lines, lines, expected_lines)):
            return True
        return self._allows("set") and _bag_of_lines(lines) == _bag_of_lines(expected_lines)

    def returned(self, answer: str, test_case: CodeCase) -> bool:
        """Tell whether a function returned the right value; ``answer`` is the value as JSON, where tuples are lists."""
        try:
            if len(answer) > self.most_bytes(test_case):
                return False
            value = _load(answer)
            return any(
                self._equal(value, _load(json.dumps(expected))) for expected in test_case.expected
            )
        except (ValueError, RecursionError, OverflowError):
            return False

    def _allows(self, name: str) -> bool:
        return COMPARISONS.index(self.code_compare) >= COMPARISONS.index(name)

    def _close_lines(self, line_words: Sequence[str], expected_words: Sequence[str]) -> bool:
        return len(line_words) == len(expected_words) and all(
            word == expected_word or self._close_words(word, expected_word)
            for word, expected_word in zip(line_words, expected_words)
        )

    def _close_words(self, word: str, expected_word: str) -> bool:
        # Where a whole number is right, another number is right only if it is that number, printed with noise.
        try:
            if _is_integer(expected_word) and (
                _is_integer(word) or Decimal(word).to_integral_value() != Decimal(expected_word)
            ):
                return False
            return self._close(float(word), float(expected_word))
        except (ValueError, InvalidOperation):
            return False

    def _close(self, number: float, expected_number: float) -> bool:
        if not (math.isfinite(number) and math.isfinite(expected_number)):
            return number == expected_number or (math.isnan(number) and math.isnan(expected_number))
        tolerance = _FLOAT_TOLERANCE * abs(expected_number) + _FLOAT_TOLERANCE / 1000
        return abs(number - expected_number) <= tolerance

    def _equal(self, value: Any, expected_value: Any) -> bool:
        if isinstance(value, dict) and value.keys() == {_SET} and self._allows("set"):
            value = value[_SET]  # without it, a set is no list, as in Python
        if value == expected_value or (
            self._allows("float") and self._close_values(value, expected_value)
        ):
            return True
        if not self._allows("set") or not (
            isinstance(value, list) and isinstance(expected_value, list)
        ):
            return False
        item_counts = [
            Counter(json.dumps(item, sort_keys=True) for item in items)
            for items in (value, expected_value)
        ]
        return item_counts[0] == item_counts[1]

    def _close_values(self, value: Any, expected_value: Any) -> bool:
        if value == expected_value:
            return True
        if isinstance(value, list) and isinstance(expected_value, list):
            return len(value) == len(expected_value) and all(
                map(self._close_values, value, expected_value)
            )
        if isinstance(value, dict) and isinstance(expected_value, dict):
            return value.keys() == expected_value.keys() and all(
                self._close_values(value[key], expected_value[key]) for key in value
            )
        if isinstance(expected_value, int):
            is_noisy = (
                isinstance(value, float) and math.isfinite(value) and round(value) == expected_value
            )
            return is_noisy and self._close(value, expected_value)
        if isinstance(expected_value, float) and isinstance(value, int | float):
            return self._close(float(value), expected_value)
        return False


def _words_of_lines(text: str) -> list[list[str]]:
    return [words for line in text.split("\n") if (words := line.split())]


def _stripped_lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def _bag_of_lines(lines: Sequence[Sequence[str]]) -> Counter[tuple[str, ...]]:
    return Counter(tuple(sorted(words)) for words in lines)


def _is_integer(word: str) -> bool:
    return word.removeprefix("-").isdecimal()


@dataclass
class CodeVerdict:
    """How a program did on its tests."""

    # in the order of the tests; shorter if the run stopped early
    passed: list[bool] = field(default_factory=list)
    timeouts: int = 0  # tests that took too long
    compile_error: bool = False  # the program is not valid Python


class CodeVerifier(Protocol):
    """Runs programs on test cases; up to ``concurrency`` threads call ``verify`` at a time.

    With ``first_failure_ends`` only whether all tests pass counts: those after one that took too long need not run.
    """

    concurrency: int

    def verify(self, code: str, tests: CodeTests, *, first_failure_ends: bool) -> CodeVerdict:
        """Raise :class:`RewardError` if it learned nothing about the program."""

    def close(self) -> None: ...


@dataclass(eq=False)
class SandboxVerifier:
    """Runs programs in the sandboxes of this rank."""

    pool: SandboxPool
    comparison: Comparison = field(default_factory=Comparison)
    # tests of a program that do not begin within these seconds count as timed out
    total_seconds: float = 60.0

    def __post_init__(self) -> None:
        self.concurrency = self.pool.size

    def verify(self, code: str, tests: CodeTests, *, first_failure_ends: bool) -> CodeVerdict:
        """Run the program on all tests; raises :class:`SandboxError` if the sandbox failed twice."""
        verdict = CodeVerdict()
        seconds_left = self.total_seconds
        while len(verdict.passed) < len(tests.cases) and seconds_left > 0:
            heartbeat.beat()
            remaining_cases = tests.cases[len(verdict.passed) :]
            if tests.function is None:
                program_run = self._run_script(code, remaining_cases[0], verdict, seconds_left)
            else:
                program_run = self._run_calls(
                    code, tests.function, remaining_cases, verdict, seconds_left
                )
            verdict.compile_error = "compile_error" in _first_answer(program_run)
            seconds_left -= program_run.seconds
            if verdict.compile_error or (first_failure_ends and verdict.timeouts):
                return verdict
        verdict.timeouts += len(tests.cases) - len(verdict.passed)
        return verdict

    def close(self) -> None:
        """End the sandboxes."""
        self.pool.close()

    def _run_script(
        self, program: str, test_case: CodeCase, verdict: CodeVerdict, seconds: float
    ) -> ProgramRun:
        """Run one test in a process of its own."""
        program_run = self.pool.run(
            program,
            stdin=test_case.program_input,
            total_seconds=seconds,
            output_bytes=self.comparison.most_bytes(test_case),
        )
        has_ended_well = program_run.ended == "exit" and program_run.code == 0
        verdict.passed.append(
            has_ended_well and self.comparison.printed(program_run.stdout, test_case)
        )
        verdict.timeouts += program_run.ended == "timeout"
        return program_run

    def _run_calls(
        self,
        program: str,
        function: str,
        test_cases: Sequence[CodeCase],
        verdict: CodeVerdict,
        seconds: float,
    ) -> ProgramRun:
        """Run as many tests as a process survives: one that dies in a test fails that test alone.

        A program that cannot be loaded fails all.
        """
        program_run = self.pool.run(
            program,
            function=function,
            calls=[test_case.program_input for test_case in test_cases],
            total_seconds=seconds,
            output_bytes=sum(map(self.comparison.most_bytes, test_cases)),
        )
        is_late = program_run.ended == "timeout"
        if "loaded" not in _first_answer(program_run):
            verdict.passed += [False] * len(test_cases)
            verdict.timeouts += len(test_cases) * is_late
            return program_run
        answers = program_run.answers[1 : 1 + len(test_cases)]
        for test_case, answer in zip(test_cases, answers):
            # The value as JSON text. If the call failed, it is empty, which is not JSON.
            value = answer[len(_VALUE) : -1] if answer.startswith(_VALUE) else ""
            verdict.passed.append(self.comparison.returned(value, test_case))
        if len(answers) < len(test_cases):
            verdict.passed.append(False)
            verdict.timeouts += is_late
        return program_run


def _first_answer(program_run: ProgramRun) -> dict[str, Any]:
    """Return how the loading ended; ``{}`` if the line is missing or malformed: the program may have written it."""
    try:
        content = json.loads(program_run.answers[0][:2000])
    except (IndexError, ValueError, RecursionError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


@dataclass(eq=False)
class CodeReward:
    """Scores a response by running the program in its last fenced block; a response without a program scores 0.

    If the verifier learns nothing about a program, ``on_reward_failure`` applies; if that happens to all programs, it
    is an error. Metrics: ``pass_share``, ``timeouts`` (tests), ``compile_errors``, ``no_code``, ``failures``.
    """

    minimum: ClassVar[float] = 0.0

    verifier: CodeVerifier
    # 1 if all tests pass, else 0; "share": the share of tests that pass
    code_score: CodeScore = "all"
    code_max_tests: int | None = None  # only the first so many test cases; None: all
    on_reward_failure: OnFailure = "unscored"
    name: str = "code"
    # Takes the program out of a response, if there is one.
    extract: Callable[[str], str | None] = last_program
    thinking: Thinking = field(default_factory=Thinking)

    def __post_init__(self) -> None:
        if self.code_score not in get_args(CodeScore):
            raise ValueError(
                f"--code_score must be {' or '.join(get_args(CodeScore))}, got {self.code_score!r}"
            )
        if self.code_max_tests is not None and self.code_max_tests < 1:
            raise ValueError(f"--code_max_tests must be at least 1, got {self.code_max_tests}")
        check_failure_options(self.on_reward_failure)

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Score the samples, as many at a time as the verifier allows."""
        tests = self._find_tests(rollouts)
        programs = [self.extract(self.thinking.shown(rollout)) for rollout in rollouts]
        verdicts = self._verify_all(programs, tests)
        self._report_failures(verdicts, rollouts)
        output = RewardOutput([], {name: [] for name in _METRICS})
        for i, sample_tests in enumerate(tests):
            verdict = verdicts.get(i, CodeVerdict())
            values: dict[str, float | None] = dict.fromkeys(_METRICS)
            values["no_code"] = float(i not in verdicts)
            values["failures"] = float(isinstance(verdict, RewardError))
            score = None
            if isinstance(verdict, CodeVerdict):
                score = sum(verdict.passed) / len(sample_tests.cases)
                values["pass_share"] = score
                values["timeouts"] = float(verdict.timeouts)
                values["compile_errors"] = float(verdict.compile_error)
                if self.code_score == "all":
                    score = float(score == 1.0)
            output.scores.append(score)
            for name, value in values.items():
                output.metrics[name].append(value)
        return output

    def _verify_all(
        self, programs: Sequence[str | None], tests: Sequence[CodeTests]
    ) -> dict[int, CodeVerdict | RewardError]:
        """Return the verdict on each program, or why there is none, by the number of its sample."""
        numbers = [i for i, program in enumerate(programs) if program is not None]
        if not numbers:
            return {}
        threads = min(len(numbers), self.verifier.concurrency)
        with ThreadPoolExecutor(threads, "code") as executor:
            verdicts = executor.map(lambda i: self._verify(programs[i], tests[i]), numbers)
            return dict(zip(numbers, verdicts))

    def _report_failures(
        self, verdicts: Mapping[int, CodeVerdict | RewardError], rollouts: list[Rollout]
    ) -> None:
        failures = {i: error for i, error in verdicts.items() if isinstance(error, RewardError)}
        if not failures:
            return
        i = min(failures)
        problem = (
            f"{self.name}: {len(failures)} of {len(verdicts)} programs could not be verified; "
            f"{describe_sample(rollouts, i)}: {failures[i]}"
        )
        if self.on_reward_failure == "error" or len(failures) == len(verdicts):
            raise RewardError(problem)
        logger.warning("%s", problem)

    def close(self) -> None:
        """End what the verifier has started."""
        self.verifier.close()

    def _find_tests(self, rollouts: list[Rollout]) -> list[CodeTests]:
        tests: dict[int, CodeTests] = {}  # the samples of a group share their prompt
        for i, rollout in enumerate(rollouts):
            if id(rollout.prompt) in tests:
                continue
            try:
                tests[id(rollout.prompt)] = find_tests(rollout.prompt, self.code_max_tests)
            except ValueError as error:
                raise RewardError(f"{self.name}: {describe_sample(rollouts, i)}: {error}") from None
        return [tests[id(rollout.prompt)] for rollout in rollouts]

    def _verify(self, program: str, tests: CodeTests) -> CodeVerdict | RewardError:
        try:
            return self.verifier.verify(program, tests, first_failure_ends=self.code_score == "all")
        except RewardError as error:
            return error
