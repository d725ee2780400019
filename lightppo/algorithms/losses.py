"""Losses: policy (by kind, in one table), value, and language modelling.

Each returns one micro batch's share of the loss of the whole optimizer step; see
:func:`lightppo.algorithms.masking.aggregate_loss` for what that means and why it does not depend on the micro batches.
To add a policy loss: write the token-level function, add its line to ``POLICY_LOSSES``, a test with numbers worked out
by hand, and a section in docs/algorithms.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightppo.algorithms.kl import LOG_RATIO_LIMIT
from lightppo.algorithms.logprobs import token_log_probs
from lightppo.algorithms.masking import (
    LOSS_AGG_MODES,
    LossNormalizer,
    aggregate_loss,
    at_least_float32,
    require_same_shape,
)
from lightppo.algorithms.tables import lookup

IGNORE_INDEX = -100
Metrics = dict[str, Tensor]


class PolicyLossFn(Protocol):
    """The signature of all policy losses. A function names the options it uses and takes the rest as ``**_``."""

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        *,
        action_mask: Tensor,
        clip_eps_low: float,
        clip_eps_high: float,
        **_: object,
    ) -> tuple[Tensor, Metrics]:
        """Loss of each token.

        Args:
            log_probs: (B, A), current policy, with gradient. All inputs are 0 at masked positions.
            old_log_probs: (B, A), the policy the ratio is taken to, no gradient.
            advantages: (B, A), no gradient.
            action_mask: (B, A) bool, for losses that look at whole sequences.
            clip_eps_low: the ratio is clipped below at 1 - clip_eps_low.
            clip_eps_high: the ratio is clipped above at 1 + clip_eps_high.

        Returns:
            token loss (B, A) and metrics (B, A) each: at least ``clip_ratio`` (1 where the clip took the gradient
            away), ``ratio``, ``approx_kl`` (k3 of old to new, nats).
        """
        ...


def ppo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    **_: object,
) -> tuple[Tensor, Metrics]:
    """-min(ρA, clip(ρ, 1 - ε_low, 1 + ε_high)·A), ρ = exp(log_probs - old_log_probs), log-ratio in ±20.

    Sources: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; two epsilons ("clip-higher"): DAPO (arXiv:2503.14476),
    eq. 10. Arguments: :class:`PolicyLossFn`.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1.0 - clip_eps_low, 1.0 + clip_eps_high) * advantages
    metrics = {
        "clip_ratio": (clipped_loss > loss).to(loss.dtype),
        "ratio": ratio,
        "approx_kl": log_ratio.expm1() - log_ratio,
    }
    return torch.maximum(loss, clipped_loss), metrics


POLICY_LOSSES: dict[str, PolicyLossFn] = {"ppo": ppo_policy_loss}


@dataclass(frozen=True)
class PolicyLoss:
    """The policy loss of one micro batch.

    Attributes:
        clip_eps_low: ε below, in (0, 1) (``--eps_clip``, ``--eps_clip_low``).
        clip_eps_high: ε above, above 0 (``--eps_clip``, ``--eps_clip_high``).
        policy_loss: one of ``POLICY_LOSSES``.
        loss_agg_mode: one of ``LOSS_AGG_MODES``.
    """

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    policy_loss: str = "ppo"
    loss_agg_mode: str = "token-mean"

    def __post_init__(self) -> None:
        lookup(POLICY_LOSSES, self.policy_loss, "policy_loss")
        lookup(LOSS_AGG_MODES, self.loss_agg_mode, "--loss_agg_mode")
        if not 0 < self.clip_eps_low < 1:
            raise ValueError(f"--eps_clip_low must be above 0 and below 1, got {self.clip_eps_low}")
        if not self.clip_eps_high > 0:
            raise ValueError(f"--eps_clip_high must be above 0, got {self.clip_eps_high}")

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        normalizer: LossNormalizer | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics.

        Old log probs and advantages are constants: gradients into them are cut, so ``old_log_probs`` may be
        ``log_probs`` itself in the first step on a rollout.

        Args:
            log_probs: (B, A), current policy.
            old_log_probs: (B, A), the policy the ratio is taken to.
            advantages: (B, A).
            action_mask: (B, A), True = trained token.
            normalizer: counts of the whole optimizer step; ``None`` = this micro batch is the step.

        Returns:
            scalar loss, and detached scalars ``clip_ratio``, ``ratio``, ``approx_kl``: token means of the step, to be
            summed over micro batches and averaged over ranks like the loss.

        Raises:
            ValueError: shapes differ.
        """
        require_same_shape(
            log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, action_mask=action_mask
        )
        mask = action_mask.bool()
        normalizer = normalizer or LossNormalizer.from_masks([mask])
        token_loss, token_metrics = POLICY_LOSSES[self.policy_loss](
            _masked(log_probs, mask),
            _masked(old_log_probs.detach(), mask),
            _masked(advantages.detach(), mask),
            action_mask=mask,
            clip_eps_low=self.clip_eps_low,
            clip_eps_high=self.clip_eps_high,
        )
        loss = aggregate_loss(token_loss, mask, self.loss_agg_mode, normalizer)
        return loss, _token_means(token_metrics, mask, normalizer)


@dataclass(frozen=True)
class ValueLoss:
    """½·max((V - R)², (clip(V, V_old ± c) - R)²) of one micro batch.

    Source: the clipped value loss of OpenAI's PPO code; see Engstrom et al. 2020 (arXiv:2005.12729), §3.

    Attributes:
        value_clip: c, in units of the value, above 0; ``None`` = no clipping, ½(V - R)² (``--value_clip``).
        huber_delta: δ above 0: an error e counts δ(|e| - δ/2) instead of ½e² where |e| > δ (Huber 1964); ``None`` = ½e²
            everywhere (``--value_huber_delta``).
        loss_agg_mode: one of ``LOSS_AGG_MODES``.
    """

    value_clip: float | None = 0.2
    loss_agg_mode: str = "token-mean"
    huber_delta: float | None = None

    def __post_init__(self) -> None:
        lookup(LOSS_AGG_MODES, self.loss_agg_mode, "--loss_agg_mode")
        if self.value_clip is not None and not self.value_clip > 0:
            raise ValueError(f"--value_clip must be above 0, or none for no clipping, got {self.value_clip}")
        if self.huber_delta is not None and not self.huber_delta > 0:
            raise ValueError(f"--value_huber_delta must be above 0, or none for squared errors, got {self.huber_delta}")

    def __call__(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor,
        normalizer: LossNormalizer | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics.

        Args:
            values: (B, A), current critic.
            old_values: (B, A), the critic at rollout time.
            returns: (B, A), the target.
            action_mask: (B, A), True = trained token.
            normalizer: counts of the whole optimizer step; ``None`` = this micro batch is the step.

        Returns:
            scalar loss, and the detached scalar ``value_clip_ratio``: share of tokens whose clipped error is the
            larger one, a token mean of the step like the metrics of :class:`PolicyLoss`.

        Raises:
            ValueError: shapes differ.
        """
        require_same_shape(values=values, old_values=old_values, returns=returns, action_mask=action_mask)
        mask = action_mask.bool()
        normalizer = normalizer or LossNormalizer.from_masks([mask])
        values, old_values, returns = (_masked(x, mask) for x in (values, old_values.detach(), returns.detach()))
        error = self._error(values - returns)
        clipped = torch.zeros_like(error)
        if self.value_clip is not None:
            near_old = values.clamp(old_values - self.value_clip, old_values + self.value_clip)
            clipped_error = self._error(near_old - returns)
            clipped = (clipped_error > error).to(error.dtype)
            error = torch.maximum(error, clipped_error)
        loss = aggregate_loss(error, mask, self.loss_agg_mode, normalizer)
        return loss, _token_means({"value_clip_ratio": clipped}, mask, normalizer)

    def _error(self, difference: Tensor) -> Tensor:
        """½e², or Huber's, of each token."""
        if self.huber_delta is None:
            return 0.5 * difference.square()
        return torch.nn.functional.huber_loss(
            difference, torch.zeros_like(difference), reduction="none", delta=self.huber_delta
        )


class GPTLMLoss:
    """Next-token cross entropy, for supervised training and for PTX beside PPO; mean over the tokens of the step.

    Source of PTX: Ouyang et al. 2022 (arXiv:2203.02155), eq. 2.
    """

    IGNORE_INDEX = IGNORE_INDEX

    def num_tokens(self, labels: Tensor) -> int:
        """How many tokens of ``labels`` (B, S) the loss counts: what ``normalizer_tokens`` is the global sum of."""
        return int((labels[:, 1:] != self.IGNORE_INDEX).sum())

    def __call__(
        self, logits: Tensor, labels: Tensor, normalizer_tokens: float | None = None, dp_size: int = 1
    ) -> Tensor:
        """Loss of one micro batch.

        Args:
            logits: (B, S, V); position t predicts label t + 1.
            labels: (B, S), ids, or -100 where nothing is learned.
            normalizer_tokens: counted tokens of the whole optimizer step, over all ranks and micro batches; ``None`` =
                this micro batch is the step.
            dp_size: data-parallel ranks.

        Returns:
            A scalar; an exact 0 with a grad_fn where all labels are -100.

        Raises:
            ValueError: shapes do not fit, or ``normalizer_tokens`` is 0 while there are labels.
        """
        if labels.shape != logits.shape[:-1]:
            raise ValueError(f"labels {tuple(labels.shape)} do not fit logits {tuple(logits.shape)}")
        labels = labels[:, 1:]
        mask = labels != self.IGNORE_INDEX  # (B, S-1)
        token_loss = -token_log_probs(logits[:, :-1], labels.masked_fill(~mask, 0))
        tokens = float(mask.sum()) if normalizer_tokens is None else normalizer_tokens
        # token-mean reads the tokens alone
        return aggregate_loss(token_loss, mask, "token-mean", LossNormalizer(tokens, sequences=0, dp_size=dp_size))


def _masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """float32 or more, 0 at masked positions: what lies there (NaN, -inf) must not reach a gradient as 0 * NaN."""
    return at_least_float32(tensor).masked_fill(~mask, 0.0)


def _token_means(token_metrics: Metrics, mask: Tensor, normalizer: LossNormalizer) -> Metrics:
    return {name: aggregate_loss(x.detach(), mask, "token-mean", normalizer) for name, x in token_metrics.items()}
