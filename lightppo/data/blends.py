"""The rows of an option: files, folders, the hub, URLs, saved data sets; blends by probabilities; held-out rows.

``--prompt_data a.jsonl,folder,owner/name`` becomes one dataset.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lightppo.data.file_formats import (
    FORMATS,
    file_format,
    known_format,
    read_file,
    with_origins,
)
from lightppo.data.folders import check_on_hub, mistyped_path
from lightppo.data.prepared_rows import check_choice
from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import DataError, StagingError
from lightppo.files import check_file_url, is_url, stage_to_local
from lightppo.redaction import shown_url

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

StoppingStrategy = Literal["all_exhausted", "first_exhausted"]

SPLIT_WORDS = {
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
"""Words in the names of files, and the splits that they stand for."""

_JOINING_COLUMNS = ("query_id", "id")  # of two files; the first that both have
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w.-]+)?")


def read_rows(config: Any, name: str, split: str, strategy: Any) -> Dataset:
    """Read the rows of an option, blended as ``--NAME_probs`` says; of prompts with their ``--prompt_metadata``."""
    options = config.flat()
    probs = options.get(f"{name}_probs")
    seed = config.strategy.seed
    rows = blending_datasets(
        options[name], probs, strategy, seed, train_split=split, flag=f"--{name}"
    )
    if name not in ("prompt_data", "eval_data"):
        return rows
    rows = with_metadata(rows, options["prompt_metadata"])
    # Without such a column nothing would tell several files apart.
    if (
        name == "eval_data"
        and "," in options[name]
        and options["data_source_key"] not in rows.features
    ):
        source_names = [
            Path(re.sub(r"(:\d+|, row \d+)$", "", origin)).stem for origin in rows[ORIGIN_COLUMN]
        ]
        rows = rows.add_column(options["data_source_key"], source_names)
    return rows


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
    from lightppo.data.arrow_tables import concatenate

    if return_eval is None:
        of_script = getattr(strategy, "args", None) is not None
        return_eval = eval_split is not None or (of_script and train_split is None)
    # Scripts that split a data set call its option so.
    flag = flag or ("--dataset" if return_eval else "--prompt_data")
    if max_count < 1:
        raise DataError(f"max_count is {max_count}; at least 1")
    check_choice("stopping_strategy", stopping_strategy, StoppingStrategy)
    sources, weights = _checked_sources(paths, probs, flag)
    limit = int(max_count)
    source_datasets = [
        load_source(source, train_split or "train", flag, limit) for source in sources
    ]
    counts = [len(dataset) for dataset in source_datasets]
    blend = concatenate(source_datasets, sources)
    used_counts = counts
    if weights is not None:
        indices, used_counts = interleave_indices(counts, weights, seed, stopping_strategy)
        blend = blend.select(indices)
    if strategy is None or strategy.is_rank_0():
        for source, count, used_count in zip(sources, counts, used_counts):
            level = logging.INFO if used_count == count else logging.WARNING
            repeats = " (repeats)" * (used_count > count)
            message = f"{flag} {shown_url(source)}: {count} rows, {used_count} used{repeats}"
            logger.log(level, "%s", message)
    if return_eval:
        return blend, held_out_rows(
            sources, source_datasets, strategy, limit, eval_split or "test", flag
        )
    return blend


def held_out_rows(
    sources: list[str], train_rows: list[Dataset], strategy: Any, limit: int, split: str, flag: str
) -> Dataset:
    """Return the rows of ``split``, each once.

    Of a source without that split these are the first 3 % of its training rows, as in OpenRLHF. The model is trained on
    them, too, so a warning says it.
    """
    from lightppo.data.arrow_tables import concatenate

    held_out_datasets = []
    for source, rows in zip(sources, train_rows):
        if has_split(source, split, flag):
            held_out_datasets.append(load_source(source, split, flag, limit))
            continue
        held_out_datasets.append(rows.select(range(max(1, int(len(rows) * 0.03)))))
        if strategy is None or strategy.is_rank_0():
            log_text = "%s %s has no split %r: evaluation is on %d of the rows that are trained on"
            logger.warning(log_text, flag, shown_url(source), split, len(held_out_datasets[-1]))
    return concatenate(held_out_datasets, sources)


def has_split(source: str, split: str, flag: str) -> bool:
    """Return whether a source has rows of this split; a single file, and a folder of one saved dataset, have no splits."""
    if _is_hub_name(source, flag):
        import datasets

        hub_name, _, config = source.partition("@")
        return split in datasets.get_dataset_split_names(hub_name, config or None)
    local_path = Path(stage_to_local(source)).expanduser()
    if not local_path.is_dir() or (local_path / "state.json").exists():
        return False
    if (splits := local_path / "dataset_dict.json").exists():
        return split in json.loads(splits.read_text())["splits"]
    return bool(_matching_files(_data_files(local_path), split))


def with_metadata(rows: Dataset, metadata_path: str | None) -> Dataset:
    """Add the further columns of the file's row of the same id (``query_id`` or ``id``); DataError if one is missing."""
    if metadata_path is None:
        return rows
    from datasets import concatenate_datasets

    from lightppo.data.arrow_tables import exactly_read

    metadata = load_source(metadata_path, "train", "--prompt_metadata")
    option = f"--prompt_metadata {metadata_path}"
    id_column = _joining_column(rows, metadata, option)
    row_numbers: dict[str, int] = {}
    for number, (row_id, origin) in enumerate(zip(metadata[id_column], metadata[ORIGIN_COLUMN])):
        if row_numbers.setdefault(str(row_id), number) != number:
            raise DataError(f"--prompt_metadata {origin}: {id_column} {row_id!r} is there twice")
    for row_id, origin in zip(rows[id_column], rows[ORIGIN_COLUMN]):
        if str(row_id) not in row_numbers:
            raise DataError(f"{origin}: {id_column} {row_id!r} is not in {option}")
    new_columns = [column for column in metadata.column_names if column not in rows.column_names]
    matching_rows = metadata.select_columns(new_columns).select(
        [row_numbers[str(row_id)] for row_id in rows[id_column]]
    )
    return exactly_read(concatenate_datasets([rows, matching_rows], axis=1))


def _joining_column(rows: Dataset, metadata: Dataset, option: str) -> str:
    """Return the column by which the rows of ``--prompt_metadata`` are joined; DataError if there is none."""
    for column in _JOINING_COLUMNS:
        if column in rows.column_names and column in metadata.column_names:
            return column
    for source, dataset in {"it": metadata, "the prompts": rows}.items():
        if not set(_JOINING_COLUMNS) & set(dataset.column_names):
            names = " or ".join(map(repr, _JOINING_COLUMNS))
            raise DataError(f"{option}: no column {names} in {source}, by which rows are joined")
    raise DataError(
        f"{option}: its ids and those of the prompts have different names: call both 'query_id', or both 'id'"
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
    """Return the sources, and the probability of each; None if they have none."""
    if isinstance(paths, str):
        sources = paths.split(",")
    else:
        sources = paths
    sources = [source.strip() for source in sources]
    if not all(sources) or not sources:
        raise DataError(
            f"{flag} {paths!r} has an empty item; give files, folders, URLs or hub names, comma separated"
        )
    if probs is None:
        return sources, None
    try:
        weights = [
            float(probability)
            for probability in (probs.split(",") if isinstance(probs, str) else probs)
        ]
    except ValueError as error:
        raise DataError(
            f"{flag}_probs {probs!r}: numbers are needed, comma separated, e.g. 0.7,0.3"
        ) from error
    if len(weights) != len(sources):
        problem = f"has {len(weights)} numbers for {len(sources)} sources; give one for each"
    elif not all(0 < weight <= 1 for weight in weights):
        problem = "has a number that is not over 0 and at most 1; leave a source out to not use it"
    elif abs(sum(weights) - 1) > 1e-6:
        problem = f"sums to {sum(weights):g}; it must be 1"
    else:
        return sources, weights
    raise DataError(f"{flag}_probs {probs!r} {problem}")


def interleave_indices(
    counts: list[int], probs: list[float], seed: int, stopping_strategy: StoppingStrategy
) -> tuple[np.ndarray, list[int]]:
    """Draw row numbers of a blend in the concatenated sources; return also how many rows of each source."""
    from datasets import Dataset, interleave_datasets

    ends = np.cumsum(counts)
    row_numbers = [
        Dataset.from_dict({"row": np.arange(end - count, end)}) for count, end in zip(counts, ends)
    ]
    blend = interleave_datasets(row_numbers, probs, seed, stopping_strategy=stopping_strategy)
    indices = blend.with_format("numpy")["row"][:]
    sources = np.searchsorted(ends, indices, side="right")
    return indices, np.bincount(sources, minlength=len(counts)).tolist()


# -- one source ------------------------------------------------------------------------------------------------------


def _is_hub_name(source: str, flag: str) -> bool:
    """Return False for URLs, files and folders of this machine; DataError if it is none of these. No network."""
    if is_url(source):
        check_file_url(source, flag)
        return False
    local_path = Path(source.split("://", 1)[-1]).expanduser()
    if local_path.is_file():
        known_format(local_path, f"{flag} {source}")
    if local_path.exists():
        return False
    if "://" in source or file_format(source) or not _HUB_NAME.fullmatch(source):
        words = source.split()
        suggestion = mistyped_path(source)
        if len(words) > 1 and all(Path(word).expanduser().exists() for word in words):
            suggestion = f"; separate several sources with commas: {flag} {','.join(words)}"
        raise DataError(
            f"{flag} {source}: no such file or folder (looked in {os.getcwd()}){suggestion}"
        )
    return True


def load_source(source: str, split: str, flag: str, limit: int = sys.maxsize) -> Dataset:
    """Load at most ``limit`` rows of a file, a folder or a hub name that fit the split. DataError names the source."""
    from lightppo.data.arrow_tables import exactly_read

    if _is_hub_name(source, flag):
        dataset = _load_hub(source, split, flag)
    else:
        try:
            local_path = Path(stage_to_local(source)).expanduser()
        except StagingError as error:
            raise DataError(f"{flag}: {error}") from error
        if (local_path / "dataset_dict.json").exists() or (local_path / "state.json").exists():
            dataset = _load_saved(local_path, shown_url(source), split, flag)
        else:
            dataset = _load_files(local_path, shown_url(source), split, flag, limit)
    if len(dataset) == 0:
        raise DataError(f"{flag} {shown_url(source)} is empty: no rows")
    return exactly_read(dataset.select(range(min(limit, len(dataset)))))


def first_rows(source: str, split: str, flag: str, row_count: int = 20) -> Dataset | None:
    """Read the first rows of a file or folder of this machine; None for URLs and hub names, copied as a whole."""
    if is_url(source) or _is_hub_name(source, flag):
        return None
    return load_source(source, split, flag, row_count)


def _load_hub(source: str, split: str, flag: str) -> Dataset:
    import datasets

    hub_name, _, config = source.partition("@")
    check_on_hub(hub_name, "dataset", flag)
    try:
        dataset = datasets.load_dataset(hub_name, config or None, split=split)
    except Exception as error:
        # datasets, the hub client and the network raise errors without a common base
        problem = (
            f"no such file or folder here, and no hub dataset that can be loaded (split {split!r})"
        )
        raise DataError(f"{flag} {source}: {problem}: {type(error).__name__}: {error}") from error
    return with_origins(dataset, f"{source}[{split}]")


def _load_saved(folder: Path, shown_name: str, split: str, flag: str) -> Dataset:
    """Load what is in a folder made by ``save_to_disk``."""
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(folder))
    if not isinstance(saved, DatasetDict):
        return with_origins(saved, shown_name)
    if split not in saved:
        raise DataError(
            f"{flag} {shown_name} has no split {split!r}; its splits: {', '.join(saved)}"
        )
    return with_origins(saved[split], f"{shown_name}[{split}]")


def _load_files(path: Path, shown_name: str, split: str, flag: str, limit: int) -> Dataset:
    """Load a file, or the files of a folder that fit the split."""
    from lightppo.data.arrow_tables import concatenate

    if not path.is_dir():
        return read_file(path, shown_as=shown_name, limit=limit)
    matching_files = _files_of_split(path, shown_name, split, flag)
    rows_by_name: dict[str, Dataset] = {}
    for file in matching_files:
        file_name = f"{shown_name.rstrip('/')}/{file}"
        file_rows = read_file(path / file, shown_as=file_name, limit=limit)
        limit -= len(file_rows)
        if len(file_rows):
            rows_by_name[file_name] = file_rows
        if limit == 0:
            break
    if not rows_by_name:
        raise DataError(
            f"{flag} {shown_name} is empty: no rows {' '.join(map(str, matching_files))}"
        )
    return concatenate(list(rows_by_name.values()), list(rows_by_name))


def _files_of_split(folder: Path, shown_name: str, split: str, flag: str) -> list[Path]:
    """Return data files with the split's name in their path as a word; for ``train`` else those that name none."""
    data_files = _data_files(folder)
    if not data_files:
        raise DataError(f"{flag} {shown_name} has no data files ({', '.join(FORMATS)})")
    matching = _matching_files(data_files, split)
    if not matching and split == "train":
        matching = [
            data_file for data_file in data_files if split_named_by(data_file, split) is None
        ]
    if not matching:
        listed = ", ".join(map(str, data_files[:10]))
        raise DataError(
            f"{flag} {shown_name} has no file of the split {split!r}; its files: {listed}"
        )
    ignored = [str(data_file) for data_file in data_files if data_file not in matching]
    ignored_text = f"; not {ignored}" if ignored else ""
    logger.info("%s %s, split %s: %d files%s", flag, shown_name, split, len(matching), ignored_text)
    return matching


def _data_files(folder: Path) -> list[Path]:
    """Return the data files below a folder, by their paths in it; hidden ones are none."""
    all_files = [
        data_file.relative_to(folder) for data_file in folder.rglob("*") if data_file.is_file()
    ]
    return sorted(
        data_file
        for data_file in all_files
        if file_format(data_file)
        and not any(path_part.startswith(".") for path_part in data_file.parts)
    )


def _matching_files(files: list[Path], split: str) -> list[Path]:
    split = split.lower()
    return [file for file in files if split_named_by(file, split) == SPLIT_WORDS.get(split, split)]


def split_named_by(relative_path: Path, split: str) -> str | None:
    """Return the split that a file's path names; the file name goes before its folders."""
    for path_part in reversed(relative_path.parts):
        if re.search(rf"(?<![a-z0-9]){re.escape(split)}(?![a-z0-9])", path_part.lower()):
            return SPLIT_WORDS.get(split, split)
        for word in re.split(r"[^a-z0-9]+", path_part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None
