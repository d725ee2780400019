"""Programs in responses, test cases in rows, comparisons, verdicts of the real sandbox, and scores."""

from __future__ import annotations

import json
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RewardError, SandboxError, SandboxRefusedError
from lightppo.rewards.reward_source import check_output
from lightppo.verifiers.code import (
    COMPARISONS,
    CodeCase,
    CodeReward,
    CodeTests,
    CodeVerdict,
    Comparison,
    SandboxVerifier,
    find_tests,
    last_program,
)
from lightppo.verifiers.sandbox import SandboxLimits, SandboxPool

ADD = {"inputs": ["1 2\n", "3 4\n", "-1 1\n"], "outputs": ["3\n", "7\n", "0\n"]}
ADD_CALLS = {"fn_name": "add", "inputs": ["1\n2", "3\n4", "-1\n1"], "outputs": ["3", "7", "0"]}


def make_prompt(tests: Any, column: str = "input_output", index: int = 0) -> Prompt:
    return Prompt("Add two numbers.", [1], index=index, extra={column: tests})


def make_rollout(response: str, tests: Any = ADD, prompt: Prompt | None = None) -> Rollout:
    return Rollout(prompt or make_prompt(tests), 0, [2], response, "stop")


def fenced(code: str, tag: str = "python") -> str:
    return f"Here it is:\n```{tag}\n{code}\n```\nDone."


# --- programs in responses


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```", "a"),
        ("```py\na\n```\ntext\n```python3\nb\n```", "b"),
        ("```python\na\n```\nIt prints\n```text\n42\n```", "a"),  # another language is no program
        ("```python\na\n```\nIt prints\n```\n42\n```", "a"),  # without a tag, behind the program
        ("```\nx\n```\n```python\na\n```", "a"),
        ("```\na\n```\n```\nb\n```", "b"),
        ("```python\n\n```\n```\nb\n```", "b"),
        ("<think>```python\na\n```", None),  # still thinking
        ("```python\na\n```\n```python\ncut off", "a"),
        ("1. First\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''"),
        ("```python\r\na\r\nb\r\n```", "a\nb"),
        ("```Python title=x\na\n```", "a"),
        ("<think>```python\na\n```</think>It is 42.", None),
        ("<think>```python\na\n```</think>```python\nb\n```", "b"),
        ("print(1)", None),
        ("```python\nprint(1)", None),
        ("```python\n\n```", None),
        ("inline ```python print(1)``` code", None),
        ("", None),
    ],
)
def test_last_program(response, program):
    assert last_program(response) == program


# --- test cases in rows


@pytest.mark.parametrize(
    "prompt",
    [
        make_prompt(ADD),
        make_prompt(json.dumps(ADD)),
        make_prompt({"style": "rule", "ground_truth": json.dumps(ADD)}, "reward_model"),
        make_prompt({"style": "rule", "ground_truth": ADD}, "reward_model"),
        make_prompt(ADD, "ground_truth"),
        Prompt("p", [1], label=json.dumps(ADD)),
        # AReaL's rows have solutions too
        Prompt("p", [1], label="def add(): …", extra={"input_output": ADD}),
    ],
)
def test_forms_of_rows(prompt):
    tests = find_tests(prompt)
    assert tests.function is None
    assert [(case.program_input, case.expected) for case in tests.cases] == list(
        zip(ADD["inputs"], ADD["outputs"])
    )


@pytest.mark.parametrize("function", ["", None])
def test_no_function_name_means_standard_input(function):
    assert find_tests(make_prompt(ADD | {"fn_name": function})).function is None


def test_lines_of_standard_input_may_be_a_list():
    case = find_tests(make_prompt({"inputs": [["1", "2"]], "outputs": [["3", 4]]})).cases[0]
    assert (case.program_input, case.expected) == ("1\n2", "3\n4")


@pytest.mark.parametrize(
    ("given", "expected", "arguments", "values"),
    [
        ("1\n[2, 3]", "[2]", [1, [2, 3]], [[2]]),  # AReaL's and verl's: JSON, one argument a line
        # a list of arguments; the value, or a list of it
        ([1, [2, 3]], [[2]], [1, [2, 3]], [[[2]], [2]]),
        ([1], 2, [1], [2]),
        ("", "true", [], [True]),
        ('"a"', "plain text", ["a"], ["plain text"]),
        ('{"1": 2}\n', '{"1": 2}', [{"1": 2}], [{"1": 2}]),
        (5, 5, [5], [5]),
    ],
)
def test_calls(given, expected, arguments, values):
    tests = find_tests(make_prompt({"fn_name": "f", "inputs": [given], "outputs": [expected]}))
    assert tests.function == "f"
    assert json.loads(tests.cases[0].program_input) == arguments
    assert tests.cases[0].expected == values


def test_numbers_too_long_for_python_to_print():
    """Python refuses to read whole numbers of more than 4300 digits."""
    long = "7" * 5000
    case = find_tests(make_prompt({"fn_name": "f", "inputs": ["1"], "outputs": [long]})).cases[0]
    assert Comparison("exact").returned(long, case)
    assert not Comparison("exact").returned(long[:-1] + "8", case)


def test_only_the_first_tests():
    assert len(find_tests(make_prompt(ADD), 2).cases) == 2


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (Prompt("p", [1]), r"input_output, reward_model\.ground_truth"),
        (make_prompt("{"), "input_output .*JSON"),
        (make_prompt([1]), r"input_output .*'inputs' and 'outputs'.*\[1\]"),
        (make_prompt({"inputs": ["1"]}), "input_output .*'inputs' and 'outputs'"),
        (make_prompt({"inputs": ["1"], "outputs": []}), "1 inputs and 0 outputs"),
        (make_prompt({"inputs": [], "outputs": []}), "0 inputs"),
        (make_prompt(ADD | {"remote": True}), "remote"),
        (make_prompt(ADD_CALLS | {"inputs": ["1\nx", "1", "1"]}), "input_output: .*JSON"),
    ],
)
def test_rows_without_tests_are_errors(prompt, problem):
    with pytest.raises(ValueError, match=problem):
        find_tests(prompt)


# --- comparisons


def levels(least: str | None) -> list[bool]:
    """Which comparisons accept what ``least`` and those after it accept."""
    first = COMPARISONS.index(least) if least else len(COMPARISONS)
    return [i >= first for i in range(len(COMPARISONS))]


@pytest.mark.parametrize(
    ("printed", "expected", "least"),
    [
        ("3\n", "3\n", "exact"),
        ("3", "3\n", "lines"),
        (" 1 2 \r\n\n3", "1 2\n3\n", "lines"),
        ("1  2", "1 2", "float"),  # the same words
        ("0.3333333", "0.33333333333", "float"),
        ("3.0", "3", "float"),
        ("1e3 YES", "1000.0 YES", "float"),
        ("0.000000001", "0", "float"),  # 1e-9 < 1e-5 / 1000
        ("2 1\n3", "3\n1 2", "set"),
        ("inf", "inf", "exact"),
        ("", "", "exact"),
        ("\n", "", "lines"),
        ("4", "3", None),
        ("1000001", "1000000", None),  # whole numbers are never close, 1e-6 apart as they are
        ("100000000000000000.0", "100000000000000001", None),  # not even as floats
        ("100000000000000001.0", "100000000000000001", "float"),
        ("1e17", "100000000000000001", None),
        ("1000000.0000001", "1000000", "float"),
        ("1000001.0", "1000000", None),
        ("1" + "0" * 5000, "1" + "0" * 5000, "exact"),
        ("1e5000", "1" + "0" * 4999 + "1", None),
        ("3" + "\n" * 10_000, "3", None),  # far too long
        ("0.3334", "0.3333", None),
        ("nan", "1.0", None),
        ("1e999", "1.0", None),
        ("1 2 2", "2 1 1", None),  # a set, but not one without numbers of times
        ("1 2", "1\n2", None),  # other lines
        ("3\n3", "3", None),
        ("", "3", None),
        ("yes", "YES", None),
    ],
)
def test_printed(printed, expected, least):
    case = CodeCase("", expected, ("", expected))
    assert levels(least) == [Comparison(level).printed(printed, case) for level in COMPARISONS]


@pytest.mark.parametrize(
    ("answer", "expected", "least"),
    [
        ("3", 3, "exact"),
        ("[1,2]", [1, 2], "exact"),
        ('{"1":[2]}', {"1": [2]}, "exact"),
        ('"3"', "3", "exact"),
        ("null", None, "exact"),
        ("3.0", 3, "exact"),
        ("[0.30000000000000004]", [0.3], "float"),
        ('{"a":[1.0000001]}', {"a": [1.0]}, "float"),
        ("NaN", float("nan"), "float"),
        ("[2,1,2]", [1, 2, 2], "set"),
        ('[{"b":1,"a":2},[0]]', [[0], {"a": 2, "b": 1}], "set"),
        ("3", "3", None),
        ("[1,2,2]", [1, 1, 2], None),
        ("[[2,1]]", [[1, 2]], None),  # only the outermost list may be in any order
        ("1000001", 1000000, None),
        ("1e17", 10**17 + 1, None),
        ("[100000000000000001]", [10**17 + 1], "exact"),
        ("[2.9999999999]", [3], "float"),
        ("[[3],2.5]", [[3.0], 2.5], "exact"),
        ('{"a":1}', {"b": 1}, None),
        ("1e400", 1.5, None),
        ("Infinity", 10**400, None),
        ('{"lightppo.set":[2,1]}', [1, 2], "set"),  # a set is no list
        ('[{"lightppo.set":[2]}]', [[2]], None),
        ("", 3, None),
        ("[", [], None),
        ("[" * 5000, [], None),
        ("3 " * 5000, 3, None),
    ],
)
def test_returned(answer, expected, least):
    case = CodeCase("[]", [expected], ("", ""))
    assert levels(least) == [Comparison(level).returned(answer, case) for level in COMPARISONS]


# --- verdicts of the sandbox


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    if sys.platform != "linux":
        pytest.skip("sandboxes need Linux")
    try:
        made = SandboxPool(
            SandboxLimits(code_timeout=20.0, code_memory_limit_mb=256), code_processes=2
        )
    except SandboxRefusedError as error:
        pytest.skip(str(error))
    with made:
        yield made


def verdict_of(
    pool: SandboxPool, code: str, tests: Any, *, ends: bool = False, total: float = 60.0
) -> CodeVerdict:
    verifier = SandboxVerifier(pool, total_seconds=total)
    return verifier.verify(code, find_tests(make_prompt(tests)), first_failure_ends=ends)


SCRIPTS = {
    "right": ("a, b = map(int, input().split())\nprint(a + b)", [True, True, True]),
    "right, in main": (
        "def main(): print(sum(map(int, input().split())))\nif __name__ == '__main__': main()",
        [True] * 3,
    ),
    "wrong for one": (
        "print(sum(int(x) for x in input().split() if x != '-1'))",
        [True, True, False],
    ),
    "ends with an error": (
        "print(sum(map(int, input().split())))\nraise SystemExit(1)",
        [False] * 3,
    ),
    "leaves before": ("import sys\nsys.exit(0)", [False] * 3),
    "leaves at once": ("import os\nos._exit(0)", [False] * 3),
    "a forged verdict": ("print('{\"passed\": true}')\nprint('PASS')", [False] * 3),
    "forged reports": (
        "import os\nfor n in range(3, 64):\n"
        '    try: os.write(n, b\'{"ended":"exit","stdout":"3"}\')\n    except OSError: pass',
        [False] * 3,
    ),
    "no output": ("pass", [False] * 3),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(pool, name):
    code, passed = SCRIPTS[name]
    verdict = verdict_of(pool, code, ADD)
    assert (verdict.passed, verdict.timeouts, verdict.compile_error) == (passed, 0, False)


@pytest.mark.parametrize(("compare", "passed"), [("float", [False, True]), ("set", [True, True])])
def test_a_returned_set_is_no_list(pool, compare, passed):
    tests = {"fn_name": "f", "inputs": ["true", "false"], "outputs": ["[2, 1]", "[2, 1]"]}
    code = "def f(a): return {1, 2} if a else (2, 1)"
    verifier = SandboxVerifier(pool, Comparison(code_compare=compare))
    verdict = verifier.verify(code, find_tests(make_prompt(tests)), first_failure_ends=False)
    assert verdict.passed == passed


FUNCTIONS = {
    "right": ("def add(a, b): return a + b", [True, True, True]),
    "a method": (
        "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b",
        [True, True, True],
    ),
    "wrong for one": ("def add(a, b): return abs(a) + b", [True, True, False]),
    "an exception for one": (
        "def add(a, b): return a + b if a != 3 else 1 / 0",
        [True, False, True],
    ),
    "dies in one": (
        "import os\ndef add(a, b): return a + b if a != 3 else os._exit(0)",
        [True, False, True],
    ),
    "leaves while loading": ("import sys\ndef add(a, b): return a + b\nsys.exit(0)", [False] * 3),
    "prints all the time": (
        "def add(a, b):\n    print('noise')\n    return a + b",
        [True, True, True],
    ),
    "no function": ("def sub(a, b): return a - b", [False] * 3),
    "equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "def add(a, b): return Any(42)",
        [False] * 3,
    ),
    "an object that is no data": ("def add(a, b): return object()", [False] * 3),
    "patched tools": (
        "import builtins, json, operator\njson.dumps = lambda *a, **k: '{\"value\":true}'\n"
        "builtins.all = builtins.any = lambda *a: True\ndef add(a, b): return None",
        [False] * 3,
    ),
    "forged answers": (
        "import os\ndef add(a, b):\n"
        '    os.write(3, b\'{"passed":true}\\n{"value":true}\\n{"score":1}\\n\')\n    os._exit(0)',
        [False] * 3,
    ),
    "looks for the answers": (
        "import gc, sys\ndef add(a, b):\n"
        "    found = [o for o in gc.get_objects() if isinstance(o, dict) and 'outputs' in o]\n"
        "    frame, names = sys._getframe(), set()\n"
        "    while frame:\n        names |= {k for k, v in frame.f_locals.items() if v == ['3', '7', '0']}\n"
        "        frame = frame.f_back\n    return a + b if found or names else 'nothing'",
        [False] * 3,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(pool, name):
    code, passed = FUNCTIONS[name]
    verdict = verdict_of(pool, code, ADD_CALLS)
    assert (verdict.passed, verdict.timeouts, verdict.compile_error) == (passed, 0, False)


@pytest.mark.parametrize("tests", [ADD, ADD_CALLS])
def test_no_python(pool, tests):
    verdict = verdict_of(pool, "def add(a, b) return", tests)
    assert not any(verdict.passed)
    assert verdict.compile_error


def test_the_end_of_all_time(pool):
    """The first test takes all of it: it and the two that are left count as timed out."""
    verdict = verdict_of(pool, "while True: pass", ADD, total=0.3)
    assert (verdict.passed, verdict.timeouts) == ([False], 3)
    verdict = verdict_of(
        pool, "def add(a, b):\n    while a == 3: pass\n    return a + b", ADD_CALLS, total=1.5
    )
    assert (verdict.passed, verdict.timeouts) == ([True, False], 2)
    verdict = verdict_of(pool, "while True: pass", ADD_CALLS, total=0.3)
    assert (verdict.passed, verdict.timeouts) == ([False] * 3, 3)


def test_every_test_counts_but_one_too_late_ends(pool):
    verdict = verdict_of(
        pool, "a, b = map(int, input().split())\nprint(a + b if a > 1 else 0)", ADD, ends=True
    )
    assert verdict.passed == [False, True, True]
    verdict = verdict_of(pool, "while True: pass", ADD, ends=True, total=0.3)
    assert (verdict.passed, verdict.timeouts) == ([False], 1)


def test_floods_are_cut(pool):
    """The most that a right program may write is little, and no more than that is read."""
    tracemalloc.start()
    assert verdict_of(pool, "print('\\n' * (8 << 20))", ADD).passed == [False] * 3
    code = "import os\ndef add(a, b):\n    if a == 3: os.write(3, b'\\n' * (1 << 20))\n    return a + b"
    # its lines stand for answers
    assert verdict_of(pool, code, ADD_CALLS).passed == [True, False, False]
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_large_whole_numbers(pool):
    tests = {"inputs": ["5000"], "outputs": ["1" + "0" * 5000]}
    assert verdict_of(pool, "print(10**int(input()))", tests).passed == [True]
    assert verdict_of(pool, "def f(n): return 10**n", tests | {"fn_name": "f"}).passed == [True]


def test_large_inputs_and_outputs(pool):
    numbers = "\n".join(map(str, range(200_000)))
    tests = {"inputs": [f"200000\n{numbers}\n"], "outputs": [numbers]}
    code = "import sys\ndata = sys.stdin.read().split()\nprint('\\n'.join(data[1:]))"
    assert verdict_of(pool, code, tests).passed == [True]


# --- scores


class Verdicts:
    """Programs are the verdicts: a share of passed tests, or how the verifier fails."""

    concurrency = 4

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.closed = False

    def verify(self, code: str, tests: CodeTests, *, first_failure_ends: bool) -> CodeVerdict:
        self.asked.append((code, first_failure_ends))
        if code == "broken":
            raise SandboxError("the sandbox failed twice")
        n = int(code)
        return CodeVerdict(
            [True] * n + [False] * (len(tests.cases) - n), timeouts=3 - n, compile_error=n == 0
        )

    def close(self) -> None:
        self.closed = True


def test_share_of_tests():
    reward = CodeReward(Verdicts(), code_score="share")
    output = reward.score(
        [make_rollout(fenced(code)) for code in ("3", "2", "0")] + [make_rollout("no code")]
    )
    assert output.scores == [1.0, pytest.approx(2 / 3), 0.0, 0.0]
    assert output.metrics == {
        "pass_share": [1.0, pytest.approx(2 / 3), 0.0, 0.0],
        "timeouts": [0.0, 1.0, 3.0, 0.0],
        "compile_errors": [0.0, 0.0, 1.0, 0.0],
        "no_code": [0.0, 0.0, 0.0, 1.0],
        "failures": [0.0, 0.0, 0.0, 0.0],
    }


def test_all_tests():
    verifier = Verdicts()
    output = CodeReward(verifier).score([make_rollout(fenced(code)) for code in ("3", "2", "0")])
    assert output.scores == [1.0, 0.0, 0.0]
    assert all(first_failure_ends for _, first_failure_ends in verifier.asked)


def test_a_failed_verifier_is_no_score():
    rollouts = [make_rollout(fenced(code)) for code in ("3", "broken", "0")]
    output = check_output(CodeReward(Verdicts()).score(rollouts), rollouts, "code")
    assert output.scores == [1.0, None, 0.0]
    assert output.metrics["failures"] == [0.0, 1.0, 0.0]
    assert output.metrics["pass_share"] == [1.0, None, 0.0]


def test_a_failed_verifier_is_an_error_where_asked():
    reward = CodeReward(Verdicts(), on_reward_failure="error")
    with pytest.raises(RewardError, match=r"code: 1 of 2 .*sample 1 "):
        reward.score([make_rollout(fenced("3")), make_rollout(fenced("broken"))])


def test_a_verifier_that_always_fails_is_an_error():
    with pytest.raises(RewardError, match="code: 2 of 2 "):
        CodeReward(Verdicts()).score(
            [make_rollout(fenced("broken")), make_rollout(""), make_rollout(fenced("broken"))]
        )


def test_a_row_without_tests_is_an_error():
    prompt = make_prompt({"inputs": [], "outputs": []}, index=7)
    with pytest.raises(RewardError, match=r"code: sample 1 \(prompt row 7, .*0 inputs"):
        CodeReward(Verdicts()).score(
            [make_rollout(fenced("3")), make_rollout(fenced("3"), prompt=prompt)]
        )


def test_no_samples():
    assert CodeReward(Verdicts()).score([]).scores == []


def test_programs_run_side_by_side():
    class Meeting(Verdicts):
        """Nobody leaves before two are there."""

        barrier = threading.Barrier(2)

        def verify(self, code, tests, *, first_failure_ends):
            self.barrier.wait(120)
            return CodeVerdict([True] * 3)

    assert (
        CodeReward(Meeting()).score([make_rollout(fenced(code)) for code in "abcd"]).scores
        == [1.0] * 4
    )


def test_most_tests_and_own_extraction():
    reward = CodeReward(
        Verdicts(), code_score="share", code_max_tests=2, extract=lambda response: response[-1]
    )
    assert reward.score([make_rollout("the answer is 1")]).scores == [0.5]


def test_close():
    verifier = Verdicts()
    CodeReward(verifier).close()
    assert verifier.closed


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        (partial(CodeReward, Verdicts()), "code_score", "some"),
        (partial(CodeReward, Verdicts()), "code_max_tests", 0),
        (partial(CodeReward, Verdicts()), "on_reward_failure", "zero"),
        (Comparison, "code_compare", "fuzzy"),
    ],
)
def test_options_out_of_range(make, option, value):
    with pytest.raises(ValueError, match=f"--{option}"):
        make(**{option: value})


def test_the_whole_way(pool):
    """Real responses, real programs: right, wrong, hostile, none."""
    reward = CodeReward(SandboxVerifier(pool), code_score="share")
    responses = [
        fenced("print(sum(map(int, input().split())))"),
        fenced("print(3)"),
        fenced("import os\nos.kill(os.getppid(), 9)\nprint(3 if input() == '1 2' else 7)"),
        "I do not know.",
    ]
    rollouts = [make_rollout(response) for response in responses]
    output = check_output(reward.score(rollouts), rollouts, reward.name)
    assert output.scores == [1.0, pytest.approx(1 / 3), 0.0, 0.0]
    assert output.metrics["no_code"] == [0.0, 0.0, 0.0, 1.0]
