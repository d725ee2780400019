"""Index arithmetic for a packed row in which a prompt stands once for all its responses.

The row is a list of segments. A prompt that several rows of the batch share is a segment of its own, and each of their
responses is one that continues it: its positions go on from the prompt's length, and it attends to the prompt and to
itself (``packed_attention.segments_as_mask``). All other rows are one segment each, as in ``packing.pack``. Which rows
share a prompt is told by their tokens alone, so that nobody needs to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from lightppo.models.packing import PackedRow, position_ids_from_mask


@dataclass(frozen=True)
class SharedRow(PackedRow):
    """A packed row of segments; ``slots`` of several rows name the same places where their prompt is one.

    Attributes:
        lengths: (N,), tokens of each segment.
        parents: (N,), the segment that it continues; -1: none.
    """

    lengths: Tensor
    parents: Tensor


def pack_shared(sequences: Tensor, attention_mask: Tensor, num_actions: int) -> SharedRow | None:
    """Drop the padding, and of equal prompts all but one: (B, S) -> (1, T).

    A prompt is the real tokens before the last A columns; equal are those with equal ids in the same columns.

    Args:
        sequences: (B, S) token ids.
        attention_mask: (B, S), 1 for real tokens; padding may be on both sides.
        num_actions: A.

    Returns:
        None where no two rows have the same prompt.
    """
    real = attention_mask.bool()
    split = sequences.shape[1] - num_actions
    prompts = sequences[:, :split].masked_fill(~real[:, :split], -1)  # (B, S - A)
    if len(sequences) < 2 or split < 1:
        return None
    group = torch.unique(prompts, dim=0, return_inverse=True)[1]  # (B,)
    of_prompt, of_response = real[:, :split].sum(1), real[:, split:].sum(1)  # (B,)
    shared = (group.bincount()[group] > 1) & (of_prompt > 0)  # (B,)
    if not bool(shared.any()):
        return None
    order = group.argsort(stable=True)  # rows of one prompt one after the other
    in_order = group[order]
    first = torch.ones_like(in_order, dtype=torch.bool)
    first[1:] = in_order[1:] != in_order[:-1]
    leads = torch.zeros_like(shared).index_put((order,), first)  # (B,), the row that brings the prompt
    kept = real.clone()
    kept[:, :split] &= (leads | ~shared)[:, None]
    places = (kept[order].flatten().long().cumsum(0) - 1).view_as(sequences)
    slots = torch.empty_like(places).index_put((order,), places)  # (B, S)
    leader = order[first][group]  # (B,)
    slots[:, :split] = torch.where(shared[:, None], slots[leader, :split], slots[:, :split])
    lengths, parents = _segments(*(x[order].tolist() for x in (of_prompt, of_response, shared, leads)))
    return SharedRow(
        input_ids=sequences[order][kept[order]].unsqueeze(0),  # (1, T)
        position_ids=position_ids_from_mask(attention_mask)[order][kept[order]].unsqueeze(0),  # (1, T)
        slots=slots,
        lengths=torch.tensor(lengths, device=sequences.device),
        parents=torch.tensor(parents, device=sequences.device),
    )


def _segments(
    prompts: list[int], responses: list[int], shared: list[bool], leads: list[bool]
) -> tuple[list[int], list[int]]:
    """Lengths and parents; rows of one prompt follow each other. No segment is empty."""
    lengths: list[int] = []
    parents: list[int] = []
    parent = -1
    for prompt, response, is_shared, is_first in zip(prompts, responses, shared, leads):
        if is_shared and is_first:
            parent = len(lengths)
            lengths.append(prompt)
            parents.append(-1)
        new = response if is_shared else prompt + response
        if new:
            lengths.append(new)
            parents.append(parent if is_shared else -1)
    return lengths, parents


def distinct_places(places: Tensor) -> tuple[Tensor, Tensor | None]:
    """Places (K,) that are read -> the different ones (U,) in ascending order, and which of them each read takes (K,).

    The last token of a shared prompt predicts the first action of several rows. None: no place is read twice, and they
    stay as they are.
    """
    different, reads = torch.unique(places, return_inverse=True)
    return (places, None) if len(different) == len(places) else (different, reads)


def read(at_places: Tensor, reads: Tensor | None) -> Tensor:
    """(U, …) at the different places -> (K, …), for each read; ``reads`` as of :func:`distinct_places`.

    By an embedding, whose backward pass adds in one order; of indexing torch promises that in its deterministic mode
    only.
    """
    if reads is None:
        return at_places
    return embedding(reads, at_places.reshape(len(at_places), -1)).view(len(reads), *at_places.shape[1:])


def all_share_prompts(models: Iterable[Any]) -> bool:
    """Whether each of these models (``None`` aside) says that it ``shares_prompts``."""
    return all(getattr(model, "shares_prompts", False) for model in models if model is not None)
