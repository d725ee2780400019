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
from lightppo.errors import RewardError
from lightppo.ranks import heartbeat
from lightppo.rewards.function import OnFailure, check_failure_options
from lightppo.rewards.reward_source import RewardOutput, describe_sample, shown
from lightppo.verifiers.sandbox import ProgramRun, SandboxPool
from lightppo.verifiers.thinking import Thinking, after_thinking

logger = logging.getLogger(__name__)

CodeScore = Literal["all", "share"]
COMPARISONS = ("exact", "lines", "float", "set")  # each also accepts what the ones before it accept

_METRICS = ("pass_share", "timeouts", "compile_errors", "no_code", "failures")
_PYTHON_TAGS = ("", "python", "py", "python3")
# digits; longer integers, which Python may refuse to convert, are compared as text
_LONGEST_INT = 4000
_VALUE = '{"value":'  # the start of an answer to a call
_SET = "lightppo.set"  # the key of what a sandbox answers for a set
_FENCE = re.compile(r"([ \t]*)(`{3,})([^`]*)$")


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
    """Return the first ``most`` test cases of a row, in AReaL's or verl's form: an object with ``inputs`` and ``outputs``.

    A row without usable ones is a ``ValueError`` that says what is missing.
    """
    model = prompt.extra.get("reward_model")
    places = {
        "input_output": prompt.extra.get("input_output"),
        "reward_model.ground_truth": model.get("ground_truth")
        if isinstance(model, Mapping)
        else None,
        "ground_truth": prompt.extra.get("ground_truth"),
        "label": prompt.label,
    }
    place, table = next(
        ((place, value) for place, value in places.items() if value is not None), ("", None)
    )
    if not place:
        raise ValueError(f"no test cases: the row has none of {', '.join(places)}")
    try:
        table = _load(table) if isinstance(table, str) else table
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    inputs, outputs = (
        map(table.get, ("inputs", "outputs")) if isinstance(table, Mapping) else (None, None)
    )
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError(
            f"{place} must be an object with the lists 'inputs' and 'outputs', got {shown(table)}"
        )
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{place} has {len(inputs)} inputs and {len(outputs)} outputs")
    if table.get("remote"):
        raise ValueError(
            f"{place}: inputs that are addresses of files ('remote') are not supported"
        )
    function = table.get("fn_name") or None
    make = _script_case if function is None else _call_case
    try:
        return CodeTests(function, tuple(map(make, inputs[:most], outputs[:most])))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: an input is not one JSON value a line: {error}") from None


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


def _script_case(given: Any, expected: Any) -> CodeCase:
    texts = (_text(given), _text(expected))
    return CodeCase(*texts, raw=texts)


def _call_case(given: Any, expected: Any) -> CodeCase:
    """Return a call: one line of JSON per argument or a list; the expected value as JSON, bare or in a list."""
    if isinstance(given, str):
        arguments = [_load(line) for line in given.split("\n") if line.strip()]
    else:
        arguments = list(given) if isinstance(given, (list, tuple)) else [given]
        given = "\n".join(map(json.dumps, arguments))
    if not isinstance(expected, str):
        if isinstance(expected, list) and len(expected) == 1:
            values = [expected, *expected]
        else:
            values = [expected]
        return CodeCase(json.dumps(arguments), values, (given, json.dumps(expected)))
    values = [expected]
    with contextlib.suppress(ValueError, RecursionError):  # otherwise it is plain text
        values = [_load(expected)]
    return CodeCase(json.dumps(arguments), values, (given, expected))


def last_program(response: str) -> str | None:
    """Return the last closed fenced block outside ``<think>…</think>`` that is tagged as Python, or else that is untagged.

    A block without a tag behind the program is often what it prints.
    """
    programs: dict[bool, str] = {}  # the last one with a tag, the last one without
    block: list[str] | None = None
    fence = ""
    indent = ""
    tag = ""
    for line in (after_thinking(response) or "").replace("\r\n", "\n").split("\n"):
        match = _FENCE.fullmatch(line.rstrip())
        if block is None:
            if match:
                (indent, fence, tag), block = match.groups(), []
        elif match and len(match[2]) >= len(fence) and not match[3].strip():
            name = tag.strip().lower().split(" ")[0]
            text = "\n".join(block)
            if name in _PYTHON_TAGS and text.strip():
                programs[name != ""] = textwrap.dedent(text) if indent else text
            block = None
        else:
            block.append(line)
    return programs.get(True) or programs.get(False)


@dataclass(frozen=True)
class Comparison:
    """When an output is right; docs/rewards.md says what each of :data:`COMPARISONS` accepts."""

    code_compare: str = "float"
    # Relative to the expected number. A thousandth of it is the absolute tolerance beside that.
    code_float_tolerance: float = 1e-5

    def __post_init__(self) -> None:
        if self.code_compare not in COMPARISONS:
            raise ValueError(
                f"--code_compare must be one of {', '.join(COMPARISONS)}, got {self.code_compare!r}"
            )
        if not 0 <= self.code_float_tolerance < 1:
            raise ValueError(
                f"--code_float_tolerance must be in [0, 1), got {self.code_float_tolerance}"
            )

    def most_bytes(self, case: CodeCase) -> int:
        """Return a limit: a longer output is wrong, and not worth the memory."""
        if isinstance(case.expected, str):
            values = [case.expected]
        else:
            values = map(json.dumps, case.expected)
        return 32 * max(map(len, values)) + 8192

    def printed(self, printed: str, case: CodeCase) -> bool:
        """Tell whether a program printed the right text."""
        if printed == case.expected or len(printed) > self.most_bytes(case):
            return printed == case.expected
        ours, theirs = (
            [line for line in text.split("\n") if line.strip()] for text in (printed, case.expected)
        )
        if self.code_compare == "exact" or len(ours) != len(theirs):
            return False
        if [line.strip() for line in ours] == [line.strip() for line in theirs]:
            return True
        our_words, their_words = ([line.split() for line in lines] for lines in (ours, theirs))
        if self._allows("float") and all(map(self._close_lines, our_words, their_words)):
            return True
        bags = (
            Counter(tuple(sorted(words)) for words in lines) for lines in (our_words, their_words)
        )
        return self._allows("set") and next(bags) == next(bags)

    def returned(self, answer: str, case: CodeCase) -> bool:
        """Tell whether a function returned the right value; ``answer`` is the value as JSON, where tuples are lists."""
        try:
            if len(answer) > self.most_bytes(case):
                return False
            value = _load(answer)
            return any(self._equal(value, _load(json.dumps(right))) for right in case.expected)
        except (ValueError, RecursionError, OverflowError):
            return False

    def _allows(self, name: str) -> bool:
        return COMPARISONS.index(self.code_compare) >= COMPARISONS.index(name)

    def _close_lines(self, ours: Sequence[str], theirs: Sequence[str]) -> bool:
        return len(ours) == len(theirs) and all(
            a == b or self._close_words(a, b) for a, b in zip(ours, theirs)
        )

    def _close_words(self, ours: str, theirs: str) -> bool:
        whole, right = (word.removeprefix("-").isdecimal() for word in (ours, theirs))
        # Where a whole number is right, another number is right only if it is that number, printed with noise.
        try:
            same = not right or (not whole and Decimal(ours).to_integral_value() == Decimal(theirs))
            return same and self._close(float(ours), float(theirs))
        except (ValueError, InvalidOperation):
            return False

    def _close(self, ours: float, theirs: float) -> bool:
        if not (math.isfinite(ours) and math.isfinite(theirs)):
            return ours == theirs or (math.isnan(ours) and math.isnan(theirs))
        return (
            abs(ours - theirs)
            <= self.code_float_tolerance * abs(theirs) + self.code_float_tolerance / 1000
        )

    def _equal(self, ours: Any, theirs: Any) -> bool:
        if isinstance(ours, dict) and ours.keys() == {_SET} and self._allows("set"):
            ours = ours[_SET]  # without it, a set is no list, as in Python
        if ours == theirs or (self._allows("float") and self._close_values(ours, theirs)):
            return True
        if not self._allows("set") or not (isinstance(ours, list) and isinstance(theirs, list)):
            return False
        bags = [
            Counter(json.dumps(item, sort_keys=True) for item in items) for items in (ours, theirs)
        ]
        return bags[0] == bags[1]

    def _close_values(self, ours: Any, theirs: Any) -> bool:
        if isinstance(ours, list) and isinstance(theirs, list):
            return len(ours) == len(theirs) and all(map(self._close_values, ours, theirs))
        if isinstance(ours, dict) and isinstance(theirs, dict):
            return ours.keys() == theirs.keys() and all(
                self._close_values(ours[key], theirs[key]) for key in ours
            )
        if isinstance(theirs, int):
            noisy = isinstance(ours, float) and math.isfinite(ours) and round(ours) == theirs
            return ours == theirs or (noisy and self._close(ours, theirs))
        numbers = isinstance(ours, (int, float)) and isinstance(theirs, float)
        if numbers:
            return self._close(float(ours), theirs)
        return ours == theirs


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
    code_total_timeout: float = 60.0

    def __post_init__(self) -> None:
        if not self.code_total_timeout > 0:
            raise ValueError(f"--code_total_timeout must be > 0, got {self.code_total_timeout}")
        self.concurrency = self.pool.size

    def verify(self, code: str, tests: CodeTests, *, first_failure_ends: bool) -> CodeVerdict:
        """Run the program on all tests; raises :class:`SandboxError` if the sandbox failed twice."""
        verdict = CodeVerdict()
        left = self.code_total_timeout
        while len(verdict.passed) < len(tests.cases) and left > 0:
            heartbeat.beat()
            rest = tests.cases[len(verdict.passed) :]
            if tests.function is None:  # each test in a process of its own
                most = self.comparison.most_bytes(rest[0])
                run = self.pool.run(
                    code, stdin=rest[0].given, total_seconds=left, output_bytes=most
                )
                good = run.ended == "exit" and run.code == 0
                verdict.passed.append(good and self.comparison.printed(run.stdout, rest[0]))
                verdict.timeouts += run.ended == "timeout"
            else:  # as many as a process survives
                calls = [case.given for case in rest]
                limits = {
                    "total_seconds": left,
                    "output_bytes": sum(map(self.comparison.most_bytes, rest)),
                }
                run = self.pool.run(code, function=tests.function, calls=calls, **limits)
                self._judge_calls(run, rest, verdict)
            verdict.compile_error = "compile_error" in _first_answer(run)
            left -= run.seconds
            if verdict.compile_error or (first_failure_ends and verdict.timeouts):
                return verdict
        verdict.timeouts += len(tests.cases) - len(verdict.passed)
        return verdict

    def close(self) -> None:
        """End the sandboxes."""
        self.pool.close()

    def _judge_calls(
        self, run: ProgramRun, cases: Sequence[CodeCase], verdict: CodeVerdict
    ) -> None:
        """Judge the answers: a program that dies in a test fails that test alone; one that cannot be loaded fails all."""
        late = run.ended == "timeout"
        if "loaded" not in _first_answer(run):
            verdict.passed += [False] * len(cases)
            verdict.timeouts += len(cases) * late
            return
        answers = run.answers[1 : 1 + len(cases)]
        for case, answer in zip(cases, answers):
            # The value as JSON text. If the call failed, it is empty, which is not JSON.
            value = answer[len(_VALUE) : -1] if answer.startswith(_VALUE) else ""
            verdict.passed.append(self.comparison.returned(value, case))
        if len(answers) < len(cases):
            verdict.passed.append(False)
            verdict.timeouts += late


def _first_answer(run: ProgramRun) -> dict[str, Any]:
    """How the loading ended, or ``{}`` if the line is missing or malformed: the program may have written it itself."""
    try:
        content = json.loads(run.answers[0][:2000])
    except (IndexError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


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
        work = [i for i, program in enumerate(programs) if program is not None]
        outcomes: dict[int, CodeVerdict | RewardError] = {}
        if work:
            with ThreadPoolExecutor(min(len(work), self.verifier.concurrency), "code") as threads:
                outcomes = dict(
                    zip(work, threads.map(lambda i: self._verify(programs[i], tests[i]), work))
                )
        failures = {
            i: outcome for i, outcome in outcomes.items() if isinstance(outcome, RewardError)
        }
        if failures:
            i, first = next(iter(failures.items()))
            problem = (
                f"{self.name}: {len(failures)} of {len(outcomes)} programs could not be verified; "
            )
            problem += f"{describe_sample(rollouts, i)}: {first}"
            if self.on_reward_failure == "error" or len(failures) == len(outcomes):
                raise RewardError(problem)
            logger.warning("%s", problem)
        output = RewardOutput([], {name: [] for name in _METRICS})
        for i, row in enumerate(tests):
            verdict = outcomes.get(i, CodeVerdict())
            values: dict[str, float | None] = dict.fromkeys(_METRICS)
            values |= {"no_code": float(i not in outcomes), "failures": float(i in failures)}
            if isinstance(verdict, CodeVerdict):
                values["pass_share"] = sum(verdict.passed) / len(row.cases)
                values |= {
                    "timeouts": float(verdict.timeouts),
                    "compile_errors": float(verdict.compile_error),
                }
            share = values["pass_share"]
            output.scores.append(
                share if self.code_score == "share" or share is None else float(share == 1.0)
            )
            for name, value in values.items():
                output.metrics[name].append(value)
        return output

    def close(self) -> None:
        """End what the verifier has started."""
        self.verifier.close()

    def _find_tests(self, rollouts: list[Rollout]) -> list[CodeTests]:
        known: dict[int, CodeTests] = {}  # the samples of a group share their prompt
        for i, rollout in enumerate(rollouts):
            if id(rollout.prompt) not in known:
                try:
                    known[id(rollout.prompt)] = find_tests(rollout.prompt, self.code_max_tests)
                except ValueError as error:
                    raise RewardError(
                        f"{self.name}: {describe_sample(rollouts, i)}: {error}"
                    ) from None
        return [known[id(rollout.prompt)] for rollout in rollouts]

    def _verify(self, program: str, tests: CodeTests) -> CodeVerdict | RewardError:
        try:
            return self.verifier.verify(program, tests, first_failure_ends=self.code_score == "all")
        except RewardError as error:
            return error
