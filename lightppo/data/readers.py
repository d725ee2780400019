"""Reading one file into a ``datasets.Dataset`` whose hidden column ``__origin__`` holds the file and line of each row.

JSON and CSV are read here, not by pyarrow's readers, for two reasons: a malformed or odd row can be named by its line,
and values keep their form (pyarrow fails on mixed types, fills objects with each other's keys, guesses types in CSV).
Their rows are held in memory; for millions of rows take parquet or arrow, which are memory-mapped.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
_KINDS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
FORMATS = tuple(_KINDS)


def file_format(path: str | Path) -> str | None:
    """Format of a file by its name (compression aside): one of ``FORMATS``, or None."""
    suffixes = [s.lower() for s in Path(path).suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _KINDS else None


def read_file(path: str | Path, *, shown_as: str | None = None, limit: int | None = None) -> Dataset:
    """Read one data file.

    Args:
        path: local file; JSON Lines, a JSON array of objects, CSV, TSV (these also compressed), parquet or arrow.
        shown_as: the name that errors and origins give (the URL, say); default ``path``.
        limit: at most this many rows.

    Returns:
        The rows, with ``__origin__``: ``file:line`` for JSON Lines, ``file, row n`` (from 1) for the others.

    Raises:
        DataError: unknown format, or content that is not of the format; names the file and the line.
    """
    name = shown_as or str(path)
    suffix = file_format(path)
    if suffix is None:
        raise DataError(f"{name}: unknown format; the name must end in one of {', '.join(FORMATS)}")
    kind = _KINDS[suffix]
    if kind in ("parquet", "arrow"):
        dataset = _read_mapped(kind, path, name)
        dataset = dataset if limit is None else dataset.select(range(min(limit, len(dataset))))
        return with_origins(dataset, lambda i: f"{name}, row {i + 1}")
    rows = _csv_rows(path, name, "\t" if suffix == ".tsv" else ",") if kind == "csv" else _json_rows(path, name)
    return _dataset_of(rows, limit)


def with_origins(dataset: Dataset, origin: Any) -> Dataset:
    """Add the hidden column, ``origin(i)`` for row i; data that has it (a blend saved earlier) keeps its own."""
    if ORIGIN_COLUMN in dataset.column_names:
        return dataset
    return dataset.add_column(ORIGIN_COLUMN, [origin(i) for i in range(len(dataset))])


def _open_text(path: str | Path) -> TextIO:
    import fsspec

    # utf-8-sig: a byte order mark is no part of the first key. newline="": the csv module's wish.
    return fsspec.open(str(path), "rt", encoding="utf-8-sig", newline="", compression="infer").open()


def _json_rows(path: str | Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(origin, row) of a JSON array or of JSON lines, told apart by the first character."""
    try:
        with _open_text(path) as file:
            first = next((c for c in iter(lambda: file.read(1), "") if not c.isspace()), "")
            file.seek(0)
            yield from _array_rows(file, name) if first == "[" else _line_rows(file, name)
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text ({error})") from error


class _NumberError(Exception):
    pass


def _int64(digits: str) -> int:
    value = int(digits)
    if not -(2**63) <= value < 2**63:
        raise _NumberError(f"the integer {digits} has over 64 bits and cannot be held; write it as text, in quotes")
    return value


def _no_constant(name: str) -> float:
    raise _NumberError(f"{name} is not JSON; write null")


def _array_rows(file: TextIO, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = json.load(file, parse_int=_int64, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise DataError(f"{name}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    except _NumberError as error:
        raise DataError(f"{name}: {error}") from error
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{name}, row {i + 1}: an object is needed, not {type(row).__name__}")
        yield f"{name}, row {i + 1}", row


def _line_rows(file: TextIO, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_int=_int64, parse_constant=_no_constant)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{name}:{number}: not JSON: {error.msg} (column {error.colno}); the file is read as one object per "
                "line, or as an array of objects"
            ) from error
        except _NumberError as error:
            raise DataError(f"{name}:{number}: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{name}:{number}: an object is needed, not {type(row).__name__}")
        yield f"{name}:{number}", row


def _csv_rows(path: str | Path, name: str, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(origin, row): every cell is text, nothing is guessed (``007`` stays ``007``)."""
    csv.field_size_limit(2**31 - 1)  # the default, 128 KiB, is less than a long document
    number = 0
    try:
        with _open_text(path) as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise DataError(f"{name}: the header names a column twice: {', '.join(header)}")
            for cells in reader:
                if not cells:  # a blank line
                    continue
                number += 1
                if len(cells) != len(header):
                    raise DataError(f"{name}, row {number}: {len(cells)} cells, but the header has {len(header)}")
                yield f"{name}, row {number}", dict(zip(header, cells))
    except csv.Error as error:
        raise DataError(f"{name}, row {number + 1}: not CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text ({error})") from error


def _dataset_of(rows: Iterator[tuple[str, dict[str, Any]]], limit: int | None) -> Dataset:
    """Columns of the rows; a key that a row lacks is None there."""
    from datasets import Dataset, Features, Json, Value

    columns: dict[str, list[Any]] = {}
    origins: list[str] = []
    for origin, row in islice(rows, limit):
        for key in row:  # in the file's order, which every rank and run sees alike
            if key not in columns:
                columns[key] = [None] * len(origins)
        for key, values in columns.items():
            values.append(row.get(key))
        origins.append(row.get(ORIGIN_COLUMN) or origin)
    columns[ORIGIN_COLUMN] = origins
    features: dict[str, Any] = {}
    for key, values in columns.items():
        kinds = {type(v) for v in values if v is not None}
        only = kinds.pop() if len(kinds) == 1 else type(None) if not kinds else None
        if only in _SCALARS:
            features[key] = Value(_SCALARS[only])
        else:
            features[key], columns[key] = Json(), json_texts(values)
    features[ORIGIN_COLUMN] = Value("string")
    return Dataset.from_dict(columns, features=Features(features))


_SCALARS = {str: "string", int: "int64", float: "float64", bool: "bool", type(None): "null"}


def json_texts(values: list[Any]) -> list[str | None]:
    """Values for a ``datasets.Json`` column. Written as JSON here: the feature itself would take the text "4" for a
    4, and rounds floats to ten digits.

    Raises:
        TypeError, ValueError: a value that JSON cannot hold.
    """
    return [None if v is None else json.dumps(v, allow_nan=False) for v in values]


def _read_mapped(kind: str, path: str | Path, name: str) -> Dataset:
    import datasets

    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(kind, data_files=[str(path)], split="train")
    except Exception as error:  # pyarrow's and datasets' errors have no common base
        cause = error.__cause__ or error
        raise DataError(f"{name}: not a readable {kind} file: {type(cause).__name__}: {cause}") from error
    finally:
        if not shown:
            datasets.enable_progress_bars()
