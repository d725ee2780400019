"""Files of this machine by their formats, and folders of them by split."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lightppo.data.file_formats import FORMATS
from lightppo.data.json_files import concatenate
from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError, StagingError
from lightppo.files import stage_to_local
from lightppo.redaction import shown_url

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

_COMPRESSED = (".gz", ".bz2", ".xz", ".zip")


SPLIT_WORDS = dict.fromkeys(("train", "training"), "train") | dict.fromkeys(
    ("test", "testing", "eval"), "test"
)
SPLIT_WORDS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")


def load_source(source: str, split: str, flag: str, limit: int | None = None) -> Dataset:
    """Load a file, or the files of a folder that fit the split; at most so many rows. DataError names the source."""
    try:
        path = Path(stage_to_local(source)).expanduser()
    except StagingError as error:
        raise DataError(f"{flag}: {error}") from error
    if not path.exists():
        raise DataError(f"{flag} {source}: no such file or folder (looked in {os.getcwd()})")
    shown = shown_url(source)
    parts = {}
    names = _files_of_split(path, shown, split, flag) if path.is_dir() else [""]
    for name in names:
        whole = f"{shown.rstrip('/')}/{name}" if name else shown
        part = read_file(path / name, shown_as=whole, limit=limit)
        limit = limit and limit - len(part)
        parts |= {whole: part} if len(part) else {}
        if limit == 0:
            break
    if not parts:
        raise DataError(f"{flag} {shown} is empty: no rows {' '.join(names)}".rstrip())
    return concatenate(list(parts.values()), list(parts))


def _files_of_split(path: Path, source: str, split: str, flag: str) -> list[str]:
    """Return data files with the split's name in their path as a word; for ``train`` else those that name none."""
    all_files = sorted(
        f.relative_to(path) for f in path.rglob("*") if f.is_file() and file_format(f)
    )
    files = [f for f in all_files if not any(part.startswith(".") for part in f.parts)]
    if not files:
        raise DataError(f"{flag} {source} has no data files ({', '.join(FORMATS)})")
    wanted = SPLIT_WORDS.get(split.lower(), split.lower())
    named = {f: split_named_by(f, split.lower()) for f in files}
    chosen = [f for f in files if named[f] == wanted]
    if not chosen and split == "train":
        chosen = [f for f in files if named[f] is None]
    if not chosen:
        listed = ", ".join(map(str, files[:10]))
        raise DataError(f"{flag} {source} has no file of the split {split!r}; its files: {listed}")
    ignored = [str(f) for f in files if f not in chosen]
    logger.info(
        "%s %s, split %s: %d files%s",
        flag,
        shown_url(source),
        split,
        len(chosen),
        f"; not {ignored}" if ignored else "",
    )
    return list(map(str, chosen))


def split_named_by(relative: Path, split: str) -> str | None:
    """Return the split that a file's path names; the file name goes before its folders."""
    for part in reversed(relative.parts):
        if re.search(rf"(?<![a-z0-9]){re.escape(split)}(?![a-z0-9])", part.lower()):
            return SPLIT_WORDS.get(split, split)
        for word in re.split(r"[^a-z0-9]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


def file_format(path: str | Path) -> str | None:
    """Return a file's format by its name (compression aside), such as ``.jsonl``, or None."""
    suffixes = [s.lower() for s in Path(path).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    if suffixes and suffixes[-1] in FORMATS:
        return suffixes[-1]
    return None


def known_format(path: str | Path, name: str) -> str:
    """Return :func:`file_format`, or raise DataError."""
    if (suffix := file_format(path)) is None:
        known = f"{', '.join(FORMATS)} (files of text also with {', '.join(_COMPRESSED)})"
        raise DataError(f"{name}: unknown format; the name must end in one of {known}")
    return suffix


def read_file(
    path: str | Path, *, shown_as: str | None = None, limit: int | None = None
) -> Dataset:
    """Read a local data file, by its format. Origins are ``file:line`` or ``file, row n`` (from 1); errors name them.

    ``shown_as`` replaces the path in errors and origins (by the URL, say).
    """
    from lightppo.data.exact_json import exactly_read

    name = shown_as or str(path)
    return exactly_read(with_origins(FORMATS[known_format(path, name)].fn(path, name, limit), name))


def with_origins(dataset: Dataset, name: str) -> Dataset:
    """Add the hidden column, unless the data has it already (a blend saved earlier)."""
    if ORIGIN_COLUMN in dataset.column_names:
        return dataset
    return dataset.add_column(ORIGIN_COLUMN, [f"{name}, row {i + 1}" for i in range(len(dataset))])
