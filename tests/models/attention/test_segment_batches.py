"""Segments of a packed row as batches."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from lightppo.models.attention import recurrent
from lightppo.models.attention.recurrent import (
    batches_of,
    by_segment,
    contexts_of,
    with_contexts,
)
from lightppo.models.batches import RowPlan

CPU = torch.device("cpu")


def test_batches_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 3 with responses of 1 and 2, a sequence of 2 alone, a prompt of 2 with a response of 1."""
    monkeypatch.setitem(recurrent.CALL_COST, "cpu", 100)
    plan = RowPlan([3, 1, 2, 2, 2, 1], [-1, 0, 0, -1, -1, 4], CPU)
    split = batches_of(plan, CPU)
    assert [batch.places.tolist() for batch in split.batches] == [
        [[0, 1, 2], [8, 9, 11]],
        [[6, 7]],
        [[4, 5], [3, 11], [10, 11]],
    ]
    assert [batch.keeps_states for batch in split.batches] == [True, False, False]
    assert [batch.parents and batch.parents.tolist() for batch in split.batches[:2]] == [None] * 2
    assert split.batches[2].parents.tolist() == [0, 0, 1]
    # outputs: 2 × 3, then 2, then 3 × 2
    assert split.output_places.tolist() == [0, 1, 2, 10, 8, 9, 6, 7, 3, 4, 12]
    assert batches_of(plan, CPU) is split
    alone = batches_of(plan, CPU, equal_lengths=True)
    assert [batch.places.tolist() for batch in alone.batches[:2]] == [[[0, 1, 2]], [[8, 9]]]


def test_contexts_by_hand() -> None:
    """Two places before each segment; the prompt of 1 has but one."""
    plan = RowPlan([3, 1, 1, 2], [-1, 0, -1, 2], CPU)
    found = contexts_of(plan, 2, CPU)
    assert found.places.tolist() == [7, 7, 0, 1, 2, 1, 2, 3, 7, 7, 4, 7, 4, 5, 6]
    assert found.segment_places.tolist() == [2, 3, 4, 7, 10, 13, 14]
    row = torch.arange(1.0, 8.0)[:, None]
    assert with_contexts(plan, row, 2)[-4:, 0].tolist() == [0, 5, 6, 7]


def running_sum(inputs: list[Tensor], initial: Tensor | None, keeps: bool) -> tuple:
    (x,) = inputs
    sums = x.cumsum(1) + (0 if initial is None else initial[:, None])
    return sums, sums[:, -1] if keeps else None


@pytest.mark.parametrize("call_cost", [0, 3, 1000])
def test_what_runs_along_a_sequence(call_cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running sum over every sequence, its gradients, and none from one sequence to another."""
    monkeypatch.setitem(recurrent.CALL_COST, "cpu", call_cost)
    draw = random.Random(0)
    for _ in range(20):
        lengths, parents = [], []
        for _ in range(draw.randint(1, 9)):
            roots = [i for i, parent in enumerate(parents) if parent < 0]
            parents.append(draw.choice([-1, *roots]))
            lengths.append(draw.randint(1, 6))
        plan = RowPlan(lengths, parents, CPU)
        x = torch.randint(-9, 9, (1, sum(lengths), 2)).double().requires_grad_()
        sums = by_segment(plan, running_sum, [x], [0.0])
        starts = [0, *itertools.accumulate(lengths)]
        own = [x[0, first:end].cumsum(0) for first, end in itertools.pairwise(starts)]
        expected = [y if p < 0 else y + own[p][-1] for y, p in zip(own, parents)]
        assert torch.equal(sums[0], torch.cat(expected))
        factor = torch.randint(-9, 9, sums.shape).double()
        got, wanted = (
            torch.autograd.grad((y * factor).sum(), x)[0] for y in (sums, torch.cat(expected)[None])
        )
        assert torch.equal(got, wanted)
