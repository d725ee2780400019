"""From ``--prompt_data a.jsonl,folder`` to one dataset: files of JSON, and folders of them by split.

Other formats are in :data:`lightppo.plugin.FORMATS`, other sources come by :data:`lightppo.plugin.ROWS`. The hidden
column ``__origin__`` keeps each row's file and line, so that errors can name them.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError, StagingError
from lightppo.files import stage_to_local
from lightppo.plugin import FORMATS, ROWS
from lightppo.shown import shown_url

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Rows = Iterator[tuple[str, dict[str, Any]]]  # (origin, row)

_COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
SPLIT_WORDS = dict.fromkeys(("train", "training"), "train") | dict.fromkeys(
    ("test", "testing", "eval"), "test"
)
SPLIT_WORDS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")


# -- one dataset of several sources ----------------------------------------------------------------------------------


def read_rows(config: Any, name: str, split: str, strategy: Any) -> Dataset:
    """The rows of an option, such as ``prompt_data``, by the entry of ``ROWS`` that was registered last."""
    return next(reversed(ROWS.values())).fn(config, name, split, strategy)


def rows_of_files(config: Any, name: str, split: str, strategy: Any) -> Dataset:
    """Files and folders, one after the other."""
    flag, sources = f"--{name}", config.flat()[name].split(",")
    return concatenate([load_source(one.strip(), split, flag) for one in sources], sources)


def concatenate(parts: list[Dataset], names: list[str]) -> Dataset:
    """One dataset after the other. A missing column becomes None; columns of differing types become JSON."""
    from datasets import concatenate_datasets

    kinds: dict[str, list[Any]] = {}
    for part in parts:
        for column, feature in part.features.items():
            known = kinds.setdefault(column, [])
            if feature not in known and getattr(feature, "dtype", None) != "null":
                known.append(feature)
    mixed = [column for column, features in kinds.items() if len(features) > 1]
    return concatenate_datasets([_as_json(part, mixed, name) for part, name in zip(parts, names)])


def _as_json(dataset: Dataset, columns: list[str], name: str) -> Dataset:
    from datasets import Dataset, Features, Json, concatenate_datasets

    for column in columns:
        if not isinstance(dataset.features.get(column, Json()), Json):
            try:
                texts = _json_texts(list(dataset[column]))
                converted = Dataset.from_dict({column: texts}, features=Features({column: Json()}))
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"column {column!r} has another type in {name} than in the other sources, and cannot be held as "
                    f"JSON: {error}; convert it, or take it out"
                ) from error
            dataset = concatenate_datasets([dataset.remove_columns(column), converted], axis=1)
    return dataset


# -- one source ------------------------------------------------------------------------------------------------------


def load_source(source: str, split: str, flag: str, limit: int | None = None) -> Dataset:
    """A file, or the files of a folder whose names fit the split; at most so many rows. DataError names the source."""
    try:
        path = Path(stage_to_local(source)).expanduser()
    except StagingError as error:
        raise DataError(f"{flag}: {error}") from error
    if not path.exists():
        raise DataError(f"{flag} {source}: no such file or folder (looked in {os.getcwd()})")
    shown, parts = shown_url(source), {}
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
    """Data files whose name or folder has the split's name as a word; for ``train`` else files that name no split."""
    found = sorted(f.relative_to(path) for f in path.rglob("*") if f.is_file() and file_format(f))
    files = [f for f in found if not any(part.startswith(".") for part in f.parts)]
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
    """The split that a file's path names; the file name goes before its folders."""
    for part in reversed(relative.parts):
        if re.search(rf"(?<![a-z0-9]){re.escape(split)}(?![a-z0-9])", part.lower()):
            return SPLIT_WORDS.get(split, split)
        for word in re.split(r"[^a-z0-9]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


# -- one file --------------------------------------------------------------------------------------------------------


def file_format(path: str | Path) -> str | None:
    """A file's format by its name (compression aside), such as ``.jsonl``, or None."""
    suffixes = [s.lower() for s in Path(path).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def known_format(path: str | Path, name: str) -> str:
    """:func:`file_format`, or DataError."""
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
    name = shown_as or str(path)
    return with_origins(FORMATS[known_format(path, name)].fn(path, name, limit), name)


def read_json(path: str | Path, name: str, limit: int | None) -> Dataset:
    """JSON Lines, or a JSON array of objects; either may be compressed."""
    return dataset_of(json_rows(path, name), limit)


def with_origins(dataset: Dataset, name: str) -> Dataset:
    """Add the hidden column, unless the data has it already (a blend saved earlier)."""
    if ORIGIN_COLUMN in dataset.column_names:
        return dataset
    return dataset.add_column(ORIGIN_COLUMN, [f"{name}, row {i + 1}" for i in range(len(dataset))])


@contextmanager
def open_text(path: str | Path, name: str) -> Iterator[TextIO]:
    import fsspec

    # utf-8-sig: drops a byte order mark, which is not part of the first key. newline="": as the csv module requires.
    options = {"encoding": "utf-8-sig", "newline": "", "compression": "infer"}
    try:
        with fsspec.open(str(path), "rt", **options) as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text ({error})") from error


def json_rows(path: str | Path, name: str) -> Rows:
    """Rows of a JSON array or of JSON lines; the first character decides."""
    with open_text(path, name) as file:
        first = next((c for c in iter(lambda: file.read(1), "") if not c.isspace()), "")
        file.seek(0)
        if first == "[":
            values = _parsed(file.read(), name, lambda line: f"{name}:{line}")
            found = ((f"{name}, row {i}", value) for i, value in enumerate(values, start=1))
        else:
            # Without its line break, behind which json would place the end of an unfinished line.
            lines = (
                (f"{name}:{i}", line.rstrip())
                for i, line in enumerate(file, start=1)
                if line.strip()
            )
            found = (
                (where, _parsed(line, where, lambda _, where=where: where)) for where, line in lines
            )
        for where, row in found:
            if not isinstance(row, dict):
                raise DataError(f"{where}: an object is needed, not {type(row).__name__}")
            yield where, row


def _parsed(text: str, name: str, place: Callable[[int], str]) -> Any:
    """The value of a JSON text; ``place`` names a line of it."""
    try:
        return json.loads(text, parse_int=_int64, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        forms = "a file has one object per line, or an array of objects"
        raise DataError(
            f"{place(error.lineno)}: not JSON: {error.msg} (column {error.colno}); {forms}"
        ) from error
    except ValueError as error:
        raise DataError(f"{name}: {error}") from error


def _int64(digits: str) -> int:
    if not -(2**63) <= int(digits) < 2**63:
        raise ValueError(
            f"the integer {digits} has over 64 bits and cannot be held; write it as text, in quotes"
        )
    return int(digits)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON; write null")


def dataset_of(rows: Rows, limit: int | None) -> Dataset:
    """Columns of the rows; None for a key that a row lacks."""
    from datasets import Dataset, Features, Json, Value

    columns: dict[str, list[Any]] = {}
    origins: list[str] = []
    for origin, row in islice(rows, limit):
        for key in row:  # in the file's order, so it is the same on every rank and run
            if key not in columns:
                columns[key] = [None] * len(origins)
        for key, values in columns.items():
            values.append(row.get(key))
        origins.append(row.get(ORIGIN_COLUMN) or origin)
    columns[ORIGIN_COLUMN] = origins
    scalars = {str: "string", int: "int64", float: "float64", bool: "bool", type(None): "null"}
    features: dict[str, Any] = {}
    for key, values in columns.items():
        kinds = {type(v) for v in values if v is not None} or {type(None)}
        if len(kinds) == 1 and kinds <= scalars.keys():
            features[key] = Value(scalars[kinds.pop()])
        else:
            features[key], columns[key] = Json(), _json_texts(values)
    features[ORIGIN_COLUMN] = Value("string")
    return Dataset.from_dict(columns, features=Features(features))


def _json_texts(values: list[Any]) -> list[str | None]:
    """Written as JSON here: ``datasets.Json`` would take the text "4" for a 4, and rounds floats to ten digits."""
    return [None if v is None else json.dumps(v, allow_nan=False) for v in values]
