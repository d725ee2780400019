"""Losses of policy, value, pairs and language models. docs/extending.md says how to add a policy loss.

Each returns one micro batch's share of the whole optimizer step's loss: see :func:`.masking.aggregate_loss`.
Notation: d = log_probs - old_log_probs, ρ = e^d the ratio (d within ±20), A the advantage, sg(x) x without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightppo.algorithms.advantages import problem_of_tensor
from lightppo.algorithms.entries import LOSS_AGG_MODES, POLICY_LOSSES, PolicyLossEntry
from lightppo.algorithms.kl import LOG_RATIO_LIMIT, limited
from lightppo.algorithms.logprobs import token_log_probs
from lightppo.algorithms.masking import (
    Aggregation,
    LossNormalizer,
    require_same_shape,
    token_mean,
    zero_where_masked,
)
from lightppo.option import shown_object
from lightppo.user_code import Checked, is_of_lightppo

Metrics = dict[str, Tensor]
TokenLoss = tuple[Tensor, Metrics]

# cpgd: the drift pulls a token back with at most this times its coefficient
DRIFT_SLOPE_LIMIT = 2.0


@dataclass(frozen=True)
class LossInputs:
    """The tensors of a micro batch that a policy loss gets: (B, A) each, 0 at masked positions."""

    log_probs: Tensor  # of the current policy; the only input with a gradient
    old_log_probs: Tensor  # of the policy in the ratio's denominator
    advantages: Tensor
    action_mask: Tensor  # bool
    eps_low: Any = None  # float: how far below 1 the ratio may fall; None: the loss does not clip
    eps_high: Any = None  # float: how far above 1 it may rise; None: the loss does not clip
    # Tensor (B, A) bool: tokens singled out by the loss's selection; None: it has no selection
    selected: Any = None

    @cached_property
    def log_ratio(self) -> Tensor:
        """Return d."""
        return self.log_probs - self.old_log_probs

    @property
    def ratio(self) -> Tensor:
        """Return ρ."""
        return limited(self.log_ratio).exp()

    def row_mean(self, values: Tensor) -> Tensor:
        """Return the mean of each row over its trained tokens, (B, 1); ``values`` are 0 elsewhere."""
        counts = self.action_mask.sum(dim=1, keepdim=True)
        return values.sum(dim=1, keepdim=True) / counts.clamp(min=1)

    def clipped_surrogate(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Return -min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)·A), and the tokens that lose their gradient to the clip."""
        loss = -ratio * self.advantages
        clipped_loss = -ratio.clamp(1.0 - self.eps_low, 1.0 + self.eps_high) * self.advantages
        return torch.maximum(loss, clipped_loss), clipped_loss > loss

    def with_dual_clip(
        self, loss: Tensor, clipped: Tensor, dual_clip: float, **metrics: Tensor
    ) -> TokenLoss:
        """Return ``loss``, at most -cA where A < 0, and its metrics; ``dual_clip`` is c."""
        bound = -dual_clip * self.advantages
        dual_clipped = (self.advantages < 0) & (loss > bound)
        loss = torch.where(dual_clipped, bound, loss)
        return loss, self.metrics(clipped | dual_clipped, dual_clip_ratio=dual_clipped, **metrics)

    def beyond_limit(self, log_ratio: Tensor) -> Tensor:
        """Return the tokens that lose their gradient to the limit on log ratios."""
        return (log_ratio.detach().abs() > LOG_RATIO_LIMIT) & (self.advantages != 0)

    def metrics(
        self, lost: Tensor | None = None, *, ratio: Tensor | None = None, **own: Tensor
    ) -> Metrics:
        """Return metrics (B, A) without gradient: clipping hit the ``lost`` tokens, ``ratio`` is from before clipping."""
        log_ratio = limited(self.log_ratio.detach())
        metrics = {
            "clip_ratio": torch.zeros_like(log_ratio) if lost is None else lost,
            "ratio": log_ratio.exp() if ratio is None else ratio,
            "approx_kl": log_ratio.expm1() - log_ratio,  # k3 of old to new, nats
        }
        metrics |= own
        return {name: x.detach().to(log_ratio.dtype) for name, x in metrics.items()}


PolicyLossFn = Callable[..., TokenLoss]
"""``(inputs: LossInputs, **options of its entry)`` → loss of each token (B, A), and :meth:`LossInputs.metrics`. A token's
gradient comes from its own loss alone."""

SelectionFn = Callable[..., Tensor]
"""``(log_probs, advantages, uniforms, *, options, all_reduce_sum)`` → the tokens (N,) bool that a policy loss singles
out, of this rank's N trained tokens in the rollout; every rank calls it, even without tokens. ``log_probs`` are from
before the first update on the rollout; ``uniforms``, in [0, 1) and independent of ranks, break ties."""


def ppo_policy_loss(inputs: LossInputs, *, dual_clip: float | None = None) -> TokenLoss:
    """-min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)·A); with ``dual_clip`` c, at most -cA where A < 0.

    Sources: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; two epsilons ("clip-higher"): DAPO (arXiv:2503.14476),
    eq. 10; dual clip: Ye et al. 2020 (arXiv:1912.09729).
    """
    loss, clipped = inputs.clipped_surrogate(inputs.ratio)
    clipped = clipped | inputs.beyond_limit(inputs.log_ratio)
    if dual_clip is None:
        return loss, inputs.metrics(clipped)
    return inputs.with_dual_clip(loss, clipped, dual_clip)


def gspo_policy_loss(inputs: LossInputs, *, dual_clip: float | None = None) -> TokenLoss:
    """PPO's loss with one ratio per row, s = exp(mean d of its trained tokens), so whole rows are clipped.

    Each token gets sg(s)·exp(log_probs - sg(log_probs)): the value s, and the gradient -sA to its own log prob. With
    one advantage per row and ``seq-mean-token-mean``, this is the gradient of -min(sA, clip(s)·A) itself.
    Source: Zheng et al. 2025 (arXiv:2507.18071), §4.1 and the token form of §4.3.
    """
    log_row_ratio = inputs.row_mean(inputs.log_ratio.detach())  # (B, 1)
    ratio = limited(log_row_ratio + (inputs.log_probs - inputs.log_probs.detach())).exp()  # (B, A)
    loss, clipped = inputs.clipped_surrogate(ratio)
    clipped = clipped | inputs.beyond_limit(log_row_ratio)
    if dual_clip is None:
        return loss, inputs.metrics(clipped, ratio=ratio)
    return inputs.with_dual_clip(loss, clipped, dual_clip, ratio=ratio)


def cispo_policy_loss(inputs: LossInputs) -> TokenLoss:
    """-sg(clip(ρ, 1 - ε_low, 1 + ε_high))·A·log_probs: REINFORCE with a bounded weight, so no token loses its gradient.

    Sources: MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5; ScaleRL (arXiv:2510.13786) bounds the weight above only.
    """
    ratio = inputs.ratio.detach()
    weight = ratio.clamp(1.0 - inputs.eps_low, 1.0 + inputs.eps_high)
    loss = -weight * inputs.advantages * inputs.log_probs
    return loss, inputs.metrics(weight_clip_ratio=weight != ratio)


def gmpo_policy_loss(inputs: LossInputs) -> TokenLoss:
    """-A·(geometric mean of the row's clipped ratios); unlike gspo, it clips token by token.

    d becomes min(d, ε_high) where A > 0 and max(d, -ε_low) where A < 0: the epsilons bound log ratios, not ratios. With
    c the result, each token gets sg(exp(mean c))·exp(c - sg(c)): the row's value, and a gradient to its own log prob
    alone. With one advantage per row and ``seq-mean-token-mean``, this is the gradient of the paper's loss.
    Source: Zhao et al. 2025 (arXiv:2507.20673).
    """
    log_ratio = limited(inputs.log_ratio)
    sign = inputs.advantages.sign()
    bounded = log_ratio.clamp(-inputs.eps_low, inputs.eps_high)
    bounded = sign * torch.minimum(sign * log_ratio, sign * bounded)  # (B, A)
    row_mean = inputs.row_mean(bounded.detach())  # (B, 1)
    loss = -(row_mean + (bounded - bounded.detach())).exp() * inputs.advantages
    clipped = (bounded != inputs.log_ratio) & (inputs.advantages != 0)
    row_ratio = limited(inputs.row_mean(inputs.log_ratio)).exp()  # (B, 1)
    return loss, inputs.metrics(clipped, ratio=row_ratio.expand_as(loss))


def sapo_policy_loss(inputs: LossInputs, *, sapo_tau_pos: float, sapo_tau_neg: float) -> TokenLoss:
    """-A·(4/τ)·σ(τ(ρ - 1)), τ by the sign of A: a smooth gate in place of the clip (Gao et al. 2025, arXiv:2511.20347).

    Its slope in ρ, 4σ(1 - σ), is 1 at ρ = 1 and falls to 0 on both sides, faster for larger τ; ``sapo_gate`` logs it.
    """
    tau = torch.full_like(inputs.log_ratio, sapo_tau_neg)
    tau = tau.masked_fill(inputs.advantages > 0, sapo_tau_pos)  # (B, A)
    gate = torch.sigmoid(tau * (inputs.ratio - 1.0))
    loss = -(4.0 / tau) * gate * inputs.advantages
    slope = 4.0 * gate * (1.0 - gate)
    return loss, inputs.metrics(inputs.beyond_limit(inputs.log_ratio), sapo_gate=slope)


def clip_cov_policy_loss(inputs: LossInputs, **_: Any) -> TokenLoss:
    """PPO's loss without the ``selected`` tokens, whose covariance of log prob and advantage makes the entropy fall.

    Source: Cui et al. 2025 (arXiv:2505.22617), Clip-Cov; see ``selection.select_clip_cov``.
    """
    loss, clipped = inputs.clipped_surrogate(inputs.ratio)
    clipped = clipped | (inputs.selected & (inputs.advantages != 0))
    clipped = clipped | inputs.beyond_limit(inputs.log_ratio)
    loss = loss.masked_fill(inputs.selected, 0.0)
    return loss, inputs.metrics(clipped, selected_ratio=inputs.selected)


def kl_cov_policy_loss(inputs: LossInputs, *, kl_cov_coef: float, **_: Any) -> TokenLoss:
    """-ρA, without a clip; ``selected`` tokens also pay coef·|d| (KL-Cov, Cui et al. 2025, arXiv:2505.22617).

    The slope of |x| at 0 is 0: no effect in the first optimizer step on a rollout.
    """
    penalty = (kl_cov_coef * inputs.log_ratio.abs()).masked_fill(~inputs.selected, 0.0)
    loss = -inputs.ratio * inputs.advantages + penalty
    clipped = inputs.beyond_limit(inputs.log_ratio)
    return loss, inputs.metrics(clipped, selected_ratio=inputs.selected)


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
    low = math.log1p(-inputs.eps_low) if inputs.eps_low < 1 else -math.inf
    loss = -inputs.log_ratio * inputs.advantages
    clipped_loss = -inputs.log_ratio.clamp(low, math.log1p(inputs.eps_high)) * inputs.advantages
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
    too_high = change > inputs.eps_high
    too_low = change < -inputs.eps_low
    return _trust_region_loss(inputs, too_high, too_low, dppo_ratio_max, dppo_drift_coef)


def dppo_kl_policy_loss(
    inputs: LossInputs, *, dppo_ratio_max: float, dppo_drift_coef: float
) -> TokenLoss:
    """:func:`dppo_tv_policy_loss` with epsilons in nats that bound KL(π_old ‖ π) of {this token, any other}."""
    divergence = binary_kl(inputs.old_log_probs, inputs.log_probs.detach())
    log_ratio = inputs.log_ratio.detach()
    too_high = (log_ratio > 0) & (divergence > inputs.eps_high)
    too_low = (log_ratio < 0) & (divergence > inputs.eps_low)
    return _trust_region_loss(inputs, too_high, too_low, dppo_ratio_max, dppo_drift_coef)


def binary_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """q·ln(q/p) + (1 - q)·ln((1 - q)/(1 - p)) in nats, of log probs; inf where p is 1 and q is not."""
    rest_q = -log_q.expm1().clamp(max=0.0)
    rest_p = -log_p.expm1().clamp(max=0.0)
    rest_kl = torch.xlogy(rest_q, rest_q) - torch.xlogy(rest_q, rest_p)
    return log_q.exp() * (log_q - log_p) + rest_kl


def _trust_region_loss(
    inputs: LossInputs, too_high: Tensor, too_low: Tensor, ratio_max: float, drift_coef: float
) -> TokenLoss:
    """Return the loss of DPPO, whose policy has gone too far up or down at some tokens."""
    masked = torch.where(inputs.advantages > 0, too_high, too_low) & (inputs.advantages != 0)
    ratio = inputs.ratio.detach()
    loss = -ratio.clamp(max=ratio_max) * inputs.advantages * inputs.log_probs
    loss = loss.masked_fill(masked, 0.0)
    if drift_coef > 0:
        loss = loss + drift_coef * inputs.log_ratio.square()
    return loss, inputs.metrics(masked, dppo_truncated_ratio=ratio > ratio_max)


def problem_of_loss(result: Any, inputs: LossInputs, **_: Any) -> str:
    """Return what is wrong with the result of a policy loss of the user's; empty if nothing."""
    if not isinstance(result, tuple) or len(result) != 2:
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        return (
            f"must return a pair (loss of each token, metrics), as (loss, x.metrics()), not {got}"
        )
    loss, metrics = result
    shape = tuple(inputs.log_probs.shape)
    if problem := problem_of_tensor(loss, shape, "losses", "one per token: without a mean"):
        return problem
    if inputs.log_probs.requires_grad and not loss.requires_grad:
        return "returns losses without a gradient: compute them from x.log_probs or x.ratio"
    if not isinstance(metrics, Mapping):
        return f"must return metrics by name, as x.metrics() does, not {type(metrics).__name__}"
    for name, value in metrics.items():
        if problem := problem_of_tensor(value, shape, f"the metric {name!r}", "one per token"):
            return problem
    missing = {"clip_ratio", "ratio", "approx_kl"} - metrics.keys()
    if missing:
        return f"returns no metric {min(missing)!r}: begin with x.metrics()"
    return ""


@dataclass(frozen=True)
class PolicyLoss:
    """The policy loss of one micro batch. Refuses unknown names and values out of range."""

    # of both sides, where clip_eps_low and clip_eps_high say nothing else; None: the loss's default, 0.2 for ppo
    clip_eps: InitVar[float | None] = None
    clip_eps_high: float | None = None  # above 0
    policy_loss: str | Callable = "ppo"  # one of entries.POLICY_LOSSES, path.py:name, or a function
    # one of entries.LOSS_AGG_MODES, whatever the loss's paper uses
    loss_agg_mode: str = "token-mean"
    # by flag name; missing or None: the default
    options: Mapping[str, float | None] = field(default_factory=dict)
    clip_eps_low: float | None = None  # above 0, at most 1 (no lower bound)
    horizon: float = 1.0  # of seq-mean-token-sum-norm without a normalizer, in tokens
    # what the names above stand for
    of_tokens: PolicyLossFn = field(init=False, repr=False, compare=False)
    aggregate: Aggregation = field(init=False, repr=False, compare=False)
    # of the last call without a normalizer
    last_metrics: Metrics = field(init=False, repr=False, compare=False)

    def __post_init__(self, clip_eps: float | None) -> None:
        entry = self.entry
        name = shown_object(self.policy_loss)
        aggregate = LOSS_AGG_MODES.find(self.loss_agg_mode).fn
        low = clip_eps if self.clip_eps_low is None else self.clip_eps_low
        high = clip_eps if self.clip_eps_high is None else self.clip_eps_high
        if entry.eps_clip is not None:
            low = entry.eps_clip[0] if low is None else low
            high = entry.eps_clip[1] if high is None else high
        elif (low, high) != (None, None):
            raise ValueError(
                f"--eps_clip: policy_loss {name!r} clips nothing; leave the epsilons out"
            )
        if low is not None and high is not None and not (0 < low <= 1 and high > 0):
            raise ValueError(
                f"--eps_clip_low must be above 0 and at most 1, --eps_clip_high above 0, not {low}, {high}"
            )
        object.__setattr__(self, "clip_eps_low", low)
        object.__setattr__(self, "clip_eps_high", high)
        object.__setattr__(self, "options", entry.completed(self.options, f"--policy_loss {name}"))
        of_tokens = entry.fn
        if not is_of_lightppo(of_tokens):
            called_with = "it is called with lightppo.algorithms.losses.LossInputs alone"
            of_tokens = Checked(of_tokens, "--policy_loss", problem_of_loss, called_with)
        object.__setattr__(self, "of_tokens", of_tokens)
        object.__setattr__(self, "aggregate", aggregate)
        object.__setattr__(self, "last_metrics", {})

    @cached_property
    def entry(self) -> PolicyLossEntry:
        """Return the entry of the loss in the tables."""
        return POLICY_LOSSES.find(self.policy_loss)

    @property
    def selects_tokens(self) -> bool:
        """Tell whether it singles out tokens of the rollout."""
        return self.entry.selection is not None

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        normalizer: LossNormalizer | None = None,
        *,
        weights: Tensor | None = None,
        selected: Tensor | None = None,
        entropy_mask: Tensor | None = None,
    ) -> tuple[Tensor, Metrics] | Tensor:
        """Return the loss, and detached shares of the step's token means: ``clip_ratio``, ``ratio``, ``approx_kl``, …

        Only ``log_probs`` gets a gradient, so ``old_log_probs`` may be ``log_probs`` itself in the first step.

        Args:
            normalizer: counts of the whole optimizer step. Without it, this micro batch is the step, and the loss is
                returned alone, as scripts of LightRFT and OpenRLHF call it; :meth:`get_last_stats` has its metrics.
            weights: (B, A), a factor on each token's loss. A token of weight 0 has no gradient; it still counts in the
                normalizer, the metrics and its row's ratio.
            selected: (B, A), the tokens that clip_cov and kl_cov single out; ``None`` for all other losses.
            entropy_mask: (B, A), weights of 0 and 1 of scripts, which also have it in the place of ``normalizer``.
        """
        if (
            not isinstance(normalizer, LossNormalizer)
            or action_mask is None
            or entropy_mask is not None
        ):
            tensors = (log_probs, old_log_probs, advantages, action_mask)
            return self._loss_of_script(*tensors, normalizer, weights, selected, entropy_mask)
        require_same_shape(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=advantages,
            action_mask=action_mask,
            weights=weights,
            selected=selected,
        )
        if self.selects_tokens != (selected is not None):
            raise ValueError(
                f"policy_loss {shown_object(self.policy_loss)!r}: give selected if, and only if, it selects tokens"
            )
        mask = action_mask.bool()
        inputs = LossInputs(
            zero_where_masked(log_probs, mask),
            zero_where_masked(old_log_probs.detach(), mask),
            zero_where_masked(advantages.detach(), mask),
            action_mask=mask,
            eps_low=self.clip_eps_low,
            eps_high=self.clip_eps_high,
            selected=None if selected is None else selected.bool() & mask,
        )
        token_loss, token_metrics = self.of_tokens(inputs, **self.options)
        if weights is not None:
            weights = zero_where_masked(weights.detach(), mask)
            # A weight of 0 removes a token even if its loss is not finite.
            token_loss = (token_loss * weights).masked_fill(weights == 0, 0.0)
        loss = self.aggregate(token_loss, mask, normalizer)
        return loss, token_means(token_metrics, mask, normalizer)

    def _loss_of_script(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None,
        normalizer: LossNormalizer | Tensor | None,
        weights: Tensor | None,
        selected: Tensor | None,
        entropy_mask: Tensor | None,
    ) -> tuple[Tensor, Metrics] | Tensor:
        """Return the loss of a call without masks or normalizer, or with an entropy mask."""
        if isinstance(normalizer, Tensor):
            entropy_mask = normalizer
            normalizer = None
        if action_mask is None:
            action_mask = torch.ones_like(log_probs, dtype=torch.bool)
        if entropy_mask is not None:
            entropy_weights = entropy_mask.to(log_probs.dtype)
            weights = entropy_weights if weights is None else weights * entropy_weights
        counts = normalizer or LossNormalizer.from_masks([action_mask], scale=self.horizon)
        inputs = (log_probs, old_log_probs, advantages, action_mask, counts)
        loss, metrics = self(*inputs, weights=weights, selected=selected)
        if normalizer is not None:
            return loss, metrics
        self.last_metrics.clear()
        self.last_metrics.update(metrics)
        return loss

    def get_last_stats(self) -> dict[str, float]:
        """Return the metrics of the last call without a ``normalizer``."""
        return {name: float(value) for name, value in self.last_metrics.items()}


def token_means(token_metrics: Metrics, mask: Tensor, normalizer: LossNormalizer) -> Metrics:
    """Return this micro batch's share of the step's token means, without gradient."""
    return {name: token_mean(x.detach(), mask, normalizer) for name, x in token_metrics.items()}


@dataclass(frozen=True)
class ValueLoss:
    """½·max((V - R)², (clip(V, V_old ± c) - R)²) of one micro batch.

    With δ (Huber), an error |e| > δ costs δ(|e| - δ/2). Source: OpenAI's PPO; Engstrom et al. 2020 (arXiv:2005.12729).
    """

    value_clip: float | None = 0.2  # c, in units of the value, above 0; None: no clipping
    loss_agg_mode: str = "token-mean"
    huber_delta: float | None = None  # δ, above 0; None: ½e² everywhere
    clip_eps: InitVar[float | EllipsisType | None] = ...  # LightRFT's name of value_clip
    horizon: float = 1.0  # as of PolicyLoss
    aggregate: Aggregation = field(init=False, repr=False, compare=False)  # that of loss_agg_mode

    def __post_init__(self, clip_eps: float | EllipsisType | None) -> None:
        if clip_eps is not ...:
            object.__setattr__(self, "value_clip", clip_eps)
        object.__setattr__(self, "aggregate", LOSS_AGG_MODES.find(self.loss_agg_mode).fn)
        for flag, limit in (
            ("--value_clip", self.value_clip),
            ("--value_huber_delta", self.huber_delta),
        ):
            if limit is not None and not limit > 0:
                raise ValueError(f"{flag} must be above 0, or None, not {limit}")

    def __call__(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor | None = None,
        normalizer: LossNormalizer | None = None,
    ) -> tuple[Tensor, Metrics] | Tensor:
        """Return the loss, and the share of the step's tokens whose clipped error is the larger one.

        All (B, A): ``old_values`` are the critic's at rollout time. Without a ``normalizer``, this is the whole step, and
        the loss is returned alone.
        """
        if action_mask is None:
            action_mask = torch.ones_like(values, dtype=torch.bool)
        if normalizer is None:
            normalizer = LossNormalizer.from_masks([action_mask], scale=self.horizon)
            return self(values, old_values, returns, action_mask, normalizer)[0]
        require_same_shape(
            values=values, old_values=old_values, returns=returns, action_mask=action_mask
        )
        mask = action_mask.bool()
        values = zero_where_masked(values, mask)
        old_values = zero_where_masked(old_values.detach(), mask)
        returns = zero_where_masked(returns.detach(), mask)
        error = self._error(values - returns)
        clipped = torch.zeros_like(error)
        if self.value_clip is not None:
            clipped_values = values.clamp(
                old_values - self.value_clip, old_values + self.value_clip
            )
            clipped_error = self._error(clipped_values - returns)
            clipped = (clipped_error > error).to(error.dtype)
            error = torch.maximum(error, clipped_error)
        loss = self.aggregate(error, mask, normalizer)
        return loss, token_means({"value_clip_ratio": clipped}, mask, normalizer)

    def _error(self, difference: Tensor) -> Tensor:
        """Return ½e², or Huber's, of each token."""
        if self.huber_delta is None:
            return 0.5 * difference.square()
        zeros = torch.zeros_like(difference)
        return torch.nn.functional.huber_loss(
            difference, zeros, reduction="none", delta=self.huber_delta
        )


# -- pairs: a chosen answer y_c and a rejected one y_l to the same prompt; one loss per pair (B,) ---------------------


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """-log σ(r_c - r_l - m) of scores (B,): how surprising it is that y_c won, where P(y_c wins) = σ(r_c - r_l).

    The margin m, 0 if ``None``, says by how much r_c must lead. Sources: Bradley and Terry 1952; Ouyang et al. 2022
    (arXiv:2203.02155), eq. 1; margin: Touvron et al. 2023 (arXiv:2307.09288), eq. 2.
    """
    require_same_shape(chosen=chosen, rejected=rejected, margin=margin)
    lead = chosen - rejected
    return -logsigmoid(lead if margin is None else lead - margin)


def answer_log_probs(log_probs: Tensor, mask: Tensor, mean: bool) -> Tensor:
    """Return the log prob of each answer (B,): the sum, or the mean, of ``log_probs`` (B, A) over its tokens ``mask``."""
    total = log_probs.masked_fill(~mask, 0).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if mean else total


def dpo_loss(lead: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - ε) log σ(βh) - ε log σ(-βh), where the ``lead`` h (B,) is log[π/π_ref](y_c) - log[π/π_ref](y_l).

    ε, ``label_smoothing``, is the chance that a pair has its answers exchanged: cDPO. Its loss is least at
    βh = log[(1 - ε) / ε], which it does not run past. Sources: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; cDPO:
    Mitchell 2023, https://ericmitchell.ai/cdpo.pdf.
    """
    loss = -(1 - label_smoothing) * logsigmoid(beta * lead)
    return loss - label_smoothing * logsigmoid(-beta * lead)


def ipo_loss(lead: Tensor, *, beta: float) -> Tensor:
    """(h - 1 / 2β)², h as in :func:`dpo_loss`: it stops at a lead of 1 / 2β, however clear the preferences are.

    The paper's answers are single actions. For answers of many tokens h is here of mean log probs, as its authors run
    it, lest 1 / 2β mean another lead per token at each length. Source: Azar et al. 2023 (arXiv:2310.12036), eq. 17.
    """
    return (lead - 1 / (2 * beta)) ** 2


def pair_mean(pair_loss: Tensor, pairs: float, dp_size: int = 1) -> Tensor:
    """Return a micro batch's share of the mean of ``pair_loss`` (B,) over the step's ``pairs`` on all ranks.

    Derivation: :func:`~lightppo.algorithms.masking.aggregate_loss`.
    """
    normalizer = LossNormalizer(tokens=pairs, sequences=pairs, dp_size=dp_size)
    losses = pair_loss[:, None]
    return token_mean(losses, torch.ones_like(losses), normalizer)


# -- language models on text ------------------------------------------------------------------------------------------


IGNORE_INDEX = -100  # labels with this value have no loss


class GPTLMLoss:
    """Next-token cross entropy, mean over the step's tokens; for supervised training and PTX (arXiv:2203.02155)."""

    IGNORE_INDEX = IGNORE_INDEX

    def num_tokens(self, labels: Tensor) -> int:
        """Count the tokens of ``labels`` (B, S) with a loss; their sum over the step is ``normalizer_tokens``."""
        return int((labels[:, 1:] != self.IGNORE_INDEX).sum())

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        normalizer_tokens: float | None = None,
        dp_size: int = 1,
    ) -> Tensor:
        """Return the loss of one micro batch; position t of ``logits`` (B, S, V) predicts label t + 1.

        ``normalizer_tokens`` counts the whole optimizer step over all ranks; ``None``: this micro batch is the step.
        """
        labels = labels[:, 1:]
        mask = labels != self.IGNORE_INDEX  # (B, S-1)
        token_loss = -token_log_probs(logits[:, :-1], labels.masked_fill(~mask, 0))
        tokens = float(mask.sum()) if normalizer_tokens is None else normalizer_tokens
        # token-mean needs only the tokens
        return token_mean(token_loss, mask, LossNormalizer(tokens, sequences=0, dp_size=dp_size))


def pretrain_loss(
    model: Any, batch: Mapping[str, Tensor], loss_fn: GPTLMLoss, tokens: float, dp_size: int
) -> Tensor:
    """Return the language-model loss of a batch: its share of the mean over the labelled ``tokens`` of all ranks."""
    output = model(batch["input_ids"], attention_mask=batch["attention_mask"], return_output=True)
    return loss_fn(output.logits, batch["labels"], tokens, dp_size)  # of logits (B, S, V)
