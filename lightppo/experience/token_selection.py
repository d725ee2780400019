"""The tokens that a policy loss singles out, chosen once a rollout: see the functions in ``selection.py``."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.losses import SelectionFn
from lightppo.experience.experience import Experience
from lightppo.ranks import Ranks
from lightppo.table import load


def selection_of(loss: Any) -> SelectionFn | None:
    """Return the function that selects tokens for this policy loss; ``None`` if the loss treats all tokens alike."""
    entry = getattr(loss, "entry", None)  # a loss of a script has none
    if entry is None or entry.selection is None:
        return None
    return load(entry.selection)


def select_tokens(items: Sequence[Experience], loss: Any, ranks: Ranks, seed: int) -> None:
    """Set ``selected`` of all rows if the loss selects tokens; then collective.

    A token's random number depends on ``seed``, its row's token ids and its position.
    """
    select = selection_of(loss)
    if select is None:
        return
    items = items or [Experience.placeholder()]  # for the collectives of a rank without samples
    masks = [item.action_mask for item in items]  # (1, A) each

    def trained(rows: Iterable[Tensor]) -> Tensor:
        """Join the rows' trained tokens, (N,)."""
        return torch.cat([row[mask] for row, mask in zip(rows, masks)])

    chosen = select(
        trained(item.action_log_probs for item in items),
        trained(item.advantages for item in items),
        trained(_uniforms(item, seed) for item in items),
        options=loss.options,
        all_reduce_sum=partial(ranks.all_reduce, op="sum"),
    )  # (N,)
    of_rows = chosen.split([int(mask.sum()) for mask in masks])
    for item, mask, of_row in zip(items, masks, of_rows):
        item.selected = torch.zeros_like(mask).masked_scatter(mask, of_row)


def _uniforms(item: Experience, seed: int) -> Tensor:
    """Return random numbers of a row (1, A), independent of its rank and of the order of rows."""
    key = zlib.crc32(item.sequences.cpu().numpy().tobytes(), seed & 0xFFFF_FFFF)
    generator = torch.Generator().manual_seed(key)
    return torch.rand(1, item.num_actions, generator=generator).to(item.sequences.device)
