"""What a program must do: test cases from a row of the data, the program in a response, and when an answer is right."""

from __future__ import annotations

import contextlib
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightppo.data.records import Prompt

COMPARISONS = ("exact", "lines", "float", "set")  # each accepts what those before it accept
_PYTHON_TAGS = ("", "python", "py", "python3")
_LONGEST_INT = 4000  # digits; longer ones are compared as text, which Python may refuse to convert
_FENCE = re.compile(r"([ \t]*)(`{3,})([^`]*)$")


class BadTestsError(ValueError):
    """A row without usable test cases; the message says what is missing."""


@dataclass(frozen=True)
class CodeCase:
    """One test case.

    Attributes:
        given: standard input; for calls the JSON list of the arguments.
        expected: the text to be printed; for calls the values that are right.
        raw: the row's own input and output, as text.
    """

    given: str
    expected: Any
    raw: tuple[str, str]


@dataclass(frozen=True)
class CodeTests:
    """All test cases of a row; ``function`` is None where programs read standard input."""

    function: str | None
    cases: tuple[CodeCase, ...]


def find_tests(prompt: Prompt, most: int | None = None) -> CodeTests:
    """The test cases of a row, in AReaL's form (``input_output``) or verl's (``reward_model.ground_truth``).

    Both are an object, or its JSON, with ``inputs``, ``outputs`` and optionally ``fn_name``. A label of that form is
    taken too.

    Args:
        prompt: the row.
        most: number of cases to take, from the first.

    Raises:
        BadTestsError: none of these, or one that does not fit together.
    """
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
    """Arguments: one line of JSON each, or a list. Value: JSON, or itself, or itself in a list of one."""
    if isinstance(given, str):
        try:
            arguments = [_load(line) for line in given.split("\n") if line.strip()]
        except (ValueError, RecursionError) as error:
            raise BadTestsError(f"{place}: an input is not one JSON value a line: {error}") from None
    else:
        arguments = list(given) if isinstance(given, (list, tuple)) else [given]
    values = [expected]
    if isinstance(expected, str):
        with contextlib.suppress(ValueError, RecursionError):  # then it is a plain text
            values = [_load(expected)]
    elif isinstance(expected, list) and len(expected) == 1:
        values.append(expected[0])
    raw = (given if isinstance(given, str) else "\n".join(map(json.dumps, arguments)), _text_of_value(expected))
    return CodeCase(json.dumps(arguments), values, raw)


def _text_of_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def last_program(response: str) -> str | None:
    """The last fenced block of a response that is tagged as Python, or not tagged; None where there is none.

    Blocks inside ``<think>…</think>`` do not count, nor does one that was never closed.
    """
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


def printed_right(printed: str, expected: str, *, compare: str, tolerance: float) -> bool:
    """Whether a program printed what it had to.

    Args:
        printed: its standard output.
        expected: the test's output.
        compare: the laxest comparison that counts:

            - ``exact``: the same text;
            - ``lines``: the same lines, without spaces around them and without empty ones;
            - ``float``: the same words per line, where two numbers that are not both whole may differ by
              ``tolerance`` relative to the expected one, plus a thousandth of that;
            - ``set``: the same lines in any order, with the same words in any order.
        tolerance: of ``float``.
    """
    level = COMPARISONS.index(compare)
    if printed == expected:
        return True
    ours, theirs = ([line.strip() for line in text.split("\n") if line.strip()] for text in (printed, expected))
    if level == 0 or len(ours) != len(theirs):
        return False
    if ours == theirs:
        return True
    our_words, their_words = ([line.split() for line in lines] for lines in (ours, theirs))
    if level >= COMPARISONS.index("float") and _close_words(our_words, their_words, tolerance):
        return True
    return level >= COMPARISONS.index("set") and _bag(our_words) == _bag(their_words)


def _bag(lines: Sequence[Sequence[str]]) -> Counter[tuple[str, ...]]:
    return Counter(tuple(sorted(words)) for words in lines)


def _close_words(ours: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]], tolerance: float) -> bool:
    return all(
        len(a) == len(b) and all(x == y or _close_texts(x, y, tolerance) for x, y in zip(a, b))
        for a, b in zip(ours, theirs)
    )


def _close_texts(ours: str, theirs: str, tolerance: float) -> bool:
    if all(word.removeprefix("-").isdecimal() for word in (ours, theirs)):
        return False  # whole numbers are right or wrong
    try:
        return _close(float(ours), float(theirs), tolerance)
    except ValueError:
        return False


def _close(ours: float, theirs: float, tolerance: float) -> bool:
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return ours == theirs or (math.isnan(ours) and math.isnan(theirs))
    return abs(ours - theirs) <= tolerance * abs(theirs) + tolerance / 1000


def returned_right(answer: str, expected: Sequence[Any], *, compare: str, tolerance: float) -> bool:
    """Whether a function returned what it had to.

    Args:
        answer: the JSON of its value; tuples are lists there.
        expected: the values that are right.
        compare: as in :func:`printed_right`; here ``exact`` and ``lines`` mean equal, and ``set`` allows any order of
            the outermost list.
        tolerance: of ``float``.
    """
    # an answer far longer than the expected one is wrong: not worth the memory
    if len(answer) > 32 * max(len(json.dumps(value)) for value in expected) + 1024:
        return False
    try:
        value = _load(answer)
        return any(_equal(value, _load(json.dumps(right)), compare, tolerance) for right in expected)
    except (ValueError, RecursionError, OverflowError):
        return False


def _equal(ours: Any, theirs: Any, compare: str, tolerance: float) -> bool:
    if ours == theirs:
        return True
    level = COMPARISONS.index(compare)
    if level >= COMPARISONS.index("float") and _close_values(ours, theirs, tolerance):
        return True
    if level < COMPARISONS.index("set") or not (isinstance(ours, list) and isinstance(theirs, list)):
        return False
    bags = (Counter(json.dumps(item, sort_keys=True) for item in items) for items in (ours, theirs))
    return next(bags) == next(bags)


def _close_values(ours: Any, theirs: Any, tolerance: float) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(_close_values(a, b, tolerance) for a, b in zip(ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_close_values(ours[key], theirs[key], tolerance) for key in ours)
    numbers = isinstance(ours, (int, float)) and isinstance(theirs, (int, float))
    if numbers and not (isinstance(ours, int) and isinstance(theirs, int)):
        return _close(float(ours), float(theirs), tolerance)
    return ours == theirs
