"""Values of options for tests over all of them."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from lightppo.option import Option


def other_value(option: Option, text: str = "other") -> Any:
    """A value of the option's type and range that is not its default, with ``text`` wherever there is text."""
    kind, bounds = option.kind, option.bounds
    if option.names is not None:
        return next(name for name in option.names if name != option.default)
    if kind is bool:
        return not option.default
    if kind is str:
        return text
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if option.is_set(choice))
    if get_origin(kind) is tuple:
        entry = get_args(kind)[0]
        return {str: (text, "b"), int: (1, 7), float: (0.125, 0.75)}[entry]
    if kind is int:
        return int(bounds.get("ge", 0)) + 12345
    low, high = bounds.get("ge", bounds.get("gt", 0.0)), bounds.get("le", bounds.get("lt", 2.0))
    return low + (high - low) * 1 / 3  # a third has no short decimal
