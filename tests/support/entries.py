"""Tables of plugins that lack something for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightppo.table import Table


@contextmanager
def left_out(table: Table, *names: str) -> Iterator[None]:
    """A table without some of its entries, which are in their places again afterwards: order counts."""
    whole = dict(table)
    for name in names:
        del table[name]
    try:
        yield
    finally:
        table.clear()
        table.update(whole)
