"""The cache of this node: copies that can be made again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "LIGHTPPO_CACHE"


def cache_folder() -> Path:
    """Where this node keeps copies that can be made again."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "lightppo")


def in_cache(kind: str, key: Any, name: str, cache_dir: str | Path | None = None) -> Path:
    """A place in this node's cache."""
    return (
        Path(cache_dir or cache_folder())
        / kind
        / hashlib.sha256(repr(key).encode()).hexdigest()[:24]
        / name
    )


def made_once(
    target: Path, make: Callable[[Path], object], what: str, timeout_s: float = 3600.0
) -> Path:
    """A file or folder that the first process that comes makes, whole or not at all; others wait. It stays."""
    from filelock import FileLock, Timeout

    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return target
    lock = FileLock(target.parent / ".lock", timeout=timeout_s)
    try:
        with lock.acquire(poll_interval=0.5):
            if not target.exists():
                make(target)
    except Timeout as error:
        waited = f"another process on this node has been at it for over {timeout_s:g} s"
        raise TimeoutError(f"{what}: {waited}; see its log (lock {lock.lock_file})") from error
    return target
