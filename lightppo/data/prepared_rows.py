"""All rows of a dataset, encoded once before training: by all ranks together, and by several processes of a rank."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import BadRowError, DataError, UserError
from lightppo.ranks import Alone, Ranks

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

BadRowPolicy = Literal["error", "skip"]
CHUNK_ROWS = 1000  # rows tokenised in one call
NAMED_ROWS = 5  # skipped rows that the log names


class Encoded(NamedTuple):
    """One usable row."""

    token_ids: Any  # prompt and completion
    prompt_length: int  # how many of these tokens are the prompt
    truncated: bool
    first_answer: int = 0  # of a pair: how many tokens after the prompt are its first answer
    # Whether each token is learned; nothing where all behind the prompt are.
    learned: Any = ()


# A row that is used, the reason why an option leaves it out (``--truncation drop``), or why it is bad.
Outcome = Encoded | str | BadRowError
EncodeChunk = Callable[[list[dict[str, Any]]], list[Outcome]]


@dataclass
class DatasetReport:
    """How many rows the data has, and how they were treated."""

    rows: int = 0
    kept: int = 0
    truncated: int = 0  # rows kept, but cut
    # by reason: missing, wrong_type, empty, overlong, template
    dropped: dict[str, int] = field(default_factory=dict)
    # each bad row that was skipped, with its origin
    bad: list[str] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(self.dropped.items())) or "0"
        return f"{self.rows} rows: {self.kept} kept, {self.truncated} of them truncated; dropped: {dropped}"

    def warn(self) -> None:
        """Log which rows are not as they were; DataError if none is left."""
        first = "".join(f"\n  {text}" for text in self.bad[:NAMED_ROWS])
        if not self.kept:
            raise DataError(f"no row is left to train on. {self}{first}")
        if self.bad:
            logger.warning("bad rows skipped, the first of them:%s", first)
        logger.warning("%s", self)


@dataclass(frozen=True)
class PreparedRows:
    """The N kept rows: ids in one flat array, because a million prompts as lists would be a billion Python objects."""

    row_numbers: np.ndarray  # (N,) in the dataset
    prompt_lengths: np.ndarray  # (N,) how many ids of a row are the prompt
    truncated: np.ndarray  # (N,) whether the row was cut
    # (N,) how many ids after a row's prompt are the first answer of a pair
    first_answers: np.ndarray
    offsets: np.ndarray  # (N + 1,) where a row's ids begin in flat_ids
    flat_ids: np.ndarray  # of all rows
    flat_learned: (
        np.ndarray
    )  # whether each of these ids is learned; none, where all behind a prompt are
    report: DatasetReport

    def __len__(self) -> int:
        return len(self.row_numbers)

    def token_ids(self, position: int) -> list[int]:
        """Return the ids of the kept row at this position."""
        return self.flat_ids[self.offsets[position] : self.offsets[position + 1]].tolist()

    def learned(self, position: int) -> np.ndarray:
        """Return whether each id of the kept row at this position is learned. (S,)"""
        start = self.offsets[position]
        end = self.offsets[position + 1]
        if len(self.flat_learned):
            return self.flat_learned[start:end]
        return np.arange(end - start) >= self.prompt_lengths[position]


def origin_of(row: Mapping[str, Any], number: int) -> str:
    """Return a row's file and line if the loader kept them, else its number in the dataset, from 1."""
    return row.get(ORIGIN_COLUMN) or f"row {number + 1}"


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise DataError unless the value is one of a ``Literal``."""
    if value not in get_args(choices):
        raise DataError(f"{name} is {value!r}; one of {', '.join(get_args(choices))}")


def columns_of(dataset: Any) -> list[str]:
    """Return the names of columns; refuse anything but a non-empty map-style dataset."""
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__"):
        kind = type(dataset).__name__
        raise TypeError(f"a datasets.Dataset is needed (see blending_datasets), not {kind}")
    if len(dataset) == 0:
        raise DataError(
            "the dataset is empty: no rows in --prompt_data / --eval_data / --pretrain_data"
        )
    return dataset.column_names


def prepare_rows(
    dataset: Dataset,
    columns: list[str],
    encode_chunk: EncodeChunk,
    *,
    on_bad_row: BadRowPolicy = "error",
    num_workers: int = 0,
    ranks: Ranks | None = None,
) -> PreparedRows:
    """Encode all rows in order; ``columns`` are what ``encode_chunk`` (rows -> one outcome each) reads.

    ``on_bad_row`` ``error`` raises at the first bad row, naming file and line; ``skip`` counts and logs bad rows.
    ``num_workers`` processes of each rank encode, and the ``ranks`` share the rows out. Collective if there are several.
    """
    check_choice("--on_bad_row", on_bad_row, BadRowPolicy)
    rows = DatasetRows(dataset, columns, encode_chunk, on_bad_row)
    arrays, dropped, bad = encode_by_shares(rows, num_workers, ranks or Alone())
    lengths = arrays.pop("lengths")
    truncated = int(arrays["truncated"].sum())
    report = DatasetReport(len(dataset), len(lengths), truncated, dict(dropped), bad)
    if report.kept < report.rows or report.truncated:
        report.warn()
    return PreparedRows(offsets=np.cumsum([0, *lengths], dtype=np.int64), report=report, **arrays)


# Arrays of the rows that are kept, why others are not, and the text of each bad one.
EncodedRows = tuple[dict[str, np.ndarray], Counter[str], list[str]]


@dataclass(frozen=True)
class DatasetRows:
    """All rows of a dataset, and how one of them is encoded."""

    dataset: Dataset
    columns: list[str]
    encode_chunk: EncodeChunk
    on_bad_row: BadRowPolicy

    def outcomes(self, rows: range) -> Iterator[Outcome]:
        """Yield the outcomes of these rows, chunk by chunk."""
        read = self.dataset.select_columns(self.columns)
        for start in range(rows.start, rows.stop, CHUNK_ROWS):
            chunk = range(start, min(start + CHUNK_ROWS, rows.stop))
            yield from self.encode_chunk(read.__getitems__(chunk))

    def encoded(self, rows: range, outcomes: Iterable[Outcome]) -> EncodedRows:
        """Encode these rows. DataError names the first bad one, unless bad rows are skipped."""
        dropped: Counter[str] = Counter()
        bad: list[str] = []
        used: dict[int, Encoded] = {}  # by row number
        for number, outcome in zip(rows, outcomes):
            if isinstance(outcome, Encoded):
                ids = np.asarray(outcome.token_ids, dtype=np.int32)
                flags = np.asarray(outcome.learned, dtype=bool)[: len(ids)]
                used[number] = outcome._replace(token_ids=ids, learned=flags)
            elif isinstance(outcome, BadRowError):
                dropped[outcome.reason] += 1
                bad.append(self._refused(number, outcome))
            else:
                dropped[outcome] += 1
        arrays = {
            "row_numbers": np.array(list(used), dtype=np.int64),
            "prompt_lengths": np.array(
                [row.prompt_length for row in used.values()], dtype=np.int64
            ),
            "truncated": np.array([row.truncated for row in used.values()], dtype=bool),
            "first_answers": np.array([row.first_answer for row in used.values()], dtype=np.int64),
            "lengths": np.array([len(row.token_ids) for row in used.values()], dtype=np.int64),
            "flat_ids": np.concatenate([np.int32([]), *(row.token_ids for row in used.values())]),
            "flat_learned": np.concatenate(
                [np.zeros(0, bool), *(row.learned for row in used.values())]
            ),
        }
        return arrays, dropped, bad

    def _refused(self, number: int, error: BadRowError) -> str:
        """Return what the report says of a bad row, if bad rows are skipped."""
        message = f"{origin_of(self.dataset[number], number)}: {error}"
        if self.on_bad_row == "error":
            cure = "give the tokenizer another chat_template" * (error.reason == "template")
            raise DataError(
                f"{message} ({cure or 'mend the row'}, or leave such rows out with --on_bad_row skip)"
            ) from error
        return message


# -- by ranks and processes ------------------------------------------------------------------------------------------


def encode_by_shares(rows: DatasetRows, num_workers: int, ranks: Ranks) -> EncodedRows:
    """Encode a share of the rows on each rank, and give it to the others. Collective if there are several.

    Raises:
        DataError: of the first bad row, on every rank.
    """
    edges = [
        len(rows.dataset) * i // ranks.world_size for i in (ranks.get_rank(), ranks.get_rank() + 1)
    ]
    share = range(*edges)
    if ranks.world_size == 1:
        return rows.encoded(share, _outcomes(rows, share, num_workers))
    import torch  # a look at rows before a run starts loads none

    arrays = {}
    dropped = Counter()
    skipped = []
    failure = None
    try:
        arrays, dropped, skipped = rows.encoded(share, _outcomes(rows, share, num_workers))
    except Exception as error:  # the others wait
        failure = error
    message = failure
    if failure is not None and not isinstance(failure, UserError):
        message = f"{type(failure).__name__}: {failure}"
    failures, dropped_each, skipped_each = zip(
        *ranks.all_gather_object((message, dropped, skipped))
    )
    if any(failures):  # the error of the first row that has one, on every rank
        rank, first = next((i, text) for i, text in enumerate(failures) if text)
        if rank == ranks.get_rank():
            raise failure
        raise first if isinstance(first, UserError) else RuntimeError(f"rank {rank}: {first}")
    arrays = {
        name: ranks.all_gather(torch.from_numpy(values)).numpy() for name, values in arrays.items()
    }
    return arrays, sum(dropped_each, Counter()), [*chain(*skipped_each)]


def _outcomes(rows: DatasetRows, share: range, num_workers: int) -> Iterator[Outcome]:
    if num_workers <= 1:
        yield from rows.outcomes(share)
        return

    def encode(start: int) -> list[Outcome]:
        return list(rows.outcomes(range(start, min(start + CHUNK_ROWS, share.stop))))

    global _encode
    _encode = encode
    # fork: the dataset and the tokenizer are inherited, not pickled; the executor notices a killed worker. Threads of
    # the tokenizer inside forked workers would only compete.
    quiet = ("TOKENIZERS_PARALLELISM", "false")
    starts = range(share.start, share.stop, CHUNK_ROWS)
    with ProcessPoolExecutor(
        num_workers, get_context("fork"), os.environ.__setitem__, quiet
    ) as pool:
        yield from chain.from_iterable(pool.map(_work, starts))


_encode: Callable[[int], list[Outcome]]  # the rows from a number on, in forked workers


def _work(start: int) -> list[Outcome]:
    return _encode(start)
