"""An option in words: its type, its range, its choices and its default."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from lightppo.option import Option, alternatives

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_ONE = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "None",
}
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}


def range_text(option: Option) -> str:
    """Such as ``≥0 ≤1``."""
    return " ".join(f"{_BOUNDS[key]}{_shown_bound(bound)}" for key, bound in option.bounds.items())


def _shown_bound(bound: float) -> str:
    """A number, or the power of two that it is."""
    power = bound.bit_length() - 1 if isinstance(bound, int) else 0
    return f"2^{power}" if power > 20 and bound == 2**power else f"{bound:g}"


def choices(option: Option) -> list[Any]:
    """The values to choose from, or the names; none: any of its type."""
    if option.names is None:
        return [*get_args(option.kind)] if get_origin(option.kind) is Literal else []
    is_another = isinstance(option.default, str) and option.default not in option.names
    return [option.default, *option.names] if is_another else [*option.names]


def type_text(option: Option) -> str:
    """The type in words: ``a list of texts or None``."""
    if option.names is None:
        return _in_words(option.type)
    names = choices(option) + ["path.py:name"] * option.names.takes_files
    return f"one of {', '.join(names)}" + (" or None" if option.may_be_none else "")


def _in_words(kind: Any) -> str:
    if len(kinds := alternatives(kind)) > 1:
        return " or ".join(map(_in_words, kinds))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        many = _MANY[inner[0]]
        return f"a list of {many}" if Ellipsis in inner else f"{len(inner)} {many}"
    return _ONE[kind]


def shown_default(value: Any) -> str:
    """A default as ``--help`` and docs/flags.md write it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) if value else "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
