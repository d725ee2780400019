"""Which rows go through a model together."""

from __future__ import annotations

import random

import pytest

from lightppo.config.micro_batches import MicroBatchSpec
from lightppo.models.micro_batches import micro_batches

LENGTHS = [(3, 2), (4, 9), (1, 1), (4, 4), (2, 8)]  # 5, 13, 2, 8, 10 tokens


def test_by_samples_longest_first() -> None:
    assert micro_batches(LENGTHS, MicroBatchSpec(2), packed=True) == [[1, 4], [3, 0], [2]]
    assert micro_batches(LENGTHS, MicroBatchSpec(9), packed=False) == [[1, 4, 3, 0, 2]]
    assert micro_batches([], MicroBatchSpec(2), packed=True) == []


def test_packed_by_tokens_has_even_loads() -> None:
    # 38 tokens, 20 a part: 13 | 10, then 8 to the part of 10, 5 to that of 13, 2 to either: 18 | 18 + 2
    assert micro_batches(LENGTHS, MicroBatchSpec(20, "tokens"), packed=True) == [[1, 0, 2], [4, 3]]
    assert micro_batches(LENGTHS, MicroBatchSpec(100, "tokens"), packed=True) == [[1, 4, 3, 0, 2]]
    # as many parts as another rank has
    assert len(micro_batches(LENGTHS, MicroBatchSpec(100, "tokens"), packed=True, at_least=3)) == 3
    assert len(micro_batches(LENGTHS, MicroBatchSpec(100, "tokens"), packed=True, at_least=9)) == 5


def test_padded_by_tokens_counts_the_padding() -> None:
    # 2 × (longest prompt 4 + longest response 9) = 26; 3 × (4 + 4) = 24
    assert micro_batches(LENGTHS, MicroBatchSpec(26, "tokens"), packed=False) == [[1, 4], [3, 0, 2]]
    # 2 × (longest prompt 4 + longest response 8) = 24
    assert micro_batches(LENGTHS, MicroBatchSpec(24, "tokens"), packed=False) == [[1], [4, 3], [0, 2]]


def test_a_row_beyond_the_budget_is_alone() -> None:
    for packed in (False, True):
        assert [1] in micro_batches(LENGTHS, MicroBatchSpec(12, "tokens"), packed=packed)
        assert micro_batches([(5, 5), (6, 6)], MicroBatchSpec(1, "tokens"), packed=packed) == [[1], [0]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [1, 40, 97, 1000, 10**6])
def test_every_row_once_and_within_the_budget(packed: bool, budget: int) -> None:
    draw = random.Random(budget)
    for count in (1, 2, 30):
        lengths = [(draw.randint(1, 40), draw.randint(1, 60)) for _ in range(count)]
        parts = micro_batches(lengths, MicroBatchSpec(budget, "tokens"), packed=packed)
        assert sorted(i for part in parts for i in part) == list(range(count))
        for part in parts:
            rows = [lengths[i] for i in part]
            padded = len(rows) * (max(p for p, _ in rows) + max(r for _, r in rows))
            assert len(part) == 1 or (sum(map(sum, rows)) if packed else padded) <= budget
