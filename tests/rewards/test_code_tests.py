"""Programs in responses, test cases in rows, comparisons."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightppo.data.records import Prompt
from lightppo.rewards.code_tests import BadTestsError, find_tests, last_program, printed_right, returned_right

ADD = {"inputs": ["1 2\n", "3 4\n", "-1 1\n"], "outputs": ["3\n", "7\n", "0\n"]}
ADD_CALLS = {"fn_name": "add", "inputs": ["1\n2", "3\n4", "-1\n1"], "outputs": ["3", "7", "0"]}


def make_prompt(tests: Any, column: str = "input_output") -> Prompt:
    return Prompt("Add two numbers.", [1], extra={column: tests})


# --- programs in responses


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```", "a"),
        ("```py\na\n```\ntext\n```python3\nb\n```", "b"),
        ("```python\na\n```\nIt prints\n```text\n42\n```", "a"),  # another language is no program
        ("```python\na\n```\n```\nb\n```", "b"),
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
        Prompt("p", [1], label="def add(): …", extra={"input_output": ADD}),  # AReaL's rows have solutions too
    ],
)
def test_forms_of_rows(prompt):
    tests = find_tests(prompt)
    assert tests.function is None
    assert [(case.given, case.expected) for case in tests.cases] == list(zip(ADD["inputs"], ADD["outputs"]))


@pytest.mark.parametrize("function", ["", None])
def test_no_function_name_means_standard_input(function):
    assert find_tests(make_prompt(ADD | {"fn_name": function})).function is None


def test_lines_of_standard_input_may_be_a_list():
    case = find_tests(make_prompt({"inputs": [["1", "2"]], "outputs": [["3", 4]]})).cases[0]
    assert (case.given, case.expected) == ("1\n2", "3\n4")


@pytest.mark.parametrize(
    ("given", "expected", "arguments", "values"),
    [
        ("1\n[2, 3]", "[2]", [1, [2, 3]], [[2]]),  # AReaL's and verl's: JSON, one argument a line
        ([1, [2, 3]], [[2]], [1, [2, 3]], [[[2]], [2]]),  # a list of arguments; the value, or a list of it
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
    assert json.loads(tests.cases[0].given) == arguments
    assert tests.cases[0].expected == values


def test_numbers_too_long_for_python_to_print():
    """Python refuses to read whole numbers of more than 4300 digits."""
    long = "7" * 5000
    case = find_tests(make_prompt({"fn_name": "f", "inputs": ["1"], "outputs": [long]})).cases[0]
    assert returned_right(long, case.expected, compare="exact", tolerance=0)
    assert not returned_right(long[:-1] + "8", case.expected, compare="exact", tolerance=0)


def test_only_the_first_tests():
    assert len(find_tests(make_prompt(ADD), 2).cases) == 2


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (Prompt("p", [1]), "the row has none of input_output, reward_model.ground_truth"),
        (make_prompt("{"), "input_output is not JSON"),
        (make_prompt([1]), "must be an object"),
        (make_prompt({"inputs": ["1"]}), "must have the lists 'inputs' and 'outputs', has inputs"),
        (make_prompt({"inputs": ["1"], "outputs": []}), "1 inputs and 0 outputs"),
        (make_prompt({"inputs": [], "outputs": []}), "0 inputs"),
        (make_prompt(ADD | {"remote": True}), "remote"),
        (make_prompt(ADD_CALLS | {"inputs": ["1\nx", "1", "1"]}), "not one JSON value a line"),
    ],
)
def test_rows_without_tests_are_errors(prompt, problem):
    with pytest.raises(BadTestsError, match=problem):
        find_tests(prompt)


# --- comparisons


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
    levels = ("exact", "lines", "float", "set")
    right = [printed_right(printed, expected, compare=level, tolerance=1e-5) for level in levels]
    first = levels.index(least) if least else len(levels)
    assert right == [i >= first for i in range(len(levels))]


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
        ('{"a":1}', {"b": 1}, None),
        ("1e400", 1.5, None),
        ("Infinity", 10**400, None),
        ("", 3, None),
        ("[", [], None),
        ("[" * 5000, [], None),
        ("3 " * 5000, 3, None),
    ],
)
def test_returned(answer, expected, least):
    levels = ("exact", "lines", "float", "set")
    right = [returned_right(answer, [expected], compare=level, tolerance=1e-5) for level in levels]
    first = levels.index(least) if least else len(levels)
    assert right == [i >= first for i in range(len(levels))]
