"""Micro batches of packed rows."""

from __future__ import annotations

import random

import pytest

from lightppo.config.rules import MicroBatchSpec
from lightppo.models.batches import packed_micro_batches

LENGTHS = [(3, 2), (4, 9), (1, 1), (4, 4), (2, 8)]  # 5, 13, 2, 8, 10 tokens


def test_by_samples_longest_first() -> None:
    assert packed_micro_batches(LENGTHS, MicroBatchSpec(2)) == [[1, 4], [3, 0], [2]]
    assert packed_micro_batches(LENGTHS, MicroBatchSpec(9)) == [[1, 4, 3, 0, 2]]
    assert packed_micro_batches([], MicroBatchSpec(2)) == []


def test_packed_by_tokens_has_even_loads() -> None:
    # 38 tokens, 20 a part: 13 | 10, then 8 to the part of 10, 5 to that of 13, 2 to either: 18 | 18 + 2
    assert packed_micro_batches(LENGTHS, MicroBatchSpec(20, "tokens")) == [[1, 0, 2], [4, 3]]
    assert packed_micro_batches(LENGTHS, MicroBatchSpec(100, "tokens")) == [[1, 4, 3, 0, 2]]
    # as many parts as another rank has
    assert len(packed_micro_batches(LENGTHS, MicroBatchSpec(100, "tokens"), at_least=3)) == 3
    assert len(packed_micro_batches(LENGTHS, MicroBatchSpec(100, "tokens"), at_least=9)) == 5


def test_a_row_beyond_the_budget_is_alone() -> None:
    assert [1] in packed_micro_batches(LENGTHS, MicroBatchSpec(12, "tokens"))
    assert packed_micro_batches([(5, 5), (6, 6)], MicroBatchSpec(1, "tokens")) == [[1], [0]]


@pytest.mark.parametrize("budget", [1, 40, 97, 1000, 10**6])
def test_every_row_once_and_within_the_budget(budget: int) -> None:
    draw = random.Random(budget)
    for count in (1, 2, 30):
        lengths = [(draw.randint(1, 40), draw.randint(1, 60)) for _ in range(count)]
        parts = packed_micro_batches(lengths, MicroBatchSpec(budget, "tokens"))
        assert sorted(i for part in parts for i in part) == list(range(count))
        for part in parts:
            rows = [lengths[i] for i in part]
            assert len(part) == 1 or sum(map(sum, rows)) <= budget


def tokens_of(part: list[int], lengths: list[tuple[int, int]], prompts: list[str]) -> int:
    """Of a packed row in which a prompt stands once."""
    shared = {prompts[i]: lengths[i][0] for i in part}
    return sum(shared.values()) + sum(lengths[i][1] for i in part)


SHARED = [(3, 2), (4, 9), (3, 1), (4, 4), (2, 8), (3, 5)]
PROMPTS = ["a", "b", "a", "b", "c", "a"]  # 3 + 8, 4 + 13, 2 + 8 tokens


def test_rows_of_a_prompt_stay_together() -> None:
    # groups by their tokens, and the rows of one by theirs: b 17, a 11, c 10
    assert packed_micro_batches(SHARED, MicroBatchSpec(9), prompts=PROMPTS) == [[1, 3, 5, 0, 2, 4]]
    assert packed_micro_batches(SHARED, MicroBatchSpec(2), prompts=PROMPTS) == [
        [1, 3],
        [5, 0],
        [2, 4],
    ]
    # 38 tokens, 21 a part: b | a and c
    budget = MicroBatchSpec(21, "tokens")
    assert packed_micro_batches(SHARED, budget, prompts=PROMPTS) == [[1, 3], [5, 0, 2, 4]]
    # as many parts as other ranks have, but no group is cut for that
    assert len(packed_micro_batches(SHARED, budget, prompts=PROMPTS, at_least=3)) == 3
    assert len(packed_micro_batches(SHARED, budget, prompts=PROMPTS, at_least=9)) == 3


def test_a_group_beyond_the_budget_is_cut_into_parts_with_the_prompt() -> None:
    # prompt of 5, responses of 6, 3, 3 and 2 within 14: at most 9 of responses; 14 / 9 -> 2 parts: 6 + 2 and 3 + 3
    lengths = [(5, 6), (5, 3), (5, 3), (5, 2)]
    parts = packed_micro_batches(lengths, MicroBatchSpec(14, "tokens"), prompts=["a"] * 4)
    assert sorted(map(sorted, parts)) == [[0, 3], [1, 2]]
    # no room for a prompt and a token of a response: one row each
    parts = packed_micro_batches(lengths, MicroBatchSpec(4, "tokens"), prompts=["a"] * 4)
    assert sorted(parts) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("budget", [1, 40, 97, 300, 10**6])
def test_shared_rows_once_and_within_the_budget(budget: int) -> None:
    draw = random.Random(budget)
    for count in (1, 2, 30, 80):
        longest = {name: draw.randint(1, 40) for name in "abcdefgh"}
        prompts = [draw.choice("abcdefgh") for _ in range(count)]
        lengths = [(longest[name], draw.randint(1, 60)) for name in prompts]
        parts = packed_micro_batches(lengths, MicroBatchSpec(budget, "tokens"), prompts=prompts)
        assert sorted(i for part in parts for i in part) == list(range(count))
        assert all(len(part) == 1 or tokens_of(part, lengths, prompts) <= budget for part in parts)
        for name in set(prompts):  # together wherever all of one prompt fit
            rows = [i for i in range(count) if prompts[i] == name]
            if tokens_of(rows, lengths, prompts) <= budget:
                assert sum(1 for part in parts if set(rows) & set(part)) == 1
