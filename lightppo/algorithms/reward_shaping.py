"""From what the reward source says to one reward per token. Constants of the loss: nothing here has a gradient."""

from __future__ import annotations

import math

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


def scale_scores(scores: Tensor, bias: float = 0.0, scaling: float = 1.0, max_clip: float | None = None) -> Tensor:
    """clip((score - bias) · scaling, ±max_clip).

    Args:
        scores: (B,).
        bias: ``--reward_bias``, in units of the score.
        scaling: ``--reward_scaling``, not 0; a negative one turns costs into rewards.
        max_clip: ``--max_reward_clip``, in units of the result; ``None``: no limit.

    Returns:
        (B,), float32 or float64.

    Raises:
        ValueError: bias or scaling not finite, scaling 0, or max_clip not above 0.
    """
    if not (math.isfinite(bias) and math.isfinite(scaling) and scaling != 0):
        raise ValueError(f"--reward_bias ({bias}) must be finite, --reward_scaling ({scaling}) finite and not 0")
    if max_clip is not None and not max_clip > 0:
        raise ValueError(f"--max_reward_clip must be above 0, got {max_clip}; leave it out for no limit")
    scores = (at_least_float32(scores) - bias) * scaling
    return scores if max_clip is None else scores.clamp(-max_clip, max_clip)


def zero_truncated(scores: Tensor, truncated: Tensor) -> Tensor:
    """The outcome of a truncated answer is 0 (``--mask_no_eos_with_zero``). It stays in the batch, with its KL.

    Args:
        scores: (B,); those of truncated answers may be anything.
        truncated: (B,), True = cut by the length limit.

    Returns:
        (B,), float32 or float64.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(scores=scores, truncated=truncated)
    return at_least_float32(scores).masked_fill(truncated.bool(), 0.0)


def stop_properly(scores: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Truncated answers score less: min(score, coef · score) for coef in [0, 1], min(score, coef) below 0.

    The minimum is there so that no answer gains by not ending: half of a negative score would be a higher score.

    Source: the recipe of ProRL v2 (NVIDIA 2025), which multiplies every truncated score.

    Args:
        scores: (B,).
        truncated: (B,), True = cut by the length limit.
        coef: ``--stop_properly_penalty``: at most 1; 1 changes nothing, 0 takes every positive score away.

    Returns:
        (B,), float32 or float64.

    Raises:
        ValueError: shapes differ, or coef is above 1 or not finite.
    """
    require_same_shape(scores=scores, truncated=truncated)
    if not (math.isfinite(coef) and coef <= 1):
        raise ValueError(
            "--stop_properly_penalty must be in [0, 1] (a factor) or below 0 (the score of a truncated answer), "
            f"got {coef}"
        )
    scores = at_least_float32(scores)
    penalised = scores * coef if coef >= 0 else torch.full_like(scores, coef)
    return torch.where(truncated.bool(), torch.minimum(scores, penalised), scores)


def overlong_penalty(lengths: Tensor, max_len: int, buffer_len: int, factor: float) -> Tensor:
    """min(-(L - (max_len - buffer_len)) / buffer_len · factor, 0), at least -factor: what to add to the scores.

    Source: DAPO (arXiv:2503.14476), eq. 13, soft overlong punishment, with a factor.

    Args:
        lengths: (B,), response lengths L in tokens.
        max_len: ``--generate_max_len``, tokens.
        buffer_len: ``--overlong_buffer_len``: the last tokens before max_len, over which the penalty grows.
        factor: ``--overlong_penalty_factor``, the largest penalty, in units of the score, at least 0.

    Returns:
        (B,), float32, between -factor and 0.

    Raises:
        ValueError: buffer_len not in (0, max_len], or factor negative or not finite.
    """
    if not 0 < buffer_len <= max_len:
        raise ValueError(
            f"--overlong_buffer_len ({buffer_len}) must be above 0 and at most --generate_max_len ({max_len})"
        )
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(f"--overlong_penalty_factor must be finite and at least 0, got {factor}")
    beyond = (lengths - (max_len - buffer_len)).clamp(0, buffer_len)  # (B,)
    return -(beyond.float() / buffer_len) * factor


@torch.no_grad()
def dense_rewards(token_scores: Tensor, action_mask: Tensor, delta: bool) -> Tensor:
    """Rewards of the trained tokens from scores of the reward source.

    Args:
        token_scores: (B, A), one score per token; untrained tokens may hold anything.
        action_mask: (B, A), True = trained token.
        delta: ``--reward_delta``: a score judges the answer up to its token, and the reward is its difference to the
            score of the trained token before (the first: its own score), so that a row sums to its last score. False:
            a score judges its own token and is its reward.

    Returns:
        (B, A), float32 or float64; untrained positions are 0.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(token_scores=token_scores, action_mask=action_mask)
    mask = action_mask.bool()
    scores = at_least_float32(token_scores).masked_fill(~mask, 0.0)  # (B, A)
    if not delta or mask.shape[1] == 0:
        return scores
    positions = torch.arange(mask.shape[1], device=mask.device)
    latest = torch.where(mask, positions, -1).cummax(dim=1).values  # (B, A), the last trained one up to here, or -1
    before = torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)  # (B, A), the last trained one before
    previous = scores.gather(1, before.clamp(min=0)).masked_fill(before < 0, 0.0)
    return (scores - previous).masked_fill(~mask, 0.0)


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
