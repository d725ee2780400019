"""A value and the type of its option: named in words, checked, brought into the type where nothing is lost."""

import dataclasses
import math
import os
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

_ONE = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "None"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}
_UNFIT = object()


def kind_of(field: dataclasses.Field) -> Any:
    """The type an option was declared with, without what the command line adds to it."""
    return get_args(field.type)[0]


def alternatives(kind: Any) -> tuple[Any, ...]:
    """``int | None`` → ``(int, NoneType)``; a type that is no union is its only alternative."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def in_words(kind: Any) -> str:
    """``tuple[str, ...] | None`` → ``"a list of texts or None"``."""
    if len(kinds := alternatives(kind)) > 1:
        return " or ".join(map(in_words, kinds))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        return f"a list of {_MANY[inner[0]]}" if Ellipsis in inner else f"{len(inner)} {_MANY[inner[0]]}"
    return _ONE[kind]


def conform(value: Any, kind: Any) -> Any:
    """``value`` in the type ``kind``.

    Lists become tuples, a lone value a tuple of one where any number may be given, paths text, and whole numbers count
    as int or float as needed. So does the text of a number: YAML reads ``1e-6`` as text.

    Raises:
        TypeError: if the value is of another type, or NaN; says what it must be.
    """
    for alternative in alternatives(kind):
        if (result := _as(value, alternative)) is not _UNFIT:
            return result
    raise TypeError(f"must be {in_words(kind)}, not {value!r}")


def _as(value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if choice == value and type(choice) is type(value)), _UNFIT)
    if get_origin(kind) is tuple:
        return _as_tuple(value, get_args(kind))
    if kind in (int, float):
        return _as_number(value, kind)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if isinstance(value, kind) else _UNFIT


def _as_tuple(value: Any, kinds: tuple[Any, ...]) -> Any:
    any_number = Ellipsis in kinds
    if any_number and value is not None and not isinstance(value, (list, tuple)):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not (any_number or len(value) == len(kinds)):
        return _UNFIT
    entries = tuple(_as(entry, kinds[0]) for entry in value)
    return _UNFIT if _UNFIT in entries else entries


def _as_number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return _UNFIT
    for number in _readings(value):
        if kind is float and not math.isnan(number):
            return float(number)
        if kind is int and math.isfinite(number) and number == int(number):
            return int(number)
    return _UNFIT


def _readings(value: int | float | str) -> Iterator[int | float]:
    """The value as a number; text as int first, for a float cannot hold every int."""
    if not isinstance(value, str):
        yield value
        return
    for kind in (int, float):
        try:
            yield kind(value)
        except ValueError:
            continue
