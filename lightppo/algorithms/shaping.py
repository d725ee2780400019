"""Scores become token rewards.

Notation: B responses, A action positions; a score is one number per response (B,). Results are float32 or float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightppo.algorithms.masking import at_least_float32, require_same_shape


@torch.no_grad()
def compute_token_rewards(
    scores: Tensor,
    action_mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    token_scores: Tensor | None = None,
) -> Tensor:
    """r_t = -kl_coef·kl_t + token_scores_t on trained tokens, plus the score at the last trained token: (B, A).

    Source: the KL-in-reward form of RLHF, Ouyang et al. 2022 (arXiv:2203.02155), eq. 2, spread over the tokens.
    """
    require_same_shape(action_mask=action_mask, kl=kl, token_scores=token_scores)
    require_same_shape(scores=scores, rows=action_mask.any(dim=1))
    if kl is None and kl_coef != 0.0:
        raise ValueError(
            f"kl_coef is {kl_coef} but there is no KL: give the reference log probs or set it to 0"
        )
    mask = action_mask.bool()
    scores = at_least_float32(scores)
    rewards = scores.new_zeros(mask.shape)  # (B, A)
    if kl is not None:
        rewards = rewards - kl_coef * at_least_float32(kl)
    if token_scores is not None:
        rewards = rewards + at_least_float32(token_scores)
    positions = torch.arange(mask.shape[1], device=mask.device)
    # (B, A), one True a row
    last = mask & (positions == torch.where(mask, positions, -1).amax(dim=1, keepdim=True))
    return (rewards + torch.where(last, scores.unsqueeze(1), 0.0)).masked_fill(~mask, 0.0)
