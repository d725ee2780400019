"""From ``--prompt_data a.jsonl,folder,owner/name`` to one dataset: reading files, splits, blending.

The hidden column ``__origin__`` keeps each row's file and line, so that errors can name them.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import numpy as np

from lightppo.data.rows import ORIGIN_COLUMN, check_choice
from lightppo.errors import DataError, StagingError
from lightppo.files import check_file_url, in_cache, is_url, made_once, stage_to_local
from lightppo.hub import check_on_hub, mistyped_path
from lightppo.ranks import ranks_on_node
from lightppo.urls import shown_url

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

StoppingStrategy = Literal["all_exhausted", "first_exhausted"]
Rows = Iterator[tuple[str, dict[str, Any]]]  # (origin, row)

# of a file that the ranks of a node do not parse each for itself
SHARED_BYTES, SHARED_ROWS = 64 << 20, 1000

_IDS = ("query_id", "id")  # by which rows of two files are joined; the first that both have
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
_KINDS = dict.fromkeys((".jsonl", ".ndjson", ".json"), "json") | dict.fromkeys(
    (".csv", ".tsv"), "csv"
)
_KINDS |= {".parquet": "parquet", ".arrow": "arrow"}
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w.-]+)?")
SPLIT_WORDS = dict.fromkeys(("train", "training"), "train") | dict.fromkeys(
    ("test", "testing", "eval"), "test"
)
SPLIT_WORDS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")


# -- one dataset of several sources ----------------------------------------------------------------------------------


def blending_datasets(
    paths: str | list[str],
    probs: str | list[float] | None = None,
    strategy: Any = None,
    seed: int = 42,
    max_count: int | float = 5_000_000,
    return_eval: bool | None = None,
    stopping_strategy: StoppingStrategy = "all_exhausted",
    train_split: str | None = None,
    eval_split: str | None = None,
    *,
    flag: str | None = None,
) -> Dataset | tuple[Dataset, Dataset]:
    """Load one or several sources into one dataset; DataError names a bad source.

    Args:
        paths: comma separated: files (JSON, JSONL, CSV, TSV, parquet, arrow), folders of them, folders made by
            ``save_to_disk``, fsspec URLs of these, hub names (``owner/name``, ``owner/name@config``).
        probs: probability of each source, comma separated, sum 1. None: one source after the other, each row once.
        max_count: most rows to take from each source.
        return_eval: return ``(train, eval)``, see :func:`held_out_rows`. None: if ``eval_split`` is given, or if a
            script in OpenRLHF's style (its strategy has ``args``) names neither split.
        stopping_strategy: with ``probs``: stop when every source is used up (some rows repeat), or when the first is.
        train_split: the split to read from sources with splits, by default ``train``; a single file has none.
    """
    if return_eval is None:
        of_script = getattr(strategy, "args", None) is not None
        return_eval = eval_split is not None or (of_script and train_split is None)
    # as scripts call what they split
    flag = flag or ("--dataset" if return_eval else "--prompt_data")
    if max_count < 1:
        raise DataError(f"max_count is {max_count}; at least 1")
    check_choice("stopping_strategy", stopping_strategy, StoppingStrategy)
    sources, weights = _checked_sources(paths, probs, flag)
    train_split = train_split or "train"
    parts = [_load_source(source, train_split, int(max_count), flag) for source in sources]
    counts = [len(part) for part in parts]
    blend = _concatenate(parts, sources)
    drawn = counts
    if weights is not None:
        indices, drawn = interleave_indices(counts, weights, seed, stopping_strategy)
        blend = blend.select(indices)
    for source, count, used in (
        zip(sources, counts, drawn) if strategy is None or strategy.is_rank_0() else ()
    ):
        level = logging.INFO if used == count else logging.WARNING
        logger.log(
            level,
            "%s %s: %d rows, %d used%s",
            flag,
            shown_url(source),
            count,
            used,
            " (repeats)" * (used > count),
        )
    if return_eval:
        return blend, held_out_rows(
            sources, parts, strategy, int(max_count), eval_split or "test", flag
        )
    return blend


def held_out_rows(
    sources: list[str], train_rows: list[Dataset], strategy: Any, limit: int, split: str, flag: str
) -> Dataset:
    """Rows of ``split``, each once. Of a source without that split the first 3 % of its training rows, which is said:
    the model is trained on them, too, as OpenRLHF does."""
    parts = []
    for source, rows in zip(sources, train_rows):
        if has_split(source, split, flag):
            parts.append(_load_source(source, split, limit, flag))
            continue
        parts.append(rows.select(range(max(1, int(len(rows) * 0.03)))))
        if strategy is None or strategy.is_rank_0():
            text = "%s %s has no split %r: evaluation is on %d of the rows that are trained on"
            logger.warning(text, flag, shown_url(source), split, len(parts[-1]))
    return _concatenate(parts, sources)


def has_split(source: str, split: str, flag: str) -> bool:
    """Whether a source has rows of this split; a single file, and a folder of one saved dataset, have no splits."""
    if _is_hub_name(source, flag):
        import datasets

        name, _, config = source.partition("@")
        return split in datasets.get_dataset_split_names(name, config or None)
    path = Path(stage_to_local(source)).expanduser()
    if not path.is_dir() or (path / "state.json").exists():
        return False
    if (splits := path / "dataset_dict.json").exists():
        return split in json.loads(splits.read_text())["splits"]
    files = (
        file.relative_to(path) for file in path.rglob("*") if file.is_file() and file_format(file)
    )
    wanted = SPLIT_WORDS.get(split.lower(), split.lower())
    return any(_split_named_by(file, split.lower()) == wanted for file in files)


def with_metadata(rows: Dataset, path: str | None, flag: str = "--prompt_metadata") -> Dataset:
    """The rows with the further columns of the file's row of the same id (``_IDS``); DataError if one is missing."""
    if path is None:
        return rows
    from datasets import concatenate_datasets

    more = _load_source(path, "train", sys.maxsize, flag)
    ids = _joining_column(rows, more, f"{flag} {path}")
    places: dict[str, int] = {}
    for place, (key, origin) in enumerate(zip(more[ids], more[ORIGIN_COLUMN])):
        if places.setdefault(str(key), place) != place:
            raise DataError(f"{flag} {origin}: {ids} {key!r} is there twice")
    for key, origin in zip(rows[ids], rows[ORIGIN_COLUMN]):
        if str(key) not in places:
            raise DataError(f"{origin}: {ids} {key!r} is not in {flag} {path}")
    further = [name for name in more.column_names if name not in rows.column_names]
    return concatenate_datasets(
        [rows, more.select_columns(further).select([places[str(key)] for key in rows[ids]])], axis=1
    )


def _joining_column(rows: Dataset, more: Dataset, what: str) -> str:
    """The column by which the rows of ``--prompt_metadata`` are joined; DataError if there is none."""
    for name in _IDS:
        if name in rows.column_names and name in more.column_names:
            return name
    names = " or ".join(map(repr, _IDS))
    for where, dataset in {"it": more, "the prompts": rows}.items():
        if not set(_IDS) & set(dataset.column_names):
            raise DataError(f"{what}: no column {names} in {where}, by which rows are joined")
    raise DataError(
        f"{what}: its ids and those of the prompts have different names: call both 'query_id', or both 'id'"
    )


def check_data_paths(
    paths: str | list[str], probs: str | list[float] | None = None, *, flag: str = "--prompt_data"
) -> None:
    """Check sources before models load, without reading them: names that are not here are asked of the hub.

    Raises:
        DataError: names the source.
    """
    for source in _checked_sources(paths, probs, flag)[0]:
        if _is_hub_name(source, flag):
            check_on_hub(source.partition("@")[0], "dataset", flag)


def _checked_sources(
    paths: str | list[str], probs: str | list[float] | None, flag: str
) -> tuple[list[str], list[float] | None]:
    """The sources, and the probability of each; None if they have none."""
    sources = [p.strip() for p in (paths.split(",") if isinstance(paths, str) else paths)]
    if not all(sources) or not sources:
        raise DataError(
            f"{flag} {paths!r} has an empty item; give files, folders, URLs or hub names, comma separated"
        )
    if probs is None:
        return sources, None
    try:
        values = [float(p) for p in (probs.split(",") if isinstance(probs, str) else probs)]
    except ValueError as error:
        raise DataError(
            f"{flag}_probs {probs!r}: numbers are needed, comma separated, e.g. 0.7,0.3"
        ) from error
    if len(values) != len(sources):
        problem = f"has {len(values)} numbers for {len(sources)} sources; give one for each"
    elif not all(0 < v <= 1 for v in values):
        problem = "has a number that is not over 0 and at most 1; leave a source out to not use it"
    elif abs(sum(values) - 1) > 1e-6:
        problem = f"sums to {sum(values):g}; it must be 1"
    else:
        return sources, values
    raise DataError(f"{flag}_probs {probs!r} {problem}")


def interleave_indices(
    counts: list[int], probs: list[float], seed: int, stopping_strategy: StoppingStrategy
) -> tuple[np.ndarray, list[int]]:
    """Row numbers of a random blend in the concatenated sources, and how many rows of each source it drew."""
    from datasets import Dataset, interleave_datasets

    ends = np.cumsum(counts)
    numbers = [
        Dataset.from_dict({"row": np.arange(end - count, end)}) for count, end in zip(counts, ends)
    ]
    blend = interleave_datasets(numbers, probs, seed, stopping_strategy=stopping_strategy)
    rows = blend.with_format("numpy")["row"][:]
    return rows, np.bincount(
        np.searchsorted(ends, rows, side="right"), minlength=len(counts)
    ).tolist()


def _concatenate(parts: list[Dataset], names: list[str]) -> Dataset:
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


def _is_hub_name(source: str, flag: str) -> bool:
    """False for URLs, and for files and folders of this machine; DataError if it is none of these. No network."""
    if is_url(source):
        check_file_url(source, flag)
        return False
    path = Path(source.split("://", 1)[-1]).expanduser()
    if path.is_file():
        _known_format(path, f"{flag} {source}")
    if not path.exists() and (
        "://" in source or file_format(source) or not _HUB_NAME.fullmatch(source)
    ):
        raise DataError(
            f"{flag} {source}: no such file or folder (looked in {os.getcwd()}){mistyped_path(source)}"
        )
    return not path.exists()


def _load_source(source: str, split: str, limit: int, flag: str) -> Dataset:
    if _is_hub_name(source, flag):
        dataset = _load_hub(source, split, flag)
    else:
        try:
            path = Path(stage_to_local(source)).expanduser()
        except StagingError as error:
            raise DataError(f"{flag}: {error}") from error
        load = partial(_load_folder, split=split, flag=flag) if path.is_dir() else read_file
        dataset = load(path, shown_as=shown_url(source), limit=limit)
    if len(dataset) == 0:
        raise DataError(f"{flag} {shown_url(source)} is empty: no rows")
    return dataset.select(range(min(limit, len(dataset))))


def first_rows(source: str, split: str, flag: str, count: int = 20) -> Dataset | None:
    """The first rows of a file or folder of this machine; None for URLs and hub names, which would be copied whole."""
    return (
        None
        if is_url(source) or _is_hub_name(source, flag)
        else _load_source(source, split, count, flag)
    )


def _load_hub(source: str, split: str, flag: str) -> Dataset:
    import datasets

    name, _, config = source.partition("@")
    check_on_hub(name, "dataset", flag)
    try:
        dataset = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:
        # datasets, the hub client and the network raise errors without a common base
        problem = (
            f"no such file or folder here, and no hub dataset that can be loaded (split {split!r})"
        )
        raise DataError(f"{flag} {source}: {problem}: {type(error).__name__}: {error}") from error
    return _with_origins(dataset, f"{source}[{split}]")


def _load_folder(path: Path, *, shown_as: str, split: str, limit: int, flag: str) -> Dataset:
    """A folder made by ``save_to_disk``, or the data files in a folder whose names fit the split."""
    from datasets import DatasetDict, load_from_disk

    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        saved = load_from_disk(str(path))
        if not isinstance(saved, DatasetDict):
            return _with_origins(saved, shown_as)
        if split not in saved:
            raise DataError(
                f"{flag} {shown_as} has no split {split!r}; its splits: {', '.join(saved)}"
            )
        return _with_origins(saved[split], f"{shown_as}[{split}]")
    files, parts = _files_of_split(path, shown_as, split, flag), {}
    for file in map(str, files):
        part = read_file(path / file, shown_as=f"{shown_as.rstrip('/')}/{file}", limit=limit)
        limit -= len(part)
        parts |= {file: part} if len(part) else {}
        if limit <= 0:
            break
    if not parts:
        raise DataError(f"{flag} {shown_as} is empty: no rows in {', '.join(map(str, files))}")
    return _concatenate(list(parts.values()), list(parts))


def _files_of_split(path: Path, source: str, split: str, flag: str) -> list[Path]:
    """Data files whose name or folder has the split's name as a word; for ``train`` else files that name no split."""
    found = sorted(f.relative_to(path) for f in path.rglob("*") if f.is_file() and file_format(f))
    files = [f for f in found if not any(part.startswith(".") for part in f.parts)]
    if not files:
        raise DataError(
            f"{flag} {source} has no data files ({', '.join(_KINDS)}) and is no saved dataset"
        )
    wanted = SPLIT_WORDS.get(split.lower(), split.lower())
    named = {f: _split_named_by(f, split.lower()) for f in files}
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
    return chosen


def _split_named_by(relative: Path, split: str) -> str | None:
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
    return suffixes[-1] if suffixes and suffixes[-1] in _KINDS else None


def _known_format(path: str | Path, name: str) -> str:
    if (suffix := file_format(path)) is None:
        known = f"{', '.join(_KINDS)} (JSON and CSV also with {', '.join(_COMPRESSED)})"
        raise DataError(f"{name}: unknown format; the name must end in one of {known}")
    return suffix


def read_file(
    path: str | Path, *, shown_as: str | None = None, limit: int | None = None
) -> Dataset:
    """Read a local data file: JSON Lines, a JSON array of objects, CSV, TSV (each may be compressed), parquet or arrow.

    Origins are ``file:line`` for JSON Lines, ``file, row n`` (from 1) for the others; errors name them too.
    ``shown_as`` replaces the path in errors and origins (by the URL, say).
    """
    name = shown_as or str(path)
    kind = _KINDS[suffix := _known_format(path, name)]
    if kind in ("parquet", "arrow"):
        dataset = _read_mapped(kind, path, name)
        return _with_origins(
            dataset if limit is None else dataset.select(range(min(limit, len(dataset)))), name
        )
    parse = (
        partial(_csv_rows, delimiter="\t" if suffix == ".tsv" else ",")
        if kind == "csv"
        else _json_rows
    )

    def read() -> Dataset:
        return _dataset_of(parse(path, name), limit)

    if ranks_on_node(1) == 1 or os.path.getsize(path) < SHARED_BYTES or limit in range(SHARED_ROWS):
        return read()
    about = os.stat(path)
    return _shared(
        read, name, [os.path.realpath(path), about.st_size, about.st_mtime_ns, name, limit]
    )


def _shared(read: Callable[[], Dataset], name: str, key: Any) -> Dataset:
    """Rows that one rank of a node parses and writes into its cache; all map them, so that memory has them once."""
    from datasets import Dataset
    from datasets.arrow_writer import ArrowWriter

    def write(target: Path) -> None:
        rows, part = read(), f"{target}.partial"
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


def _with_origins(dataset: Dataset, name: str) -> Dataset:
    """Add the hidden column, unless the data has it already (a blend saved earlier)."""
    if ORIGIN_COLUMN in dataset.column_names:
        return dataset
    return dataset.add_column(ORIGIN_COLUMN, [f"{name}, row {i + 1}" for i in range(len(dataset))])


@contextmanager
def _open_text(path: str | Path, name: str) -> Iterator[TextIO]:
    import fsspec

    # utf-8-sig: drops a byte order mark, which is not part of the first key. newline="": as the csv module requires.
    options = {"encoding": "utf-8-sig", "newline": "", "compression": "infer"}
    try:
        with fsspec.open(str(path), "rt", **options) as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text ({error})") from error


def _json_rows(path: str | Path, name: str) -> Rows:
    """Rows of a JSON array or of JSON lines; the first character decides."""
    with _open_text(path, name) as file:
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


def _csv_rows(path: str | Path, name: str, delimiter: str) -> Rows:
    """Every cell is text; nothing is guessed (``007`` stays ``007``)."""
    csv.field_size_limit(2**31 - 1)  # the default, 128 KiB, is less than a long document
    number = 0
    with _open_text(path, name) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
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


def _dataset_of(rows: Rows, limit: int | None) -> Dataset:
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
