"""Which tokens of a rollout the policy loss treats differently, chosen once, over all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lightppo.algorithms.losses import PolicyLoss
from lightppo.algorithms.selection import SELECTIONS
from lightppo.experience.experience import Experience
from lightppo.ranks import Ranks


def select_tokens(items: Sequence[Experience], loss: PolicyLoss, collectives: Ranks, seed: int) -> None:
    """Set ``selected`` of all rows, where the loss selects tokens at all. Collective then.

    Args:
        items: one-row experiences of this rank, with log probs and final advantages; may be none.
        loss: names the selection and its options.
        collectives: reductions over ranks.
        seed: of this rollout; a token's random number follows from it, its row's token ids and its place.
    """
    select = SELECTIONS.get(loss.policy_loss)
    if select is None:
        return
    masks = [item.action_mask[0] for item in items]  # (A,) each
    chosen = select(
        _trained([item.action_log_probs[0] for item in items], masks),
        _trained([item.advantages[0] for item in items], masks),
        _trained([_uniforms(item, seed) for item in items], masks),
        options=loss.options,
        all_reduce_sum=lambda x: collectives.all_reduce(x, "sum"),
        all_gather=collectives.all_gather,
    )  # (N,)
    for item, mask, part in zip(items, masks, chosen.split([int(mask.sum()) for mask in masks])):
        item.selected = torch.zeros_like(item.action_mask)
        item.selected[0, mask] = part


def _trained(rows: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """The trained tokens of all rows, one after the other (N,)."""
    return torch.cat([row[mask] for row, mask in zip(rows, masks)]) if rows else torch.zeros(0)


def _uniforms(item: Experience, seed: int) -> Tensor:
    """Random numbers of a row (A,), the same on whatever rank and in whatever order the row comes."""
    key = zlib.crc32(item.sequences.cpu().numpy().tobytes(), seed & 0xFFFF_FFFF)
    generator = torch.Generator().manual_seed(key)
    return torch.rand(item.num_actions, generator=generator).to(item.sequences.device)
