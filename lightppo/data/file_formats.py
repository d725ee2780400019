"""Files of rows: JSON, CSV and TSV, compressed or not; parquet and arrow.

The ranks of a node do not parse large files of text each for itself.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError
from lightppo.ranks import ranks_on_node
from lightppo.storage import in_cache, made_once
from lightppo.table import Entry, Table

if TYPE_CHECKING:
    from datasets import Dataset

    from lightppo.data.arrow_tables import Rows

logger = logging.getLogger(__name__)

# of a file that the ranks of a node do not parse each for itself
SHARED_BYTES = 64 << 20
SHARED_ROWS = 1000

_COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def read_file(
    path: str | Path, *, shown_as: str | None = None, limit: int | None = None
) -> Dataset:
    """Read a local data file, by its format. Origins are ``file:line`` or ``file, row n`` (from 1); errors name them.

    ``shown_as`` replaces the path in errors and origins (by the URL, say).
    """
    from lightppo.data.arrow_tables import exactly_read

    shown_name = shown_as or str(path)
    read_rows = FORMATS[known_format(path, shown_name)].fn
    return exactly_read(with_origins(read_rows(path, shown_name, limit), shown_name))


def with_origins(dataset: Dataset, name: str) -> Dataset:
    """Add the hidden column, unless the data has it already (a blend saved earlier)."""
    if ORIGIN_COLUMN in dataset.column_names:
        return dataset
    return dataset.add_column(ORIGIN_COLUMN, [f"{name}, row {i + 1}" for i in range(len(dataset))])


def file_format(path: str | Path) -> str | None:
    """Return a file's format by its name (compression aside), such as ``.jsonl``, or None."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    if suffixes and suffixes[-1] in FORMATS:
        return suffixes[-1]
    return None


def known_format(path: str | Path, name: str) -> str:
    """Return :func:`file_format`, or raise DataError."""
    if suffix := file_format(path):
        return suffix
    known_formats = f"{', '.join(FORMATS)} (files of text also with {', '.join(_COMPRESSED)})"
    raise DataError(f"{name}: unknown format; the name must end in one of {known_formats}")


# -- files of text ---------------------------------------------------------------------------------------------------


@contextmanager
def _open_text(path: str | Path, name: str) -> Iterator[TextIO]:
    import fsspec

    # utf-8-sig: drops a byte order mark, which is not part of the first key. newline="": as the csv module requires.
    options = {"encoding": "utf-8-sig", "newline": "", "compression": "infer"}
    try:
        with fsspec.open(str(path), "rt", **options) as text_file:
            yield text_file
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text ({error})") from error


def _read_text(
    parse: Callable[[str | Path, str], Rows], path: str | Path, name: str, limit: int | None
) -> Dataset:
    """Parse a file; a large one once on a node: all ranks map the rows, so that memory has them once."""
    from datasets import Dataset
    from datasets.arrow_writer import ArrowWriter

    from lightppo.data.arrow_tables import dataset_of

    def write(target: Path) -> None:
        rows = dataset_of(parse(path, name), limit)
        partial_file = f"{target}.partial"
        with ArrowWriter(path=partial_file, features=rows.features) as writer:
            writer.write_table(rows.data.table)
            writer.finalize()  # closing alone would hide a full disk
        os.replace(partial_file, target)

    stat = os.stat(path)
    if ranks_on_node(1) > 1 and stat.st_size >= SHARED_BYTES and limit not in range(SHARED_ROWS):
        cache_key = [os.path.realpath(path), stat.st_size, stat.st_mtime_ns, name, limit]
        try:
            cached_file = made_once(in_cache("rows", cache_key, "rows.arrow"), write, name)
            return Dataset.from_file(str(cached_file))
        except TimeoutError:
            raise
        except OSError as error:
            logger.warning(
                "%s: each rank holds its own rows, because the cache fails: %s", name, error
            )
    return dataset_of(parse(path, name), limit)


def _json_rows(path: str | Path, name: str) -> Rows:
    """Yield rows of a JSON array or of JSON lines."""
    with _open_text(path, name) as json_file:
        for origin, json_text, row in _json_values(json_file, name):
            if not isinstance(row, dict):
                raise DataError(f"{origin}: an object is needed, not {type(row).__name__}")
            if "\\ud" in json_text or "\\uD" in json_text:
                _check_characters(row, origin)
            yield origin, row


def _json_values(json_file: TextIO, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield values with their origins and texts; the first character of the file says whether it is an array."""
    characters = iter(lambda: json_file.read(1), "")
    first_character = next((character for character in characters if not character.isspace()), "")
    json_file.seek(0)
    if first_character == "[":
        json_text = json_file.read()
        for number, value in enumerate(_parse_json(json_text, name, is_array=True), start=1):
            yield f"{name}, row {number}", json_text, value
        return
    for number, line in enumerate(json_file, start=1):
        json_text = (
            line.rstrip()
        )  # behind a line break json would place the end of an unfinished line
        if json_text:
            origin = f"{name}:{number}"
            yield origin, json_text, _parse_json(json_text, origin)


def _parse_json(json_text: str, name: str, is_array: bool = False) -> Any:
    try:
        return json.loads(
            json_text, parse_int=_int64, parse_float=_float64, parse_constant=_no_constant
        )
    except json.JSONDecodeError as error:
        if is_array:
            name = f"{name}:{error.lineno}"
        accepted_forms = "a file has one object per line, or an array of objects"
        raise DataError(
            f"{name}: not JSON: {error.msg} (column {error.colno}); {accepted_forms}"
        ) from error
    except ValueError as error:
        raise DataError(f"{name}: {error}") from error


def _check_characters(row: dict[str, Any], name: str) -> None:
    """Raise DataError if a text in a row has half of a surrogate pair, which is no character."""
    values: list[Any] = [row]
    while values:
        json_value = values.pop()
        if isinstance(json_value, dict):
            values += [*json_value, *json_value.values()]
        elif isinstance(json_value, list):
            values += json_value
        elif isinstance(json_value, str) and (half_character := _HALF_CHARACTER.search(json_value)):
            raise DataError(
                f"{name}: a text has \\u{ord(half_character[0]):04x}, half of a character that takes two such escapes; "
                "write the character itself, or take it out"
            )


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


def _csv_rows(path: str | Path, name: str, delimiter: str = ",") -> Rows:
    """Yield rows whose cells are all text; nothing is guessed (``007`` stays ``007``)."""
    csv.field_size_limit(2**31 - 1)  # the default, 128 KiB, is less than a long document
    number = 0
    with _open_text(path, name) as csv_file:
        reader = csv.reader(csv_file, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            _check_separator(header, delimiter, name)
            if len(set(header)) < len(header):
                raise DataError(f"{name}: the header names a column twice: {', '.join(header)}")
            for number, cells in enumerate(filter(None, reader), start=1):  # no blank lines
                if len(cells) != len(header):
                    raise DataError(
                        f"{name}, row {number}: {len(cells)} cells, but the header has {len(header)}"
                    )
                yield f"{name}, row {number}", dict(zip(header, cells))
        except csv.Error as error:
            raise DataError(f"{name}, row {number + 1}: not CSV: {error}") from error


def _check_separator(header: list[str], delimiter: str, name: str) -> None:
    """Raise DataError where the first line has another separator than its file's name says."""
    separators = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars (|)"}
    matches = [
        separator
        for separator in separators
        if separator != delimiter and separator in "".join(header)
    ]
    if len(header) == 1 and matches:
        raise DataError(
            f"{name}: the first line has {separators[matches[0]]} between the names of columns, and no "
            f"{separators[delimiter]}: save it with commas as .csv, or with tabs as .tsv"
        )


# -- files of tables -------------------------------------------------------------------------------------------------


def _read_mapped(format_name: str, path: str | Path, name: str, limit: int | None) -> Dataset:
    import datasets

    bars_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(format_name, data_files=[str(path)], split="train")
    except Exception as error:  # pyarrow's and datasets' errors have no common base
        root_error = error.__cause__ or error
        raise DataError(
            f"{name}: not a readable {format_name} file: {type(root_error).__name__}: {root_error}"
        ) from error
    finally:
        if not bars_disabled:
            datasets.enable_progress_bars()
    if limit is None:
        return dataset
    return dataset.select(range(min(limit, len(dataset))))


_JSON = Entry(partial(_read_text, _json_rows))

FORMATS: Table = Table(
    "file format",
    {
        ".jsonl": _JSON,
        ".ndjson": _JSON,
        ".json": _JSON,
        ".csv": Entry(partial(_read_text, _csv_rows)),
        ".tsv": Entry(partial(_read_text, partial(_csv_rows, delimiter="\t"))),
        ".parquet": Entry(partial(_read_mapped, "parquet")),
        ".arrow": Entry(partial(_read_mapped, "arrow")),
    },
)
"""Formats of data files by the end of their names: functions ``(path, name, limit)`` that return a
``datasets.Dataset``; errors call the file by ``name``, ``limit`` is None or how many rows to read."""
