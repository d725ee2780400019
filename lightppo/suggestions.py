"""What a user may have meant by a name that does not exist."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

ASKED: dict[str, str] = {}
"""Where a plugin has a function that knows more: ``"module:name"`` for ``nearest`` and ``wrong_value``."""


def nearest(name: str, known: Iterable[str], kind: str = "") -> str:
    """What an unknown name may have meant, such as ``" (did you mean 'x'?)"``; an empty string if nothing is close.

    Args:
        name: as the user wrote it.
        known: the names that exist.
        kind: what the names are: ``"option"`` or ``"word"`` of a command line, ``"key"`` of a file, ``"command"``, or
            the option whose values they are.
    """
    if "nearest" in ASKED:
        return asked("nearest", name, known, kind)
    found = get_close_matches(name, list(known))
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def wrong_value(option: Any, value: Any, error: ValueError) -> str:
    """The message about a value that an option does not take; an empty string if nobody knows more than the error."""
    return asked("wrong_value", option, value, error) if "wrong_value" in ASKED else ""


def asked(function: str, *arguments: Any) -> str:
    """What the plugin's function says."""
    module, _, name = ASKED[function].partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)
