"""Looking a name up in one of the explicit tables (estimators, losses, aggregation modes), with a helpful refusal."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

Entry = TypeVar("Entry")


def lookup(table: Mapping[str, Entry], name: str, flag: str) -> Entry:
    """The entry called ``name``.

    Args:
        table: the explicit table of names.
        name: what the user asked for.
        flag: the command-line flag that sets it, for the message (``--advantage_estimator``).

    Raises:
        ValueError: unknown name; the message gives the nearest name and all names.
    """
    if name in table:
        return table[name]
    near = get_close_matches(str(name), list(table), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{flag}: unknown name {name!r}.{hint} Known names: {', '.join(table)}.")
