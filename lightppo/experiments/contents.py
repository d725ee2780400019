"""Files and folders that options name: a mark of what is in them, so that results of other files are not mixed.

They are known before a run begins; its own marks (``run_folder.content_of``) need its rows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightppo.files import blocks_of, digest
from lightppo.logging.run_paths import MODELS, RECORDS, TOKENIZERS, read_paths
from lightppo.storage import is_url

_WHOLE = 1 << 20  # bytes of a file in a folder up to which all of it counts


def marks_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the mark of each file and folder of this machine that options name, by ``--flag path``."""
    names = [f"{flag} {path}" for flag, path in read_paths(options) if flag != "--resume"]
    marks = {name: mark_now(name) for name in names if not is_url(name.partition(" ")[2])}
    return {name: mark for name, mark in marks.items() if mark is not None}


def mark_now(name: str) -> str | None:
    """Return the mark of ``--flag path``; None where there is nothing."""
    flag, _, path = name.partition(" ")
    return mark_of(Path(path).expanduser(), flag.removeprefix("--") in (*MODELS, *TOKENIZERS))


def mark_of(path: Path, is_model: bool = False) -> str | None:
    """Return a mark of what a file or folder holds; None where there is neither.

    Of a folder these count: the names and lengths of its files, all of small ones, and 16 blocks of 64 KiB of those above
    1 MiB, such as weights. So it is cheap for any model, and a copy has the same mark: times do not count. Neither do
    folders in the folder of a model, such as checkpoints, nor hidden files and what a run records beside its model.
    """
    if path.is_file():
        stat = path.stat()
        return _mark_of_file(path, stat.st_size, stat.st_mtime_ns)
    if not path.is_dir():
        return None
    total = hashlib.sha256()
    for file in sorted(path.glob("*" if is_model else "**/*")):
        if file.is_file() and not file.name.startswith(".") and file.name not in RECORDS:
            size = file.stat().st_size
            total.update(f"{file.relative_to(path)} {size}\n".encode())
            for block in [file.read_bytes()] if size <= _WHOLE else blocks_of(file):
                total.update(block)
    return total.hexdigest()


@functools.cache  # many members read the same rows
def _mark_of_file(path: Path, size: int, time: int) -> str | None:
    return digest(path).sha256
