"""Options of scripts in the seed's style, which are attributes of ``strategy.args``."""

from __future__ import annotations

from typing import Any


def setting(strategy: Any, name: str, given: Any, default: Any = None) -> Any:
    """The keyword if given, else ``strategy.args.<name>`` (scripts in the seed's style), else the default."""
    values = (given, getattr(getattr(strategy, "args", None), name, None), default)
    return next((value for value in values if value is not None), None)
