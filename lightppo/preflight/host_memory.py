"""The memory of this host, and of this process."""

from __future__ import annotations

from pathlib import Path

import psutil


def host_bytes() -> int:
    """Of this machine, or of the container that this process is in."""
    sizes = [psutil.virtual_memory().total]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups, version 2 and 1
        try:
            sizes.append(int(Path("/sys/fs/cgroup", limit).read_text()))
        except (OSError, ValueError):  # no such file; "max"
            continue
    return min(sizes)


def library_bytes(ranks: int = 1) -> int:
    """Of this process; ranks of a host share what is mapped from files."""
    held = psutil.Process().memory_info()
    shared = getattr(held, "shared", 0)
    return held.rss - shared + shared // ranks
