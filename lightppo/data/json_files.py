"""Files of JSON: lines or an array, compressed or not; values of any form in one column."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lightppo.data.rows import ORIGIN_COLUMN, chat_without_nulls
from lightppo.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

Rows = Iterator[tuple[str, dict[str, Any]]]  # (origin, row)


def read_json(path: str | Path, name: str, limit: int | None) -> Dataset:
    """Read JSON Lines, or a JSON array of objects; either may be compressed."""
    return dataset_of(json_rows(path, name), limit)


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
    """Yield rows of a JSON array or of JSON lines; the first character decides."""
    with open_text(path, name) as file:
        first = next((c for c in iter(lambda: file.read(1), "") if not c.isspace()), "")
        file.seek(0)
        if first == "[":
            whole = file.read()
            values = _parsed(whole, name, lambda line: f"{name}:{line}")
            rows = ((f"{name}, row {i}", whole, value) for i, value in enumerate(values, start=1))
        else:
            # Without its line break, behind which json would place the end of an unfinished line.
            lines = (
                (f"{name}:{i}", line.rstrip())
                for i, line in enumerate(file, start=1)
                if line.strip()
            )
            rows = (
                (where, line, _parsed(line, where, lambda _, where=where: where))
                for where, line in lines
            )
        for where, text, row in rows:
            if not isinstance(row, dict):
                raise DataError(f"{where}: an object is needed, not {type(row).__name__}")
            if "\\ud" in text or "\\uD" in text:
                _check_characters(row, where)
            yield where, row


def _parsed(text: str, name: str, place: Callable[[int], str]) -> Any:
    """Return the value of a JSON text; ``place`` names a line of it."""
    try:
        return json.loads(text, parse_int=_int64, parse_float=_float64, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        forms = "a file has one object per line, or an array of objects"
        raise DataError(
            f"{place(error.lineno)}: not JSON: {error.msg} (column {error.colno}); {forms}"
        ) from error
    except ValueError as error:
        raise DataError(f"{name}: {error}") from error


def _check_characters(value: Any, name: str) -> None:
    """Raise DataError if a text in a JSON value has half of a surrogate pair, which is no character."""
    texts = [value]
    while texts:
        one = texts.pop()
        if isinstance(one, dict):
            texts += [*one, *one.values()]
        elif isinstance(one, list):
            texts += one
        elif isinstance(one, str) and (half := _HALF.search(one)):
            raise DataError(
                f"{name}: a text has \\u{ord(half[0]):04x}, half of a character that takes two such escapes; write "
                "the character itself, or take it out"
            )


_HALF = re.compile("[\ud800-\udfff]")


def _int64(digits: str) -> int:
    if not -(2**63) <= int(digits) < 2**63:
        raise ValueError(
            f"the integer {digits} has over 64 bits and cannot be held; write it as text, in quotes"
        )
    return int(digits)


def _float64(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"{digits} is no number of 64 bits; write it as text, in quotes, or null")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON; write null")


def dataset_of(rows: Rows, limit: int | None) -> Dataset:
    """Make columns of the rows; None for a key that a row lacks."""
    from datasets import Dataset, Features, Value

    from lightppo.data.exact_json import ExactJson

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
            features[key], columns[key] = ExactJson(), json_texts(values)
    features[ORIGIN_COLUMN] = Value("string")
    return Dataset.from_dict(columns, features=Features(features))


def json_texts(values: list[Any]) -> list[str | None]:
    """Write values as JSON here: a feature of JSON would take the text "4" for a 4."""
    return [None if v is None else json.dumps(v, allow_nan=False) for v in values]


def concatenate(parts: list[Dataset], names: list[str]) -> Dataset:
    """Put one dataset after the other. Missing columns become None, columns of differing types become JSON."""
    from datasets import concatenate_datasets

    from lightppo.data.exact_json import exactly_read

    if len(parts) == 1:  # the usual case; datasets would hash what it copies
        return parts[0]
    kinds: dict[str, list[Any]] = {}
    for part in parts:
        for column, feature in part.features.items():
            known = kinds.setdefault(column, [])
            if feature not in known and getattr(feature, "dtype", None) != "null":
                known.append(feature)
    mixed = [column for column, features in kinds.items() if len(features) > 1]
    parts = [_as_json(part, mixed, name) for part, name in zip(parts, names)]
    return exactly_read(concatenate_datasets(parts))


def _written(value: Any, feature: Any) -> Any:
    """Return a chat or a list of tools as it was before a table put nulls into it; other values as they are."""
    if isinstance(value, list):
        return chat_without_nulls(value, feature)
    return value


def _as_json(dataset: Dataset, columns: list[str], name: str) -> Dataset:
    from datasets import Dataset, Features, Json, concatenate_datasets

    from lightppo.data.exact_json import ExactJson, exactly_read

    for column in columns:
        if not isinstance(dataset.features.get(column, Json()), Json):
            try:
                feature = dataset.features[column]
                texts = json_texts([_written(value, feature) for value in dataset[column]])
                converted = Dataset.from_dict(
                    {column: texts}, features=Features({column: ExactJson()})
                )
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"column {column!r} has another type in {name} than in the other sources, and cannot be held as "
                    f"JSON: {error}; convert it, or take it out"
                ) from error
            parts = [dataset.remove_columns(column), converted]
            dataset = exactly_read(concatenate_datasets(parts, axis=1))
    return dataset
