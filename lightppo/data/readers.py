"""From ``--prompt_data a.jsonl,folder,owner/name`` to one dataset: finding sources, splits, blending."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import numpy as np

from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError, StagingError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from datasets import Dataset

CACHE_VARIABLE = "LIGHTPPO_CACHE"
DEFAULT_TIMEOUT_S = 3600.0


def is_url(path: str) -> bool:
    """True for ``scheme://…``."""
    return "://" in path


def cache_root() -> Path:
    """Where copies are kept: ``$LIGHTPPO_CACHE``, else ``~/.cache/lightppo``. It should be a disk of the node."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "lightppo")


def check_scheme(url: str, flag: str = "the URL") -> None:
    """Refuse a URL whose scheme fsspec does not know, or whose package is not installed. No network.

    Raises:
        StagingError: naming the flag, the URL and the package to install.
    """
    from fsspec import available_protocols, get_filesystem_class

    scheme = url.split("://")[0]
    try:
        get_filesystem_class(scheme)
    except ValueError as error:
        known = ", ".join(sorted(available_protocols()))
        raise StagingError(f"{flag} {url}: unknown scheme {scheme!r}; known: {known}") from error
    except ImportError as error:
        raise StagingError(f"{flag} {url}: {error}") from error


def stage_to_local(url: str, *, cache_dir: str | Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
    """Local path of a file or folder; a URL is copied to this node's cache first, unless an equal copy is there.

    A copy is made under a temporary name, its size checked, and put in place with ``os.replace``: there are no half
    copies. A remote file that changed (by what its file system tells: size, time, etag) is copied anew.

    Args:
        url: fsspec URL. A local path or ``file://`` URL is returned as a path, without a copy.
        cache_dir: where copies go; default :func:`cache_root`.
        timeout_s: seconds to wait for another process of the node that is copying.

    Raises:
        StagingError: unknown scheme, nothing there, a failed or short copy.
        TimeoutError: the other process did not finish in time.
    """
    if not is_url(url):
        return url
    if url.startswith(("file://", "local://")):
        return url.split("://", 1)[1]
    import fsspec
    from filelock import FileLock, Timeout

    check_scheme(url)
    try:
        fs, remote = fsspec.core.url_to_fs(url)
        is_folder, files = _listing(fs, remote)
    except Exception as error:  # each file system raises its own kinds
        raise StagingError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
    if not files:
        raise StagingError(f"{url} is an empty folder, or does not exist")
    key = hashlib.sha256(repr([url, files]).encode()).hexdigest()[:24]
    folder = Path(cache_dir or cache_root()) / "staged" / key
    target = folder / (Path(remote.rstrip("/")).name or "root")
    folder.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return str(target)
    lock = FileLock(folder / ".lock", timeout=timeout_s)
    try:
        with lock:
            if not target.exists():
                sizes = [size for _, size, _ in files]
                total = None if None in sizes else sum(sizes)
                _copy(fs, remote, target, url, is_folder=is_folder, size=total)
    except Timeout as error:
        raise TimeoutError(
            f"{url}: another process on this node has been copying it for over {timeout_s:g} s; "
            f"see its log (lock {lock.lock_file})"
        ) from error
    return str(target)


def _listing(fs: AbstractFileSystem, remote: str) -> tuple[bool, list[tuple[str, int | None, str]]]:
    """Whether it is a folder, and (name, bytes, version) of its files; version is what tells of a change."""
    info = fs.info(remote)
    is_folder = info["type"] == "directory"
    # find() only for folders: over HTTP it would read a file in search of links
    found: dict[str, dict[str, Any]] = fs.find(remote, detail=True) if is_folder else {remote: info}
    return is_folder, [(name, info.get("size"), _version(info)) for name, info in sorted(found.items())]


def _version(info: dict[str, Any]) -> str:
    return str(
        next((info[k] for k in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created") if info.get(k)), "")
    )


def _copy(fs: AbstractFileSystem, remote: str, target: Path, url: str, *, is_folder: bool, size: int | None) -> None:
    """Copy under a temporary name beside the target, check, rename. Only the holder of the lock comes here."""
    temporary = target.with_name(f".{target.name}.partial")
    _remove(temporary)  # left by a process that was killed
    logger.info("copying %s (%s bytes) to %s", url, "?" if size is None else size, target)
    try:
        fs.get(remote.rstrip("/"), str(temporary), recursive=is_folder)
    except Exception as error:  # each file system raises its own kinds
        _remove(temporary)
        raise StagingError(f"copying {url} to {target.parent} failed: {type(error).__name__}: {error}") from error
    files = [temporary] if temporary.is_file() else [p for p in temporary.rglob("*") if p.is_file()]
    got = sum(p.stat().st_size for p in files)
    if size is not None and got != size:
        _remove(temporary)
        raise StagingError(f"copying {url} gave {got} bytes of {size}; try again")
    os.replace(temporary, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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


StoppingStrategy = Literal["all_exhausted", "first_exhausted"]

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w.-]+)?")
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}


def split_paths(paths: str | list[str], flag: str = "--prompt_data") -> list[str]:
    """The sources of a comma separated list.

    Raises:
        DataError: an empty list or an empty item.
    """
    parts = [p.strip() for p in (paths.split(",") if isinstance(paths, str) else paths)]
    if not all(parts) or not parts:
        raise DataError(f"{flag} {paths!r} has an empty item; give files, folders, URLs or hub names, comma separated")
    return parts


def parse_probs(probs: str | list[float] | None, count: int, flag: str = "--prompt_data") -> list[float] | None:
    """Probabilities of ``count`` sources from ``0.7,0.3``.

    Raises:
        DataError: wrong count, not positive numbers, or a sum other than 1.
    """
    if probs is None:
        return None
    flag = f"{flag}_probs"
    try:
        values = [float(p) for p in (probs.split(",") if isinstance(probs, str) else probs)]
    except ValueError as error:
        raise DataError(f"{flag} {probs!r}: numbers are needed, comma separated, e.g. 0.7,0.3") from error
    if len(values) != count:
        raise DataError(f"{flag} {probs!r} has {len(values)} numbers for {count} sources; give one for each")
    if not all(0 < v <= 1 for v in values):
        raise DataError(f"{flag} {probs!r}: each must be over 0 and at most 1; leave a source out to not use it")
    if abs(sum(values) - 1) > 1e-6:
        raise DataError(f"{flag} {probs!r} sums to {sum(values):g}; it must be 1")
    return values


def check_data_paths(
    paths: str | list[str], probs: str | list[float] | None = None, *, flag: str = "--prompt_data"
) -> None:
    """Check sources without reading them and without the network: for the start of a run, before models load.

    Local paths must exist and have a format; URLs must have a known scheme; other words must look like hub names.

    Raises:
        DataError: naming the flag and the source.
    """
    sources = split_paths(paths, flag)
    parse_probs(probs, len(sources), flag)
    for source in sources:
        _classify(source, flag)


def blending_datasets(
    paths: str | list[str],
    probs: str | list[float] | None = None,
    strategy: Any = None,
    seed: int = 42,
    max_count: int | float = 5_000_000,
    return_eval: bool = False,
    stopping_strategy: StoppingStrategy = "all_exhausted",
    train_split: str = "train",
    *,
    flag: str = "--prompt_data",
) -> Dataset:
    """Load one or several sources into one dataset.

    Args:
        paths: comma separated: files (JSON, JSONL, CSV, TSV, parquet, arrow), folders of them, folders made by
            ``save_to_disk``, fsspec URLs of these, hub names (``owner/name``, ``owner/name@config``).
        probs: probability of each source, comma separated, sum 1. None: one source after the other, each row once.
        strategy: its rank 0 logs; all ranks load alike.
        seed: of the blend.
        max_count: rows taken from each source, at most.
        return_eval: of the seed's signature; only False. Call again with another ``train_split`` for the other data.
        stopping_strategy: with ``probs``: ``all_exhausted`` ends when each source was used whole (rows of the others
            then repeat), ``first_exhausted`` when the first one is (rows of the others are then unused). Both logged.
        train_split: the split to read, of sources that have splits. A single file has none: all its rows are read.
        flag: name of the option, for messages (``--pretrain_data``).

    Returns:
        The rows, with the hidden column ``__origin__`` (file and line).

    Raises:
        DataError: a source that is missing, unreadable, empty or without the split; bad probabilities.
    """
    if return_eval:
        raise DataError("return_eval: call blending_datasets once per split, with train_split='test' for the second")
    limit = int(max_count)
    if limit < 1:
        raise DataError(f"max_count is {max_count}; at least 1")
    if stopping_strategy not in ("all_exhausted", "first_exhausted"):
        raise DataError(f"stopping_strategy is {stopping_strategy!r}; all_exhausted or first_exhausted")
    sources = split_paths(paths, flag)
    weights = parse_probs(probs, len(sources), flag)
    parts = [_load_source(source, train_split, limit, flag) for source in sources]
    counts = [len(part) for part in parts]
    blend = concatenate(parts, sources)
    drawn = counts
    if weights is not None:
        indices, drawn = interleave_indices(counts, weights, seed, stopping_strategy)
        blend = blend.select(indices)
    if strategy is None or strategy.is_rank_0():
        for source, count, used in zip(sources, counts, drawn):
            level = logging.INFO if used == count else logging.WARNING
            logger.log(level, "%s %s: %d rows, %d used%s", flag, source, count, used, " (repeats)" * (used > count))
    return blend


def interleave_indices(
    counts: list[int], probs: list[float], seed: int, stopping_strategy: StoppingStrategy
) -> tuple[np.ndarray, list[int]]:
    """Row numbers, in the concatenation of the sources, of a random blend; each source in its own order.

    Args:
        counts: rows of each source, all at least 1.
        probs: probability of each source, all positive.
        seed: of the draws.
        stopping_strategy: see :func:`blending_datasets`.

    Returns:
        (N,) row numbers, and how many rows of each source were drawn (more than it has: repeats).
    """
    rng = np.random.default_rng(seed)
    sizes = np.asarray(counts)
    draws = np.empty(0, dtype=np.int64)
    while True:
        draws = np.concatenate([draws, rng.choice(len(counts), size=1024 + int(sizes.sum()), p=probs)])
        # For each source, the draw that takes its last row; len(draws) if it is not reached yet.
        ends = []
        for source, size in enumerate(counts):
            positions = np.flatnonzero(draws == source)
            ends.append(int(positions[size - 1]) if len(positions) >= size else len(draws))
        end = max(ends) if stopping_strategy == "all_exhausted" else min(ends)
        if end < len(draws):
            break
    draws = draws[: end + 1]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    indices = np.empty_like(draws)
    for source, size in enumerate(counts):
        mine = np.flatnonzero(draws == source)
        indices[mine] = starts[source] + np.arange(len(mine)) % size
    return indices, [int((draws == source).sum()) for source in range(len(counts))]


def concatenate(parts: list[Dataset], names: list[str]) -> Dataset:
    """One dataset after the other. Columns that some lack are None there; columns of differing types become JSON.

    Raises:
        DataError: a column whose types differ and that JSON cannot hold (bytes, dates).
    """
    from datasets import concatenate_datasets

    if len(parts) == 1:
        return parts[0]
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
        if column not in dataset.column_names or isinstance(dataset.features[column], Json):
            continue
        values = list(dataset[column])
        try:
            converted = Dataset.from_dict({column: json_texts(values)}, features=Features({column: Json()}))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"column {column!r} has another type in {name} than in the other sources, and cannot be held as JSON: "
                f"{error}; convert it, or take it out"
            ) from error
        dataset = concatenate_datasets([dataset.remove_columns(column), converted], axis=1)
    return dataset


def _classify(source: str, flag: str) -> Literal["file", "folder", "url", "hub"]:
    """What a source is, by its form and by what is on this machine. No network."""
    if is_url(source) and not source.startswith(("file://", "local://")):
        try:
            check_scheme(source, flag)
        except StagingError as error:
            raise DataError(str(error)) from error
        return "url"
    path = os.path.expanduser(stage_to_local(source))
    if os.path.isdir(path):
        return "folder"
    if os.path.isfile(path):
        if file_format(path) is None:
            raise DataError(
                f"{flag} {source}: unknown format; the name must end in one of {', '.join(FORMATS)} "
                f"(JSON and CSV also with {', '.join(COMPRESSED)})"
            )
        return "file"
    if is_url(source) or file_format(source) or not _HUB_NAME.fullmatch(source):
        raise DataError(f"{flag} {source}: no such file or folder (looked in {os.getcwd()})")
    return "hub"


def _load_source(source: str, split: str, limit: int, flag: str) -> Dataset:
    kind = _classify(source, flag)
    if kind == "hub":
        dataset = _load_hub(source, split, flag)
    else:
        try:
            path = os.path.expanduser(stage_to_local(source))
        except StagingError as error:
            raise DataError(f"{flag}: {error}") from error
        if os.path.isdir(path):
            dataset = _load_folder(Path(path), source, split, limit, flag)
        else:
            dataset = read_file(path, shown_as=source, limit=limit)
    if len(dataset) == 0:
        raise DataError(f"{flag} {source} is empty: no rows")
    return dataset.select(range(min(limit, len(dataset))))


def _load_hub(source: str, split: str, flag: str) -> Dataset:
    import datasets

    name, _, config = source.partition("@")
    try:
        dataset = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # datasets, the hub client and the network each raise their own kinds
        raise DataError(
            f"{flag} {source}: no such file or folder here, and as a hub dataset it cannot be loaded "
            f"(split {split!r}): {type(error).__name__}: {error}"
        ) from error
    return with_origins(dataset, lambda i: f"{source}[{split}], row {i + 1}")


def _load_folder(path: Path, source: str, split: str, limit: int, flag: str) -> Dataset:
    """A folder made by ``save_to_disk``, or one of data files, those of the split by their names."""
    from datasets import DatasetDict, load_from_disk

    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        saved = load_from_disk(str(path))
        if isinstance(saved, DatasetDict):
            if split not in saved:
                raise DataError(f"{flag} {source} has no split {split!r}; its splits: {', '.join(saved)}")
            return with_origins(saved[split], lambda i: f"{source}[{split}], row {i + 1}")
        return with_origins(saved, lambda i: f"{source}, row {i + 1}")
    files = _files_of_split(path, source, split, flag)
    parts: list[Dataset] = []
    for file in files:
        part = read_file(file, shown_as=f"{source.rstrip('/')}/{file.relative_to(path)}", limit=limit)
        limit -= len(part)
        if len(part):
            parts.append(part)
        if limit <= 0:
            break
    if not parts:
        raise DataError(f"{flag} {source} is empty: no rows in {', '.join(f.name for f in files)}")
    return concatenate(parts, [str(f) for f in files])


def _files_of_split(path: Path, source: str, split: str, flag: str) -> list[Path]:
    """Data files whose name (or folder) has the split's name as a word; files that name no split are of ``train``."""
    files = sorted(
        f
        for f in path.rglob("*")
        if f.is_file() and file_format(f) and not any(part.startswith(".") for part in f.relative_to(path).parts)
    )
    if not files:
        raise DataError(f"{flag} {source} has no data files ({', '.join(FORMATS)}) and is no saved dataset")
    wanted = _SPLIT_WORDS.get(split.lower(), split.lower())
    named = {f: _split_named_by(f.relative_to(path), split.lower()) for f in files}
    chosen = [f for f in files if named[f] == wanted]
    if not chosen and split == "train":
        chosen = [f for f in files if named[f] is None]
    if not chosen:
        listed = ", ".join(str(f.relative_to(path)) for f in files[:10])
        raise DataError(f"{flag} {source} has no file of the split {split!r}; its files: {listed}")
    ignored = [str(f.relative_to(path)) for f in files if f not in chosen]
    logger.info("%s %s, split %s: %d files%s", flag, source, split, len(chosen), f"; not {ignored}" if ignored else "")
    return chosen


def _split_named_by(relative: Path, split: str) -> str | None:
    """The split that a file's path names; its own name says more than its folders."""
    for part in reversed(relative.parts):
        if re.search(rf"(?<![a-z0-9]){re.escape(split)}(?![a-z0-9])", part.lower()):
            return _SPLIT_WORDS.get(split, split)
        for word in re.split(r"[^a-z0-9]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return None
