"""From one score per response to one reward per token."""

from __future__ import annotations

import torch
from torch import Tensor

from lightppo.algorithms.masking import at_least_float32, require_same_shape


def clip_scores(scores: Tensor, clip_range: tuple[float, float] | None) -> Tensor:
    """Scores clipped to ``--reward_clip_range``.

    Args:
        scores: (B,).
        clip_range: (low, high); ``None`` leaves the scores as they are.

    Raises:
        ValueError: low is not below high.
    """
    if clip_range is None:
        return scores
    low, high = clip_range
    if not low < high:
        raise ValueError(f"--reward_clip_range: the first number must be below the second, got {low} {high}")
    return scores.clamp(low, high)


@torch.no_grad()
def compute_token_rewards(
    scores: Tensor,
    action_mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    token_scores: Tensor | None = None,
) -> Tensor:
    """r_t = -kl_coef·kl_t + token_scores_t on trained tokens, plus the score at the last trained token.

    Source: the KL-in-reward form of RLHF, Ouyang et al. 2022 (arXiv:2203.02155), eq. 2, spread over the tokens.

    Args:
        scores: (B,), one per response.
        action_mask: (B, A), True = trained token.
        kl: (B, A), see :func:`lightppo.algorithms.kl.approx_kl`.
        kl_coef: its coefficient; 0 where the KL is a loss term instead (``--use_kl_loss``).
        token_scores: (B, A), dense rewards, or ``None``.

    Returns:
        (B, A), float32 or float64; untrained positions and rows without a trained token are 0.

    Raises:
        ValueError: shapes differ, a coefficient without a KL, or a dense reward on an untrained token.
    """
    require_same_shape(action_mask=action_mask, kl=kl, token_scores=token_scores)
    if scores.shape != action_mask.shape[:1]:
        raise ValueError(f"scores {tuple(scores.shape)} do not fit action_mask {tuple(action_mask.shape)}")
    if kl is None and kl_coef != 0.0:
        raise ValueError(f"kl_coef is {kl_coef} but there is no KL: give the reference log probs or set it to 0")
    mask = action_mask.bool()
    scores = at_least_float32(scores)
    rewards = scores.new_zeros(mask.shape)  # (B, A)
    if kl is not None:
        rewards = rewards - kl_coef * at_least_float32(kl)
    if token_scores is not None:
        lost = (token_scores.masked_fill(mask, 0.0) != 0).any(dim=1)
        if lost.any():
            raise ValueError(
                f"token_scores on untrained tokens would be lost, in rows {lost.nonzero().flatten().tolist()}"
            )
        rewards = rewards + at_least_float32(token_scores)
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = mask & (positions == torch.where(mask, positions, -1).amax(dim=1, keepdim=True))  # (B, A), one True a row
    return (rewards + torch.where(last, scores.unsqueeze(1), 0.0)).masked_fill(~mask, 0.0)
