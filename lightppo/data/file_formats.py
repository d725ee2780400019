"""CSV, TSV, parquet and arrow; large files of text, which the ranks of a node do not parse each for itself."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightppo.data import json_files
from lightppo.data.json_files import Rows, dataset_of, open_text
from lightppo.errors import DataError
from lightppo.ranks import ranks_on_node
from lightppo.storage import in_cache, made_once
from lightppo.table import Entry, Table

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

# of a file that the ranks of a node do not parse each for itself
SHARED_BYTES = 64 << 20
SHARED_ROWS = 1000


def read_json(path: str | Path, name: str, limit: int | None) -> Dataset:
    """Read JSON Lines, or a JSON array of objects."""
    return _parsed_once(partial(json_files.read_json, path, name, limit), path, name, limit)


def read_csv(path: str | Path, name: str, limit: int | None, delimiter: str = ",") -> Dataset:
    """Read cells with commas between."""

    def read() -> Dataset:
        return dataset_of(_csv_rows(path, name, delimiter), limit)

    return _parsed_once(read, path, name, limit)


def read_tsv(path: str | Path, name: str, limit: int | None) -> Dataset:
    """Read cells with tabs between."""
    return read_csv(path, name, limit, delimiter="\t")


def read_parquet(path: str | Path, name: str, limit: int | None) -> Dataset:
    """Read tables of pyarrow, which are mapped."""
    return _first(_read_mapped("parquet", path, name), limit)


def read_arrow(path: str | Path, name: str, limit: int | None) -> Dataset:
    """Read what ``datasets`` itself writes."""
    return _first(_read_mapped("arrow", path, name), limit)


def _first(dataset: Dataset, limit: int | None) -> Dataset:
    if limit is None:
        return dataset
    return dataset.select(range(min(limit, len(dataset))))


def _parsed_once(
    read: Callable[[], Dataset], path: str | Path, name: str, limit: int | None
) -> Dataset:
    """Read a large file once on a node; small ones by each rank."""
    if ranks_on_node(1) == 1 or os.path.getsize(path) < SHARED_BYTES or limit in range(SHARED_ROWS):
        return read()
    about = os.stat(path)
    return _shared(
        read, name, [os.path.realpath(path), about.st_size, about.st_mtime_ns, name, limit]
    )


def _shared(read: Callable[[], Dataset], name: str, key: Any) -> Dataset:
    """Have one rank of a node parse rows and write them into its cache; all map them, so memory has them once."""
    from datasets import Dataset
    from datasets.arrow_writer import ArrowWriter

    def write(target: Path) -> None:
        rows = read()
        part = f"{target}.partial"
        with ArrowWriter(path=part, features=rows.features) as writer:
            writer.write_table(rows.data.table)
            writer.finalize()  # closing alone would hide a full disk
        os.replace(part, target)

    try:
        return Dataset.from_file(str(made_once(in_cache("rows", key, "rows.arrow"), write, name)))
    except TimeoutError:
        raise
    except OSError as error:
        logger.warning("%s: each rank holds its own rows, because the cache fails: %s", name, error)
        return read()


def _csv_rows(path: str | Path, name: str, delimiter: str) -> Rows:
    """Yield rows whose cells are all text; nothing is guessed (``007`` stays ``007``)."""
    csv.field_size_limit(2**31 - 1)  # the default, 128 KiB, is less than a long document
    number = 0
    with open_text(path, name) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            check_separator(header, delimiter, name)
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


def check_separator(header: list[str], delimiter: str, name: str) -> None:
    """Raise DataError where the first line has another separator than its file's name says."""
    others = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars (|)"}
    matches = [sign for sign in others if sign != delimiter and sign in "".join(header)]
    if len(header) == 1 and matches:
        raise DataError(
            f"{name}: the first line has {others[matches[0]]} between the names of columns, and no "
            f"{others[delimiter]}: save it with commas as .csv, or with tabs as .tsv"
        )


def _read_mapped(kind: str, path: str | Path, name: str) -> Dataset:
    import datasets

    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(kind, data_files=[str(path)], split="train")
    except Exception as error:  # pyarrow's and datasets' errors have no common base
        cause = error.__cause__ or error
        raise DataError(
            f"{name}: not a readable {kind} file: {type(cause).__name__}: {cause}"
        ) from error
    finally:
        if not shown:
            datasets.enable_progress_bars()


FORMATS: Table = Table(
    "file format",
    {
        ".jsonl": Entry(read_json),
        ".ndjson": Entry(read_json),
        ".json": Entry(read_json),
        ".csv": Entry(read_csv),
        ".tsv": Entry(read_tsv),
        ".parquet": Entry(read_parquet),
        ".arrow": Entry(read_arrow),
    },
)
"""Formats of data files by the end of their names: functions ``(path, name, limit)`` that return a
``datasets.Dataset``; errors call the file by ``name``, ``limit`` is None or how many rows to read."""
