"""Tools: schemas of types and docstrings, the check of arguments."""

from __future__ import annotations

import enum
import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from transformers.utils import get_json_schema

from lightppo.episodes.tools import BadCall, Tool, text_of
from lightppo.errors import ConfigError


def tool(function, **options) -> Tool:
    return Tool(function.__name__, function, where=f"env.py:{function.__name__}", **options)


def properties(function) -> dict[str, Any]:
    return tool(function).schema()["function"]["parameters"]["properties"]


def plain(
    x: int, names: list[str], choice: Literal["a", "b"], more: dict[str, float] | None = None
) -> str:
    """
    Does a thing.
    On two lines.

    Args:
        x: A number, which
            goes on.
        names: Some names.
        choice: One of (choices: ["a", "b"])
        more: More.

    Returns:
        What it did.
    """


def test_what_transformers_takes_is_as_it_gives_it():
    assert tool(plain).schema() == get_json_schema(plain)


def test_methods():
    class Env:
        def look(self, where: str) -> str:
            """Look. Args: where: a place"""

    schema = Tool("look", Env.look, where="Env.look", is_method=True).schema()
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"where": {"type": "string", "description": "a place"}},
        "required": ["where"],
    }


def one_line(x: int, y: float = 1.0) -> str:
    """Guess a number.  Args: x: your number. y (float): the weight: a float, Returns: a word."""


def typed(x: int, y: float = 1.0) -> str:
    """Guess a number.

    Args:
        x (int): your number.
        y (float, optional): the weight:
            a float
    """


def parameters_section(x: int, y: float = 1.0) -> str:
    """Guess a number.

    Parameters:
        x: your number.
        y: the weight: a float
    """


@pytest.mark.parametrize("function", [one_line, typed, parameters_section])
def test_docstrings_that_transformers_does_not_read(function):
    schema = tool(function).schema()["function"]
    assert schema["description"] == "Guess a number."
    assert schema["parameters"]["properties"] == {
        "x": {"type": "integer", "description": "your number."},
        "y": {"type": "number", "description": "the weight: a float"},
    }
    assert schema["parameters"]["required"] == ["x"]
    if function is one_line:
        assert schema["return"] == {"type": "string", "description": "a word."}


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    colour: Colour = Colour.RED


def rich(colour: Colour, point: Point, share: Annotated[float, Field(ge=0, le=1)]) -> Point:
    """Paint. Args: colour: which. point: where. share: how much."""


def test_types_of_the_user():
    found = properties(rich)
    assert found["colour"]["enum"] == ["red", "blue"]
    assert found["colour"]["description"] == "which."
    assert found["point"]["properties"]["colour"]["enum"] == ["red", "blue"]
    assert "$ref" not in json.dumps(found)
    assert found["share"]["maximum"] == 1
    given = {"colour": "blue", "point": {"x": "3"}, "share": "0.5"}
    assert tool(rich).check(given) == {"colour": Colour.BLUE, "point": Point(x=3), "share": 0.5}
    with pytest.raises(BadCall, match="share"):
        tool(rich).check(given | {"share": 2})
    with pytest.raises(BadCall, match=r"argument point\.x"):
        tool(rich).check(given | {"point": {"x": "no"}})


def no_docstring(x: int): ...


def no_description(x: int, y: int):
    """Adds. Args: x: a number."""


def no_type(x, y: int):
    """Adds. Args: x: a number. y: another."""


def by_position(x: int, /):
    """Adds. Args: x: a number."""


def any_number(*x: int):
    """Adds. Args: x: numbers."""


def unknown_type(x: NoSuchType):  # noqa: F821
    """Adds. Args: x: a number."""


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (no_docstring, 'env.py:no_docstring has no docstring.*Args: x: what it is."""'),
        (no_description, "does not describe y.*Args: x: what it is, y: what it is"),
        (no_type, "argument x has no type; write x: int"),
        (by_position, "by name, so x: "),
        (any_number, r"by name, so \*x: "),
        (unknown_type, "types cannot be read: NameError.*NoSuchType"),
    ],
)
def test_what_to_write_instead(function, text):
    with pytest.raises(ConfigError, match=text):
        tool(function).schema()


def arguments(
    whole: int = 0,
    number: float = 0,
    text: str = "",
    yes: bool = False,
    items: list[int] = [],  # noqa: B006
    table: dict[str, int] = {},  # noqa: B006
    maybe: int | None = None,
    choice: Literal["a", 2] = "a",
    anything: Any = None,
    bare=None,
) -> str: ...


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("whole", 3, 3), ("whole", "3", 3), ("whole", " 3 ", 3), ("whole", 3.0, 3), ("number", "2.5", 2.5),
        ("number", 3, 3.0), ("text", "3", "3"), ("text", 3, "3"), ("yes", "true", True),
        ("items", [1, "2"], [1, 2]), ("items", "[1, 2]", [1, 2]), ("table", '{"a": 1}', {"a": 1}),
        ("maybe", None, None), ("maybe", "4", 4), ("maybe", "null", None), ("choice", "a", "a"),
        ("choice", "2", 2), ("anything", [1], [1]), ("bare", "x", "x"),
    ],
)  # fmt: skip
def test_values_that_are_taken(name, given, taken):
    found = tool(arguments).check({name: given})[name]
    assert (found, type(found)) == (taken, type(taken))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("whole", 3.5), ("whole", "3.5"), ("whole", "three"), ("whole", None), ("whole", [3]), ("number", "much"),
        ("text", None), ("text", ["a"]), ("yes", "perhaps"), ("items", "1, 2"), ("items", ["a"]), ("table", "[1]"),
        ("choice", "c"), ("maybe", "x"), ("items", "[" * 100_000),
    ],
)  # fmt: skip
def test_values_that_are_refused(name, given):
    with pytest.raises(BadCall, match=f"arguments: argument {name}") as caught:
        tool(arguments).check({name: given})
    assert len(str(caught.value)) < 400


def test_names():
    def named(x: int, y: int = 0): ...

    def others(x: int, **more): ...

    assert tool(named).check({"x": 1}) == {"x": 1}
    with pytest.raises(BadCall, match=r"missing argument x\. It takes x, y\."):
        tool(named).check({"y": 1})
    with pytest.raises(BadCall, match=r"unknown argument z\. It takes x, y\."):
        tool(named).check({"x": 1, "z": 1})
    with pytest.raises(BadCall, match="must be an object"):
        tool(named).check("x")
    assert tool(others).check({"x": "1", "z": "1"}) == {"x": 1, "z": "1"}


def test_results_as_text():
    parts = [{"type": "image", "image": 1}, {"type": "text", "text": "a cat"}]
    ours = [text_of(value, as_trl=False) for value in ("a", None, 1.5, {"ä": [1]}, {1, 2}, True)]
    assert ours == ["a", "", "1.5", '{"ä": [1]}', "{1, 2}", "true"]
    trls = [text_of(value, as_trl=True) for value in ("a", None, {"a": [1]}, [1, 2], parts)]
    assert trls == ["a", "None", "{'a': [1]}", "[1, 2]", "a cat"]
