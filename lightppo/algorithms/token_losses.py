"""Policy losses by kind, in one table: the loss of each sampled token, which
:class:`lightppo.algorithms.policy_losses.PolicyLoss` masks, weighs and aggregates.

To add one: write the function, add its lines to ``POLICY_LOSSES`` and to ``traits.POLICY_LOSS_TRAITS``, the ranges of
its options to ``policy_losses.OPTION_RANGES``, a test with numbers worked out by hand, and a section in
docs/algorithms.md. The tests over the whole table find it.

Two rules of all of them. With old = current log probs (the first step on a rollout) and no token selected, the gradient
of every token's loss is -A, that of REINFORCE. And no log-ratio overflows: where a ratio is formed, the log-ratio stops
at ±20, and beyond it the token has no gradient through the ratio.

Notation: ρ = exp(log_probs - old_log_probs) of a token, A its advantage, sg = no gradient flows through.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from lightppo.algorithms.kl import LOG_RATIO_LIMIT

Metrics = dict[str, Tensor]
DRIFT_SLOPE_LIMIT = 2.0  # cpgd: the drift pulls a token back with at most this times its coefficient


class PolicyLossFn(Protocol):
    """The signature of all policy losses. A function names what it uses and takes the rest as ``**_``."""

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        *,
        action_mask: Tensor,
        clip_eps_low: float | None,
        clip_eps_high: float | None,
        selected: Tensor | None,
        **options: float | None,
    ) -> tuple[Tensor, Metrics]:
        """Loss of each token. A token's gradient comes from its own loss alone.

        Args:
            log_probs: (B, A), current policy, with gradient. All inputs are 0 at masked positions.
            old_log_probs: (B, A), the policy the ratio is taken to, no gradient.
            advantages: (B, A), no gradient.
            action_mask: (B, A) bool, for losses that look at whole sequences.
            clip_eps_low: how far below 1 the ratio may fall; ``None`` for losses that clip nothing.
            clip_eps_high: how far above 1 the ratio may rise; likewise.
            selected: (B, A) bool, for losses that treat some tokens differently.
            options: those of ``traits.POLICY_LOSS_TRAITS``.

        Returns:
            token loss (B, A) and metrics (B, A) each: at least ``clip_ratio`` (1 where clipping took away the
            gradient through the ratio), ``ratio`` (before clipping; that of the row for losses that take one ratio per
            row), ``approx_kl`` (k3 of old to new, nats).
        """
        ...


def ppo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None = None,
    **_: object,
) -> tuple[Tensor, Metrics]:
    """-min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)·A); with ``dual_clip`` c, where A < 0, at most -cA.

    Where A < 0, nothing else bounds the loss of a token that has become far more probable; dual clip lets such a token
    go (no gradient above ρ = c) instead of letting it rule the step.

    Sources: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; two epsilons ("clip-higher"): DAPO (arXiv:2503.14476),
    eq. 10; dual clip: Ye et al. 2020 (arXiv:1912.09729). Arguments: :class:`PolicyLossFn`.
    """
    log_ratio = log_probs - old_log_probs
    loss, lost = _clipped_surrogate(_ratio(log_ratio), advantages, clip_eps_low, clip_eps_high)
    lost = lost | (_beyond_limit(log_ratio) & (advantages != 0))
    if dual_clip is None:
        return loss, _metrics(log_ratio, lost)
    bound = -dual_clip * advantages
    dual_clipped = (advantages < 0) & (loss > bound)
    loss = torch.where(dual_clipped, bound, loss)
    return loss, _metrics(log_ratio, lost | dual_clipped, dual_clip_ratio=dual_clipped)


def gspo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    action_mask: Tensor,
    clip_eps_low: float,
    clip_eps_high: float,
    **_: object,
) -> tuple[Tensor, Metrics]:
    """PPO's loss with the ratio of the row, s = exp(mean log-ratio of its trained tokens), so whole rows are clipped.

    Each token gets sg(s)·exp(log_probs - sg(log_probs)): the value s, and the gradient -sA to its own log prob. With
    one advantage per row and ``seq-mean-token-mean`` that is the gradient of -min(sA, clip(s)·A) itself, spread over
    the row's tokens; with ``token-mean`` long rows weigh more.

    Source: Zheng et al. 2025 (arXiv:2507.18071), §4.1 and the token form of §4.3. Arguments: :class:`PolicyLossFn`.
    """
    log_ratio = log_probs - old_log_probs
    log_row_ratio = _row_mean(log_ratio.detach(), action_mask)  # (B, 1)
    ratio = _ratio(log_row_ratio + (log_probs - log_probs.detach()))  # (B, A)
    loss, lost = _clipped_surrogate(ratio, advantages, clip_eps_low, clip_eps_high)
    lost = lost | (_beyond_limit(log_row_ratio) & (advantages != 0))
    return loss, _metrics(log_ratio, lost, ratio=ratio)


def cispo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    **_: object,
) -> tuple[Tensor, Metrics]:
    """-sg(clip(ρ, 1 - ε_low, 1 + ε_high))·A·log_probs: REINFORCE with a bounded weight, so no token loses its gradient.

    ``clip_ratio`` is 0, therefore; ``weight_clip_ratio`` counts the tokens whose weight was cut.

    Sources: MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5; ScaleRL (arXiv:2510.13786) bounds the weight above only
    (ε_low 1). Arguments: :class:`PolicyLossFn`.
    """
    log_ratio = log_probs - old_log_probs
    ratio = _ratio(log_ratio.detach())
    weight = ratio.clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high)
    nothing_lost = torch.zeros_like(weight, dtype=torch.bool)
    return -weight * advantages * log_probs, _metrics(log_ratio, nothing_lost, weight_clip_ratio=weight != ratio)


def gmpo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    action_mask: Tensor,
    clip_eps_low: float,
    clip_eps_high: float,
    **_: object,
) -> tuple[Tensor, Metrics]:
    """-A·(geometric mean of the row's clipped ratios); unlike gspo, the clip acts on each token.

    A log-ratio d becomes min(d, ε_high) where A > 0 and max(d, -ε_low) where A < 0: the epsilons bound log-ratios, not
    ratios. With c the result, each token gets sg(exp(mean c))·exp(c - sg(c)): the value of the row, and a gradient to
    its own log prob alone. With one advantage per row and ``seq-mean-token-mean`` that is the gradient of the paper's
    loss.

    Source: Zhao et al. 2025 (arXiv:2507.20673). Arguments: :class:`PolicyLossFn`.
    """
    log_ratio = log_probs - old_log_probs
    limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    sign = advantages.sign()
    clipped = sign * torch.minimum(sign * limited, sign * limited.clamp(-clip_eps_low, clip_eps_high))  # (B, A)
    row = _row_mean(clipped.detach(), action_mask)  # (B, 1)
    loss = -(row + (clipped - clipped.detach())).exp() * advantages
    lost = (clipped != log_ratio) & (advantages != 0)
    return loss, _metrics(log_ratio, lost, ratio=_ratio(_row_mean(log_ratio, action_mask)).expand_as(loss))


def sapo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    sapo_tau_pos: float,
    sapo_tau_neg: float,
    **_: object,
) -> tuple[Tensor, Metrics]:
    """-A·(4/τ)·σ(τ(ρ - 1)), τ by the sign of A: a smooth gate in place of the clip.

    Its slope in ρ, 4σ(1 - σ), is 1 at ρ = 1 and falls to 0 on both sides, faster with larger τ; ``sapo_gate`` logs it.

    Source: Gao et al. 2025 (arXiv:2511.20347). Arguments: :class:`PolicyLossFn`.
    """
    log_ratio = log_probs - old_log_probs
    tau = torch.full_like(log_ratio, sapo_tau_neg).masked_fill(advantages > 0, sapo_tau_pos)  # (B, A)
    gate = torch.sigmoid(tau * (_ratio(log_ratio) - 1.0))
    lost = _beyond_limit(log_ratio) & (advantages != 0)
    return -(4.0 / tau) * gate * advantages, _metrics(log_ratio, lost, sapo_gate=4.0 * gate * (1.0 - gate))


def clip_cov_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    selected: Tensor,
    **_: object,
) -> tuple[Tensor, Metrics]:
    """PPO's loss; ``selected`` tokens have loss 0 and no gradient.

    They are few, drawn among those of high covariance between log prob and advantage, which are the ones that make the
    entropy fall: see :func:`lightppo.algorithms.selection.select_clip_cov`.

    Source: Cui et al. 2025 (arXiv:2505.22617), Clip-Cov. Arguments: :class:`PolicyLossFn`.
    """
    log_ratio = log_probs - old_log_probs
    loss, lost = _clipped_surrogate(_ratio(log_ratio), advantages, clip_eps_low, clip_eps_high)
    lost = lost | ((selected | _beyond_limit(log_ratio)) & (advantages != 0))
    return loss.masked_fill(selected, 0.0), _metrics(log_ratio, lost, selected_ratio=selected)


def kl_cov_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    selected: Tensor,
    kl_cov_coef: float,
    **_: object,
) -> tuple[Tensor, Metrics]:
    """-ρA, without a clip; ``selected`` tokens also pay coef·|log_probs - old_log_probs|, which holds them in place.

    The slope of |x| at 0 is 0, so the term acts from the second optimizer step on a rollout on.

    Source: Cui et al. 2025 (arXiv:2505.22617), KL-Cov. Arguments: :class:`PolicyLossFn`.
    """
    log_ratio = log_probs - old_log_probs
    penalty = (kl_cov_coef * log_ratio.abs()).masked_fill(~selected, 0.0)
    lost = _beyond_limit(log_ratio) & (advantages != 0)
    return -_ratio(log_ratio) * advantages + penalty, _metrics(log_ratio, lost, selected_ratio=selected)


def gpg_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, **_: object
) -> tuple[Tensor, Metrics]:
    """-A·log_probs: the policy gradient, without ratio or clip. The old log probs serve the metrics alone.

    Source: Chu et al. 2025 (arXiv:2504.02546). Arguments: :class:`PolicyLossFn`.
    """
    log_ratio = log_probs - old_log_probs
    return -advantages * log_probs, _metrics(log_ratio, torch.zeros_like(log_ratio, dtype=torch.bool))


def cpgd_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    cpgd_drift_coef: float,
    **_: object,
) -> tuple[Tensor, Metrics]:
    """-min(d·A, clip(d, ln(1 - ε_low), ln(1 + ε_high))·A) + coef·min(sg(ρ) - 1, 2)·d,  d = ln ρ.

    PPO's clip around the gradient of REINFORCE: inside it each token's gradient is -A, not -ρA. The second term is the
    paper's policy drift, the KL from the old to the current policy: its gradient is that of the k3 estimator, ρ - 1,
    cut at 2, so it also pulls back tokens beyond the clip. (The paper multiplies by ln π instead of d: another value,
    the same gradient; with d it is never negative.) Nothing that has a gradient is exponentiated, so d has no limit.

    Source: Liu et al. 2025 (arXiv:2505.12504), §4.3, eq. 2. Arguments: :class:`PolicyLossFn`.
    """
    log_ratio = log_probs - old_log_probs
    lowest = math.log1p(-clip_eps_low) if clip_eps_low < 1 else -math.inf
    loss = -log_ratio * advantages
    clipped_loss = -log_ratio.clamp(lowest, math.log1p(clip_eps_high)) * advantages
    drift = (_ratio(log_ratio.detach()) - 1.0).clamp(max=DRIFT_SLOPE_LIMIT) * log_ratio
    metrics = _metrics(log_ratio, clipped_loss > loss, cpgd_drift=drift)
    return torch.maximum(loss, clipped_loss) + cpgd_drift_coef * drift, metrics


POLICY_LOSSES: dict[str, PolicyLossFn] = {
    "ppo": ppo_policy_loss,
    "gspo": gspo_policy_loss,
    "cispo": cispo_policy_loss,
    "gmpo": gmpo_policy_loss,
    "sapo": sapo_policy_loss,
    "clip_cov": clip_cov_policy_loss,
    "kl_cov": kl_cov_policy_loss,
    "gpg": gpg_policy_loss,
    "cpgd": cpgd_policy_loss,
}


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _beyond_limit(log_ratio: Tensor) -> Tensor:
    return log_ratio.detach().abs() > LOG_RATIO_LIMIT


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, 1), mean of each row over its trained tokens; ``values`` are 0 elsewhere."""
    return values.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """-min(ρA, clip(ρ)·A), and where the clip took the gradient away."""
    loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages
    return torch.maximum(loss, clipped_loss), clipped_loss > loss


def _metrics(log_ratio: Tensor, lost: Tensor, *, ratio: Tensor | None = None, **own: Tensor) -> Metrics:
    """What every loss reports, and its own; (B, A) each, without gradient, as floats."""
    limited = log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = {
        "clip_ratio": lost,
        "ratio": limited.exp() if ratio is None else ratio.detach(),
        "approx_kl": limited.expm1() - limited,
    } | own
    return {name: x.detach().to(log_ratio.dtype) for name, x in metrics.items()}
