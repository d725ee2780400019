"""Drawing a token from a large vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from lightppo.rollout.sampling import inverse_cdf

_BLOCK = 512  # tokens whose probabilities are summed at once where the vocabulary is large


def inverse_cdf_by_blocks(probs: Tensor, uniforms: Tensor) -> Tensor:
    """As the core's ``inverse_cdf``; of a large vocabulary it finds the block by the blocks' sums, then the token in it.

    That is one pass over ``probs``, without a cumulated copy.
    """
    if probs.shape[-1] <= 2 * _BLOCK:
        return inverse_cdf(probs, uniforms)
    vocab_size = probs.shape[-1]
    whole = vocab_size // _BLOCK * _BLOCK
    sums = probs[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1)
    # The last block may be empty; its sum is 0 then.
    sums = torch.cat([sums, probs[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    cdf = sums.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms.unsqueeze(1) * cdf[:, -1:]  # (B, 1)
    blocks = torch.searchsorted(cdf, targets, right=True).clamp_(max=cdf.shape[1] - 1)
    before = cdf.gather(1, blocks) - sums.gather(1, blocks)
    tokens = blocks * _BLOCK + torch.arange(_BLOCK, device=probs.device)  # (B, block)
    inside = (
        probs.gather(1, tokens.clamp(max=vocab_size - 1))
        .double()
        .masked_fill_(tokens >= vocab_size, 0)
    )
    inner = inside.cumsum(dim=-1)
    # The sums above are rounded differently: the target must stay inside, else a token of probability 0 could be drawn.
    within = torch.minimum(
        (targets - before).clamp_(min=0), inner[:, -1:].nextafter(inner.new_zeros(1))
    )
    tokens = blocks * _BLOCK + torch.searchsorted(inner, within, right=True)
    return tokens.squeeze(1).clamp_(max=vocab_size - 1)
