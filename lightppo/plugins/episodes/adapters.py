"""Environments of other packages and trainers as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightppo.errors import ConfigError


def adapted(prefix: str, rest: str) -> tuple[Callable[[], Any], type, str]:
    """What ``--env PREFIX:REST`` makes, its class and its name."""
    raise ConfigError(f"--env {prefix}:{rest}")


def adapter_of(found: Any) -> tuple[Callable[[], Any], type, str] | None:
    """Maker, class and contract for a class of another style; ``None`` for one of ours or TRL's."""
    return None
