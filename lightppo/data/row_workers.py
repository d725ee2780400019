"""Rows are encoded by all ranks together, each a share, and by several processes of a rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context

from lightppo.data.rows import CHUNK_ROWS, EncodedRows, Outcome, Rows
from lightppo.errors import UserError
from lightppo.ranks import Ranks


def encode_by_shares(rows: Rows, num_workers: int, ranks: Ranks) -> EncodedRows:
    """Each of the ranks encodes a share and gets the others'. Collective if there are several.

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

    arrays, dropped, skipped, failure = {}, Counter(), [], None
    try:
        arrays, dropped, skipped = rows.encoded(share, _outcomes(rows, share, num_workers))
    except Exception as error:  # the others wait
        failure = error
    told = failure
    if failure is not None and not isinstance(failure, UserError):
        told = f"{type(failure).__name__}: {failure}"
    failures, dropped_each, skipped_each = zip(*ranks.all_gather_object((told, dropped, skipped)))
    if any(failures):  # the error of the first row that has one, on every rank
        rank, first = next((i, text) for i, text in enumerate(failures) if text)
        if rank == ranks.get_rank():
            raise failure
        raise first if isinstance(first, UserError) else RuntimeError(f"rank {rank}: {first}")
    arrays = {
        name: ranks.all_gather(torch.from_numpy(values)).numpy() for name, values in arrays.items()
    }
    return arrays, sum(dropped_each, Counter()), [*chain(*skipped_each)]


def _outcomes(rows: Rows, share: range, num_workers: int) -> Iterator[Outcome]:
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
