"""Checking and tokenising every row of a dataset once, before training: bad rows by policy, counts, compact ids."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import BadRowError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

BadRowPolicy = Literal["error", "skip"]
CHUNK_ROWS = 1000  # rows tokenised in one call
NAMED_ROWS = 5  # skipped rows that the log names


class Encoded(NamedTuple):
    """One usable row: its ids, how many of them are the prompt, and whether it was cut."""

    token_ids: list[int]
    prompt_length: int
    truncated: bool


class Dropped(NamedTuple):
    """One row left out by an option that asks for it (``--truncation drop``)."""

    reason: str


Outcome = Encoded | Dropped | BadRowError
EncodeChunk = Callable[[list[dict[str, Any]]], list[Outcome]]


@dataclass
class DatasetReport:
    """What became of the rows.

    Attributes:
        rows: rows in the data.
        kept: rows that are used.
        truncated: rows among them that were cut.
        dropped: rows left out, by reason: missing, wrong_type, empty, overlong, template.
    """

    rows: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(self.dropped.items())) or "0"
        return f"{self.rows} rows: {self.kept} kept, {self.truncated} of them truncated; dropped: {dropped}"


@dataclass(frozen=True)
class PreparedRows:
    """Kept rows: ids in one flat array, so that a million prompts do not become a billion Python objects.

    Attributes:
        row_numbers: (N,) number of each kept row in the dataset.
        prompt_lengths: (N,) how many of its ids are the prompt.
        truncated: (N,) whether it was cut.
        offsets: (N + 1,) where its ids begin in ``flat_ids``.
        flat_ids: (total,) ids of all rows.
        report: the counts.
    """

    row_numbers: np.ndarray
    prompt_lengths: np.ndarray
    truncated: np.ndarray
    offsets: np.ndarray
    flat_ids: np.ndarray
    report: DatasetReport

    def __len__(self) -> int:
        return len(self.row_numbers)

    def token_ids(self, position: int) -> list[int]:
        """Ids of the kept row at this position."""
        return self.flat_ids[self.offsets[position] : self.offsets[position + 1]].tolist()


def origin_of(row: Mapping[str, Any], number: int) -> str:
    """Where a row came from: file and line where the loader kept them, else its number in the dataset, from 1."""
    return row.get(ORIGIN_COLUMN) or f"row {number + 1}"


def setting(given: Any, strategy: Any, name: str, default: Any) -> Any:
    """A keyword where given, else ``strategy.args.<name>`` (scripts in the seed's style), else the default."""
    if given is not None:
        return given
    value = getattr(getattr(strategy, "args", None), name, None)
    return default if value is None else value


def check_dataset(dataset: Any) -> None:
    """Refuse what is not a non-empty map-style dataset.

    Raises:
        DataError: no rows.
        TypeError: not a ``datasets.Dataset``.
    """
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__"):
        raise TypeError(f"a datasets.Dataset is needed (see blending_datasets), not {type(dataset).__name__}")
    if len(dataset) == 0:
        raise DataError("the dataset is empty: no rows in --prompt_data / --eval_data / --pretrain_data")


def prepare_rows(
    dataset: Dataset,
    columns: list[str],
    encode_chunk: EncodeChunk,
    *,
    on_bad_row: BadRowPolicy = "error",
    num_workers: int = 0,
) -> PreparedRows:
    """Encode all rows in order.

    Args:
        dataset: the rows.
        columns: the columns that ``encode_chunk`` reads.
        encode_chunk: rows -> one outcome each.
        on_bad_row: ``error`` raises at the first bad row; ``skip`` leaves bad rows out, counted and logged.
        num_workers: processes that encode; 0 or 1 for this one.

    Raises:
        DataError: a bad row (under ``error``), named by file and line; or no row left.
    """
    if on_bad_row not in ("error", "skip"):
        raise DataError(f"--on_bad_row is {on_bad_row!r}; error or skip")
    check_dataset(dataset)
    report = DatasetReport(rows=len(dataset))
    dropped: Counter[str] = Counter()
    skipped: list[str] = []
    numbers, lengths, prompt_lengths, truncated = [], [], [], []
    flat: list[np.ndarray] = []
    for number, outcome in enumerate(_outcomes(dataset.select_columns(columns), encode_chunk, num_workers)):
        if isinstance(outcome, Encoded):
            numbers.append(number)
            lengths.append(len(outcome.token_ids))
            prompt_lengths.append(outcome.prompt_length)
            truncated.append(outcome.truncated)
            flat.append(np.asarray(outcome.token_ids, dtype=np.int32))
            continue
        dropped[outcome.reason] += 1
        if isinstance(outcome, BadRowError):
            message = f"{origin_of(dataset[number], number)}: {outcome}"
            if on_bad_row == "error":
                raise DataError(f"{message} (mend the row, or leave such rows out with --on_bad_row skip)") from outcome
            if len(skipped) < NAMED_ROWS:
                skipped.append(message)
    report.kept, report.truncated, report.dropped = len(numbers), sum(truncated), dict(dropped)
    if not numbers:
        raise DataError(f"no row is left to train on. {report}" + "".join(f"\n  {m}" for m in skipped))
    if skipped:
        logger.warning("bad rows skipped, the first of them:\n  %s", "\n  ".join(skipped))
    if report.kept < report.rows or report.truncated:
        logger.warning("%s", report)
    return PreparedRows(
        row_numbers=np.asarray(numbers, dtype=np.int64),
        prompt_lengths=np.asarray(prompt_lengths, dtype=np.int64),
        truncated=np.asarray(truncated, dtype=bool),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        flat_ids=np.concatenate(flat),
        report=report,
    )


def _outcomes(dataset: Dataset, encode_chunk: EncodeChunk, num_workers: int) -> Iterator[Outcome]:
    starts = range(0, len(dataset), CHUNK_ROWS)
    if num_workers <= 1:
        for start in starts:
            yield from _encode_from(start, dataset, encode_chunk)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # fork: the dataset and the tokenizer are inherited, not pickled; the executor notices a killed worker.
    context = get_context("fork")
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start_worker, initargs=(dataset, encode_chunk)
    ) as pool:
        for outcomes in pool.map(_work, starts):
            yield from outcomes


def _encode_from(start: int, dataset: Dataset, encode_chunk: EncodeChunk) -> list[Outcome]:
    columns = dataset[start : start + CHUNK_ROWS]
    size = min(CHUNK_ROWS, len(dataset) - start)
    return encode_chunk([{name: values[i] for name, values in columns.items()} for i in range(size)])


_worker_job: tuple[Dataset, EncodeChunk] | None = None


def _start_worker(dataset: Dataset, encode_chunk: EncodeChunk) -> None:
    global _worker_job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads inside forked workers would only compete
    _worker_job = (dataset, encode_chunk)


def _work(start: int) -> list[Outcome]:
    if _worker_job is None:
        raise RuntimeError("the worker process was not initialised")
    return _encode_from(start, *_worker_job)
