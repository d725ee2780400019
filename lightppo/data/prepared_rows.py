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
        reasons = sorted(self.dropped.items())
        dropped = ", ".join(f"{count} {reason}" for reason, count in reasons) or "0"
        return f"{self.rows} rows: {self.kept} kept, {self.truncated} of them truncated; dropped: {dropped}"

    def warn(self) -> None:
        """Log which rows are not as they were; DataError if none is left."""
        examples = "".join(f"\n  {bad_row}" for bad_row in self.bad[:NAMED_ROWS])
        if not self.kept:
            raise DataError(f"no row is left to train on. {self}{examples}")
        if self.bad:
            logger.warning("bad rows skipped, the first of them:%s", examples)
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
    # whether each of these ids is learned; none, where all behind a prompt are
    flat_learned: np.ndarray
    report: DatasetReport

    def __len__(self) -> int:
        return len(self.row_numbers)

    def token_ids(self, position: int) -> list[int]:
        """Return the ids of the kept row at this position."""
        return self.flat_ids[self._slice(position)].tolist()

    def learned(self, position: int) -> np.ndarray:
        """Return whether each id of the kept row at this position is learned. (S,)"""
        id_slice = self._slice(position)
        if len(self.flat_learned):
            return self.flat_learned[id_slice]
        return np.arange(id_slice.stop - id_slice.start) >= self.prompt_lengths[position]

    def _slice(self, position: int) -> slice:
        return slice(self.offsets[position], self.offsets[position + 1])


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
        type_name = type(dataset).__name__
        raise TypeError(f"a datasets.Dataset is needed (see blending_datasets), not {type_name}")
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
    arrays, dropped, bad_rows = encode_by_shares(rows, num_workers, ranks or Alone())
    lengths = arrays.pop("lengths")
    truncated = int(arrays["truncated"].sum())
    report = DatasetReport(len(dataset), len(lengths), truncated, dict(dropped), bad_rows)
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
        dataset = self.dataset.select_columns(self.columns)
        for i in range(0, len(rows), CHUNK_ROWS):
            yield from self.encode_chunk(dataset.__getitems__(rows[i : i + CHUNK_ROWS]))

    def encoded(self, rows: range, outcomes: Iterable[Outcome]) -> EncodedRows:
        """Encode these rows. DataError names the first bad one, unless bad rows are skipped."""
        dropped: Counter[str] = Counter()
        bad_rows: list[str] = []
        encoded: dict[int, Encoded] = {}  # by row number
        for number, outcome in zip(rows, outcomes):
            if isinstance(outcome, Encoded):
                token_ids = np.asarray(outcome.token_ids, dtype=np.int32)
                learned = np.asarray(outcome.learned, dtype=bool)[: len(token_ids)]
                encoded[number] = outcome._replace(token_ids=token_ids, learned=learned)
            elif isinstance(outcome, BadRowError):
                dropped[outcome.reason] += 1
                bad_rows.append(self._refused(number, outcome))
            else:
                dropped[outcome] += 1
        kept_rows = list(encoded.values())
        arrays = {
            "row_numbers": np.array(list(encoded), dtype=np.int64),
            "prompt_lengths": np.array([row.prompt_length for row in kept_rows], dtype=np.int64),
            "truncated": np.array([row.truncated for row in kept_rows], dtype=bool),
            "first_answers": np.array([row.first_answer for row in kept_rows], dtype=np.int64),
            "lengths": np.array([len(row.token_ids) for row in kept_rows], dtype=np.int64),
            "flat_ids": np.concatenate([np.int32([]), *(row.token_ids for row in kept_rows)]),
            "flat_learned": np.concatenate(
                [np.zeros(0, bool), *(row.learned for row in kept_rows)]
            ),
        }
        return arrays, dropped, bad_rows

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
    start, end = (
        len(rows.dataset) * i // ranks.world_size for i in (ranks.get_rank(), ranks.get_rank() + 1)
    )
    share = range(start, end)
    if ranks.world_size == 1:
        return rows.encoded(share, _outcomes(rows, share, num_workers))
    import torch  # a look at rows before a run starts loads none

    arrays = {}
    dropped = Counter()
    bad_rows = []
    failure = None
    try:
        arrays, dropped, bad_rows = rows.encoded(share, _outcomes(rows, share, num_workers))
    except Exception as error:  # the others wait
        failure = error
    message = failure
    if failure is not None and not isinstance(failure, UserError):
        message = f"{type(failure).__name__}: {failure}"
    failures, dropped_each, bad_rows_each = zip(
        *ranks.all_gather_object((message, dropped, bad_rows))
    )
    if any(failures):  # the error of the first row that has one, on every rank
        failed_rank, problem = next((i, problem) for i, problem in enumerate(failures) if problem)
        if failed_rank == ranks.get_rank():
            raise failure
        if isinstance(problem, UserError):
            raise problem
        raise RuntimeError(f"rank {failed_rank}: {problem}")
    arrays = {
        array_name: ranks.all_gather(torch.from_numpy(values)).numpy()
        for array_name, values in arrays.items()
    }
    return arrays, sum(dropped_each, Counter()), [*chain(*bad_rows_each)]


def _outcomes(rows: DatasetRows, share: range, num_workers: int) -> Iterator[Outcome]:
    if num_workers <= 1:
        yield from rows.outcomes(share)
        return

    def encode(start: int) -> list[Outcome]:
        return list(rows.outcomes(share[start : start + CHUNK_ROWS]))

    global _encode
    _encode = encode
    # fork: the dataset and the tokenizer are inherited, not pickled; the executor notices a killed worker. Threads of
    # the tokenizer inside forked workers would only compete.
    without_threads = ("TOKENIZERS_PARALLELISM", "false")
    with ProcessPoolExecutor(
        num_workers, get_context("fork"), os.environ.__setitem__, without_threads
    ) as executor:
        outcomes = executor.map(_encode_in_worker, range(0, len(share), CHUNK_ROWS))
        yield from chain.from_iterable(outcomes)


_encode: Callable[[int], list[Outcome]]  # a chunk of the share, in forked workers


def _encode_in_worker(start: int) -> list[Outcome]:
    return _encode(start)
