"""The segments of a packed row as batches without neighbours, for what runs along a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from lightppo.models.batches import to_device
from lightppo.models.packing.packed_rows import RowPlan

CALL_COST = {"cpu": 128, "other": 4096}  # fixed cost of a call, in positions

# inputs (n, L, …), the states that they begin with (n, …) or None, whether to return the last ones
# -> outputs (n, L, …), states (n, …) or None
Step = Callable[[list[Tensor], Tensor | None, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class SegmentBatch:
    """Segments that run together, padded on the right."""

    places: Tensor  # (n, L) in the row of T places; T: padding
    parents: Tensor | None  # (n,) which of the states kept so far each begins with; None: with none
    keeps_states: bool  # others begin with the last ones


@dataclass(frozen=True)
class SegmentBatches:
    """All segments of a row, parents first."""

    batches: list[SegmentBatch]
    back: Tensor  # (T,) where each place of the row stands among the flat outputs of all batches


def batches_of(plan: RowPlan, device: torch.device, equal_lengths: bool = False) -> SegmentBatches:
    """``equal_lengths``: segments that others continue are not padded. Made once for all layers."""
    key = ("segments", equal_lengths)
    if key not in plan.kept:
        plan.kept[key] = _batches(plan, device, equal_lengths)
    return plan.kept[key]


def _batches(plan: RowPlan, device: torch.device, equal_lengths: bool) -> SegmentBatches:
    starts = [0, *accumulate(plan.lengths)]
    call_cost = CALL_COST["cpu" if device.type == "cpu" else "other"]
    continued = set(plan.parents)
    kept: dict[int, int] = {}  # segment -> number of its last state
    batches: list[SegmentBatch] = []
    back = torch.empty(plan.tokens, dtype=torch.long)
    outputs = 0

    def role(segment: int) -> int:
        return 0 if segment in continued else 1 if plan.parents[segment] < 0 else 2

    order = sorted(range(len(plan.lengths)), key=lambda i: (role(i), -plan.lengths[i]))
    for which, of_role in groupby(order, role):
        members = list(of_role)
        if which == 0 and equal_lengths:
            parts = [list(part) for _, part in groupby(members, plan.lengths.__getitem__)]
        else:
            cuts = cheapest_parts([plan.lengths[i] for i in members], call_cost)
            parts = [members[first:end] for first, end in cuts]
        for part in parts:
            longest = plan.lengths[part[0]]
            places = torch.full((len(part), longest), plan.tokens)
            for row, segment in enumerate(part):
                length = plan.lengths[segment]
                places[row, :length] = torch.arange(starts[segment], starts[segment] + length)
                first = outputs + row * longest
                back[starts[segment] : starts[segment] + length] = torch.arange(
                    first, first + length
                )
            outputs += places.numel()
            parents = [kept[plan.parents[i]] for i in part] if which == 2 else None
            if which == 0:
                kept |= {segment: len(kept) + row for row, segment in enumerate(part)}
            batches.append(
                SegmentBatch(
                    places=to_device(places, device),
                    parents=None if parents is None else to_device(torch.tensor(parents), device),
                    keeps_states=which == 0,
                )
            )
    return SegmentBatches(batches, to_device(back, device))


def by_segment(
    plan: RowPlan,
    step: Step,
    inputs: Sequence[Tensor],
    fills: Sequence[float],
    equal_lengths: bool = False,
) -> Tensor:
    """Runs ``step`` over every segment of a row: inputs (1, T, …) -> (1, T, …).

    A segment with a parent begins with its parent's last state. ``fills`` is what inputs are after the end of a segment:
    there ``step`` must not change its state, unless with ``equal_lengths``.
    """
    split = batches_of(plan, inputs[0].device, equal_lengths)
    rows = [_with_padding(x[0], fill) for x, fill in zip(inputs, fills, strict=True)]
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for batch in split.batches:
        initial = None if batch.parents is None else chosen(torch.cat(states), batch.parents)
        taken = [chosen(x, batch.places) for x in rows]
        output, last = step(taken, initial, batch.keeps_states)
        outputs.append(output.flatten(0, 1))
        if batch.keeps_states:
            states.append(last)
    return chosen(torch.cat(outputs), split.back)[None]


def chosen(rows: Tensor, index: Tensor) -> Tensor:
    """(R, …) -> (*index.shape, …). Gradients are always added in one order, unlike those of ``rows[index]``."""
    return embedding(index, rows.flatten(1)).view(*index.shape, *rows.shape[1:])


def _with_padding(row: Tensor, fill: float) -> Tensor:
    """(T, …) -> (T + 1, …)."""
    return pad(row, (0, 0) * (row.dim() - 1) + (0, 1), value=fill)


# -- convolutions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contexts:
    """A row in which each segment stands behind the last tokens of its parent."""

    places: Tensor  # (T',) in the row of T places; T: a zero
    kept: Tensor  # (T,) where the segments' own places are in it


def contexts_of(plan: RowPlan, width: int, device: torch.device) -> Contexts:
    """``width`` places in front of each segment: its parent's last ones, zeros in front of these."""
    key = ("contexts", width)
    if key not in plan.kept:
        starts = [0, *accumulate(plan.lengths)]
        places: list[Tensor] = []
        kept: list[Tensor] = []
        total = 0
        for segment, (length, parent) in enumerate(zip(plan.lengths, plan.parents)):
            known = min(width, plan.lengths[parent]) if parent >= 0 else 0
            end = starts[parent + 1] if parent >= 0 else 0
            places += [
                torch.full((width - known,), plan.tokens),
                torch.arange(end - known, end),
                torch.arange(starts[segment], starts[segment] + length),
            ]
            kept.append(torch.arange(total + width, total + width + length))
            total += width + length
        plan.kept[key] = Contexts(
            to_device(torch.cat(places), device), to_device(torch.cat(kept), device)
        )
    return plan.kept[key]


def with_contexts(plan: RowPlan, row: Tensor, width: int) -> Tensor:
    """(T, C) -> (T', C), by :func:`contexts_of`."""
    return chosen(_with_padding(row, 0.0), contexts_of(plan, width, row.device).places)


def cheapest_parts(lengths: list[int], call_cost: int) -> list[tuple[int, int]]:
    """(first, end) of consecutive parts of the prompts, so that positions (with padding) plus calls cost least."""
    least, cut = [0], [0]  # of the first k prompts: their cost, and where the last part begins
    for end in range(1, len(lengths) + 1):
        best = (float("inf"), 0)
        longest = 0
        for first in range(end - 1, -1, -1):
            longest = max(longest, lengths[first])
            best = min(best, (least[first] + call_cost + longest * (end - first), first))
        least.append(best[0])
        cut.append(best[1])
    parts = []
    end = len(lengths)
    while end:
        parts.append((cut[end], end))
        end = cut[end]
    return parts[::-1]
