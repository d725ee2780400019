"""Policy losses beside those of the core, in the same form and notation: ``lightppo.algorithms.losses``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightppo.algorithms.kl import limited
from lightppo.algorithms.losses import LossInputs, TokenLoss

# cpgd: the drift pulls a token back with at most this times its coefficient
DRIFT_SLOPE_LIMIT = 2.0


def gspo_policy_loss(inputs: LossInputs, *, dual_clip: float | None = None) -> TokenLoss:
    """PPO's loss with one ratio per row, s = exp(mean d of its trained tokens), so whole rows are clipped.

    Each token gets sg(s)·exp(log_probs - sg(log_probs)): the value s, and the gradient -sA to its own log prob. With
    one advantage per row and ``seq-mean-token-mean``, this is the gradient of -min(sA, clip(s)·A) itself.
    Source: Zheng et al. 2025 (arXiv:2507.18071), §4.1 and the token form of §4.3.
    """
    log_row_ratio = inputs.row_mean(inputs.log_ratio.detach())  # (B, 1)
    ratio = limited(log_row_ratio + (inputs.log_probs - inputs.log_probs.detach())).exp()  # (B, A)
    loss, lost = inputs.clipped_surrogate(ratio)
    lost = lost | inputs.beyond_limit(log_row_ratio)
    return inputs.with_dual_clip(loss, lost, dual_clip, ratio=ratio)


def cispo_policy_loss(inputs: LossInputs) -> TokenLoss:
    """-sg(clip(ρ, 1 - ε_low, 1 + ε_high))·A·log_probs: REINFORCE with a bounded weight, so no token loses its gradient.

    Sources: MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5; ScaleRL (arXiv:2510.13786) bounds the weight above only.
    """
    ratio = inputs.ratio.detach()
    weight = ratio.clamp(1.0 - inputs.eps_low, 1.0 + inputs.eps_high)
    return -weight * inputs.advantages * inputs.log_probs, inputs.metrics(
        weight_clip_ratio=weight != ratio
    )


def gmpo_policy_loss(inputs: LossInputs) -> TokenLoss:
    """-A·(geometric mean of the row's clipped ratios); unlike gspo, it clips token by token.

    d becomes min(d, ε_high) where A > 0 and max(d, -ε_low) where A < 0: the epsilons bound log ratios, not ratios. With
    c the result, each token gets sg(exp(mean c))·exp(c - sg(c)): the row's value, and a gradient to its own log prob
    alone. With one advantage per row and ``seq-mean-token-mean``, this is the gradient of the paper's loss.
    Source: Zhao et al. 2025 (arXiv:2507.20673).
    """
    within, sign = limited(inputs.log_ratio), inputs.advantages.sign()
    # (B, A)
    clipped = sign * torch.minimum(
        sign * within, sign * within.clamp(-inputs.eps_low, inputs.eps_high)
    )
    row = inputs.row_mean(clipped.detach())  # (B, 1)
    loss = -(row + (clipped - clipped.detach())).exp() * inputs.advantages
    lost = (clipped != inputs.log_ratio) & (inputs.advantages != 0)
    return loss, inputs.metrics(
        lost, ratio=limited(inputs.row_mean(inputs.log_ratio)).exp().expand_as(loss)
    )


def sapo_policy_loss(inputs: LossInputs, *, sapo_tau_pos: float, sapo_tau_neg: float) -> TokenLoss:
    """-A·(4/τ)·σ(τ(ρ - 1)), τ by the sign of A: a smooth gate in place of the clip (Gao et al. 2025, arXiv:2511.20347).

    Its slope in ρ, 4σ(1 - σ), is 1 at ρ = 1 and falls to 0 on both sides, faster for larger τ; ``sapo_gate`` logs it.
    """
    # (B, A)
    tau = torch.full_like(inputs.log_ratio, sapo_tau_neg).masked_fill(
        inputs.advantages > 0, sapo_tau_pos
    )
    gate = torch.sigmoid(tau * (inputs.ratio - 1.0))
    metrics = inputs.metrics(
        inputs.beyond_limit(inputs.log_ratio), sapo_gate=4.0 * gate * (1.0 - gate)
    )
    return -(4.0 / tau) * gate * inputs.advantages, metrics


def clip_cov_policy_loss(inputs: LossInputs, **_) -> TokenLoss:
    """PPO's loss without the ``selected`` tokens, whose covariance of log prob and advantage makes the entropy fall.

    Source: Cui et al. 2025 (arXiv:2505.22617), Clip-Cov; see ``selection.select_clip_cov``.
    """
    loss, lost = inputs.clipped_surrogate(inputs.ratio)
    lost = (
        lost | (inputs.selected & (inputs.advantages != 0)) | inputs.beyond_limit(inputs.log_ratio)
    )
    return loss.masked_fill(inputs.selected, 0.0), inputs.metrics(
        lost, selected_ratio=inputs.selected
    )


def kl_cov_policy_loss(inputs: LossInputs, *, kl_cov_coef: float, **_) -> TokenLoss:
    """-ρA, without a clip; ``selected`` tokens also pay coef·|d| (KL-Cov, Cui et al. 2025, arXiv:2505.22617).

    The slope of |x| at 0 is 0: no effect in the first optimizer step on a rollout.
    """
    penalty = (kl_cov_coef * inputs.log_ratio.abs()).masked_fill(~inputs.selected, 0.0)
    return -inputs.ratio * inputs.advantages + penalty, inputs.metrics(
        inputs.beyond_limit(inputs.log_ratio), selected_ratio=inputs.selected
    )


def gpg_policy_loss(inputs: LossInputs) -> TokenLoss:
    """-A·log_probs (arXiv:2504.02546): the policy gradient, without ratio or clip. Old log probs are for metrics."""
    return -inputs.advantages * inputs.log_probs, inputs.metrics()


def cpgd_policy_loss(inputs: LossInputs, *, cpgd_drift_coef: float) -> TokenLoss:
    """-min(d·A, clip(d, ln(1 - ε_low), ln(1 + ε_high))·A) + coef·min(sg(ρ) - 1, 2)·d.

    PPO's clip around REINFORCE's gradient: inside it each token's gradient is -A, not -ρA. The second term, the paper's
    policy drift, has the gradient of k3, ρ - 1, cut at 2, so it also pulls back tokens beyond the clip. (The paper has
    ln π in place of d: another value, the same gradient.) Nothing with a gradient is exponentiated, so d has no limit.
    Source: Liu et al. 2025 (arXiv:2505.12504), §4.3, eq. 2.
    """
    lowest = math.log1p(-inputs.eps_low) if inputs.eps_low < 1 else -math.inf
    loss = -inputs.log_ratio * inputs.advantages
    clipped_loss = -inputs.log_ratio.clamp(lowest, math.log1p(inputs.eps_high)) * inputs.advantages
    drift = (inputs.ratio.detach() - 1.0).clamp(max=DRIFT_SLOPE_LIMIT) * inputs.log_ratio
    metrics = inputs.metrics(clipped_loss > loss, cpgd_drift=drift)
    return torch.maximum(loss, clipped_loss) + cpgd_drift_coef * drift, metrics


def dppo_tv_policy_loss(
    inputs: LossInputs, *, dppo_ratio_max: float, dppo_drift_coef: float
) -> TokenLoss:
    """-sg(min(ρ, max))·A·log_probs + coef·d², without the first term where π - π_old is beyond the epsilons.

    That is where π > π_old + ε_high and A > 0, or π < π_old - ε_low and A < 0. The epsilons bound the total variation
    of {this token, any other}, so rare tokens may change by large ratios.
    Sources: Qi et al. 2026 (arXiv:2602.04879), DPPO-Binary-TV; the square, prime-rl's: Kimi K2.5 (arXiv:2602.02276).
    """
    change = inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()  # (B, A)
    return _trusted(
        inputs, change > inputs.eps_high, change < -inputs.eps_low, dppo_ratio_max, dppo_drift_coef
    )


def dppo_kl_policy_loss(
    inputs: LossInputs, *, dppo_ratio_max: float, dppo_drift_coef: float
) -> TokenLoss:
    """As :func:`dppo_tv_policy_loss`, with epsilons in nats that bound KL(π_old ‖ π) of {this token, any other}."""
    divergence, d = (
        binary_kl(inputs.old_log_probs, inputs.log_probs.detach()),
        inputs.log_ratio.detach(),
    )
    too_high, too_low = (
        (d > 0) & (divergence > inputs.eps_high),
        (d < 0) & (divergence > inputs.eps_low),
    )
    return _trusted(inputs, too_high, too_low, dppo_ratio_max, dppo_drift_coef)


def binary_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """q·ln(q/p) + (1 - q)·ln((1 - q)/(1 - p)) in nats, of log probs; inf where p is 1 and q is not."""
    rest_q, rest_p = (-log_prob.expm1().clamp(max=0.0) for log_prob in (log_q, log_p))
    of_rest = torch.xlogy(rest_q, rest_q) - torch.xlogy(rest_q, rest_p)
    return log_q.exp() * (log_q - log_p) + of_rest


def _trusted(
    inputs: LossInputs, too_high: Tensor, too_low: Tensor, ratio_max: float, drift_coef: float
) -> TokenLoss:
    """The loss of DPPO, whose policy has gone too far up or down at some tokens."""
    lost = torch.where(inputs.advantages > 0, too_high, too_low) & (inputs.advantages != 0)
    ratio = inputs.ratio.detach()
    loss = -ratio.clamp(max=ratio_max) * inputs.advantages * inputs.log_probs
    loss = loss.masked_fill(lost, 0.0)
    if drift_coef > 0:
        loss = loss + drift_coef * inputs.log_ratio.square()
    return loss, inputs.metrics(lost, dppo_truncated_ratio=ratio > ratio_max)
