"""What travels between ranks, and what each does: no more for every rank than for two."""

from __future__ import annotations

import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.fakes import FakeEngine, FakeReward, FakeStrategy, on_ranks

from lightppo.data.prepared_rows import Encoded, PreparedRows, prepare_rows
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import BadRowError, DataError
from lightppo.logging.samples import Samples, write_step
from lightppo.logging.step_metrics import optimizer_status
from lightppo.rollout.balancing import balance_ranks
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampler import deal
from lightppo.trainer.evaluation import Evaluator

RANKS = 4


class Metered(FakeStrategy):
    """Counts the bytes that come to this rank."""

    def __init__(self, strategy: FakeStrategy) -> None:
        super().__init__(strategy.rank, strategy.world_size, strategy.exchange)
        self.received = 0

    def _count(self, objects):
        self.received += sum(len(pickle.dumps(obj)) for obj in objects)
        return objects

    def all_gather_object(self, obj):
        return self._count(super().all_gather_object(obj))

    def gather_object(self, obj):
        found = FakeStrategy.all_gather_object(self, obj)
        return self._count(found) if self.rank == 0 else None

    def exchange_objects(self, parts):
        everything = FakeStrategy.all_gather_object(self, parts)
        return self._count([part[self.rank] for part in everything if self.rank in part])


def rollouts_of(rank: int, length: int) -> list[Rollout]:
    """Two groups of two samples; rank 0 has samples three times as long."""
    prompts = [Prompt("p" * length, [1] * 3, index=10 * rank + group) for group in range(2)]
    size = length * (3 if rank == 0 else 1)
    return [
        Rollout(
            p, j, [5] * (size + p.index), "r" * size, "stop", [-1.5] * (size + p.index), reward=1.0
        )
        for p in prompts
        for j in range(2)
    ]


def evaluation(strategy, length: int, folder) -> dict[str, float]:
    prompts = [Prompt("p" * length, [1], index=i, data_source="ab"[i % 2]) for i in range(RANKS)]
    scores = {(i, 0): float(i) for i in range(RANKS)}
    sampling = SamplingParams(n=1)
    return Evaluator(FakeEngine(), FakeReward(scores), prompts, sampling, strategy).evaluate(0)


def record(strategy, length: int, folder) -> None:
    samples = Samples(folder, 2 * RANKS, 2, strategy, lambda ids: "x" * len(ids), torch.sub)
    samples.pick(0, rollouts_of(strategy.rank, length), [])
    samples.on_step_end(None, 0, {})


JOBS = {
    "dump": lambda s, n, folder: write_step(folder, 0, rollouts_of(s.rank, n), s),
    "record": record,
    "evaluation": evaluation,
}


@pytest.mark.parametrize("job", JOBS)
def test_samples_come_to_the_rank_that_writes_them_alone(job, tmp_path):
    def received(length: int) -> list[int]:
        def run(strategy):
            metered = Metered(strategy)
            JOBS[job](metered, length, tmp_path / f"{length}")
            return metered.received

        return on_ranks(RANKS, run)

    grown = [long - short for short, long in zip(received(20), received(2000))]
    assert grown[0] > 2000
    assert max(grown[1:]) < 100


def test_moved_rollouts_come_to_the_rank_that_trains_on_them_alone():
    def run(strategy):
        metered = Metered(strategy)
        before = rollouts_of(strategy.rank, 2000)
        came = [r for r in balance_ranks(before, metered) if r not in before]
        return metered.received, len(pickle.dumps(came)) if came else 0

    for received, came in on_ranks(RANKS, run):
        assert came <= received < came + 1000  # beside the sizes of all groups
    # rank 0 gives one group, and takes one
    assert sum(came > 0 for _, came in on_ranks(RANKS, run)) == 2


def encode(seen: list[int], rows: list[dict]) -> list:
    """A row of n is n tokens; 4 is left out, a negative one is bad."""
    seen += [row["n"] for row in rows]
    bad = lambda n: BadRowError("empty", f"{n} tokens")  # noqa: E731
    return [bad(n) if n < 0 else "overlong" if n == 4 else Encoded([7] * n, n // 2, n > 5, n // 3)
            for n in (row["n"] for row in rows)]  # fmt: skip


def prepared(
    numbers: list[int], strategy: FakeStrategy, **options
) -> tuple[PreparedRows, list[int]]:
    seen: list[int] = []
    return prepare_rows(
        Dataset.from_dict({"n": numbers}), ["n"], partial(encode, seen), ranks=strategy, **options
    ), seen


@pytest.mark.parametrize("world_size", [2, 3, 12])  # of 12 two have no row
def test_rows_are_encoded_once_and_the_same_on_any_number_of_ranks(world_size):
    numbers = [3, 4, -1, 9, 2, 1, 4, -2, 6, 5]
    alone, seen = prepared(numbers, FakeStrategy(), on_bad_row="skip")
    assert seen == numbers
    assert (alone.report.dropped, len(alone.report.bad)) == ({"overlong": 2, "empty": 2}, 2)
    found = on_ranks(world_size, lambda s: prepared(numbers, s, on_bad_row="skip"))
    assert [n for _, of_rank in found for n in of_rank] == numbers
    for rows, _ in found:
        assert rows.report == alone.report
        for name in (
            "row_numbers",
            "prompt_lengths",
            "truncated",
            "first_answers",
            "offsets",
            "flat_ids",
        ):
            values, expected = getattr(rows, name), getattr(alone, name)
            assert values.dtype == expected.dtype
            assert np.array_equal(values, expected), name


def test_a_bad_row_of_one_rank_is_the_same_error_on_all():
    def error(strategy: FakeStrategy) -> str:
        with pytest.raises(DataError) as found:
            prepared([1, 2, 3, 1, -7, 1, 1, -8], strategy)
        return str(found.value)

    assert on_ranks(4, error) == [error(FakeStrategy())] * 4
    assert error(FakeStrategy()).startswith("row 5: -7 tokens (mend the row")


def test_an_encoder_that_breaks_on_one_rank_ends_all():
    def error(strategy: FakeStrategy) -> str:
        def broken(rows: list[dict]) -> list:
            if strategy.rank == 1:
                raise KeyError("no such thing")
            return encode([], rows)

        with pytest.raises((KeyError, RuntimeError), match="no such thing") as found:
            prepare_rows(Dataset.from_dict({"n": [1, 2, 3]}), ["n"], broken, ranks=strategy)
        return type(found.value).__name__

    assert on_ranks(3, error) == ["RuntimeError", "KeyError", "RuntimeError"]


def test_numbers_of_micro_batches_are_summed_not_gathered():
    def status(strategy: FakeStrategy, steps: int) -> tuple[dict[str, float], int]:
        metered, draw = Metered(strategy), random.Random(strategy.rank)
        own = [
            [{"loss": draw.random(), "odd": float(i)} if i % 2 else {"loss": draw.random()}]
            for i in range(steps)
        ]
        return optimizer_status(own, metered), metered.received

    def by_hand() -> float:
        draws = [random.Random(rank) for rank in range(2)]
        return sum((draws[0].random() + draws[1].random()) / 2 for _ in range(8)) / 8

    found, received = zip(*on_ranks(2, lambda s: status(s, 8)))
    assert found[0] == found[1] == {"loss": by_hand(), "odd": 4.0}  # (1 + 3 + 5 + 7) / 4
    grown = on_ranks(2, lambda s: status(s, 80)[1])[0] - received[0]
    # of each further step, name and rank: two numbers of 8 bytes
    assert grown < 72 * 2 * 2 * (2 * 8 + 4)


def test_groups_are_dealt_to_the_rank_with_fewest():
    def plainly(count: int, held: list[int], room: list[int]) -> list[int]:
        given = [0] * len(held)
        for _ in range(min(count, sum(room))):
            open_ranks = [rank for rank in range(len(held)) if given[rank] < room[rank]]
            given[min(open_ranks, key=lambda rank: held[rank] + given[rank])] += 1
        return given

    draw = random.Random(0)
    for ranks in (1, 2, 7):
        for _ in range(20):
            held, room = ([draw.randrange(5) for _ in range(ranks)] for _ in range(2))
            count = draw.randrange(12)
            assert deal(count, held, room) == plainly(count, held, room)
