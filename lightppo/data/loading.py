"""From ``--prompt_data a.jsonl,folder,owner/name`` to one dataset: finding sources, splits, blending."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lightppo.data.readers import COMPRESSED, FORMATS, file_format, json_texts, read_file, with_origins
from lightppo.data.staging import check_scheme, is_url, stage_to_local
from lightppo.errors import DataError, StagingError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

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
