"""The losses of one micro batch, each its share of the loss of the whole optimizer step (see ``aggregate_loss``).

So the gradient depends neither on micro batches nor on ranks. Nothing is written to what comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.entries import POLICY_LOSSES
from lightppo.algorithms.kl import approx_kl, full_kl
from lightppo.algorithms.losses import GPTLMLoss, PolicyLoss, ValueLoss
from lightppo.algorithms.masking import LossNormalizer, aggregate_loss
from lightppo.algorithms.shaping import ValueNorm
from lightppo.config import LossConfig, PPOConfig
from lightppo.experience.batching import selection_of
from lightppo.experience.experience import Experience
from lightppo.models.actor import ActionScores
from lightppo.ranks import Ranks

Metrics = dict[str, Tensor]


def actor_loss(
    actor: Any,
    experience: Experience,
    normalizer: LossNormalizer,
    *,
    loss_fn: PolicyLoss,
    config: PPOConfig,
    kl_coef: float,
    reference: Any | None,
    teacher: Any | None = None,
    token_weights: Sequence[Callable[..., Tensor]] = (),
) -> tuple[Tensor, Metrics, Tensor, Tensor]:
    """Policy loss, entropy bonus, KL loss, the divergence from a teacher and load-balancing loss.

    Without ``action_log_probs`` in the experience, the policy that is trained is the one that sampled.
    ``token_weights`` are those of :class:`lightppo.plugin.TokenWeight` in training.

    Returns:
        the loss (scalar), metrics, and without gradient the policy's log probs and its entropy, (B, A) each.
    """
    options, mask = config.loss, experience.action_mask
    imitates = teacher is not None and config.distill.distill_by == "loss"
    scores = actor.score_actions(
        experience.sequences,
        experience.num_actions,
        experience.attention_mask,
        entropy=True,
        entropy_grad=options.entropy_coef > 0,
        logits=imitates or (config.algorithm.use_kl_loss and config.algorithm.kl_estimator == "full"),
        router_loss=options.aux_loss_coef > 0,
    )
    log_probs, per_token = scores.log_probs.detach(), scores.entropy.detach()
    loss, metrics = weighted_policy_loss(
        loss_fn,
        experience,
        normalizer,
        log_probs=scores.log_probs,
        entropy=per_token,
        token_weights=token_weights,
    )
    metrics["entropy"] = aggregate_loss(per_token, mask, "token-mean", normalizer)
    if options.entropy_coef > 0:
        entropy = aggregate_loss(scores.entropy, mask, options.loss_agg_mode, normalizer)
        loss = loss - options.entropy_coef * entropy
    if config.algorithm.use_kl_loss:
        kl = _kl_to_reference(actor, reference, scores, experience, config)
        kl_loss = aggregate_loss(kl, mask, options.loss_agg_mode, normalizer)
        loss = loss + kl_coef * kl_loss
        metrics["kl_loss"] = kl_loss.detach()
    if imitates:
        distill_loss, of_teacher = _distill_loss(actor, teacher, scores, experience, normalizer, config)
        loss = loss + config.distill.distill_coef * distill_loss
        metrics |= of_teacher
    if options.aux_loss_coef > 0:
        aux_loss = _token_share(mask, normalizer) * scores.router_loss
        loss = loss + options.aux_loss_coef * aux_loss
        metrics["aux_loss"] = aux_loss.detach()
    return loss, metrics, log_probs, per_token


def _token_share(mask: Tensor, normalizer: LossNormalizer) -> Tensor:
    """The weight of a micro batch in a mean over micro batches by their tokens.

    For the load-balancing loss, which is a product of means, and so cannot be split exactly.
    """
    return mask.sum() * normalizer.dp_size / max(normalizer.tokens, 1.0)


def weighted_policy_loss(
    loss_fn: PolicyLoss,
    experience: Experience,
    normalizer: LossNormalizer,
    *,
    log_probs: Tensor,
    entropy: Tensor,
    token_weights: Sequence[Callable[..., Tensor]] = (),
) -> tuple[Tensor, Metrics]:
    """The policy loss of ``log_probs`` (B, A) under the weights of the experience times those in training."""
    old_log_probs = experience.action_log_probs
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    weights, in_training = experience.loss_weights, None
    if token_weights:
        in_training = experience.action_mask.to(log_probs.dtype)  # (B, A)
        for weigh in token_weights:
            in_training = in_training * weigh(experience, log_probs=log_probs.detach(), entropy=entropy)
        weights = in_training if weights is None else weights * in_training
    loss, metrics = loss_fn(
        log_probs,
        old_log_probs,
        experience.advantages,
        experience.action_mask,
        normalizer,
        weights=weights,
        selected=experience.selected if selection_of(loss_fn) is not None else None,
    )
    metrics["policy_loss"] = loss.detach()
    if in_training is not None:
        rejected = (in_training == 0).to(in_training.dtype)
        metrics["rejected_ratio"] = aggregate_loss(rejected, experience.action_mask, "token-mean", normalizer)
    return loss, metrics


def _kl_to_reference(
    actor: Any, reference: Any, scores: ActionScores, experience: Experience, config: PPOConfig
) -> Tensor:
    """KL estimate with gradient (B, A): from the log probs of the sampled tokens, or over the whole vocabulary."""
    options = config.algorithm
    if options.kl_estimator != "full":
        return approx_kl(
            scores.log_probs,
            experience.base_action_log_probs,
            options.kl_estimator,
            options.kl_clip,
            action_mask=experience.action_mask,
        )
    kl, _ = _divergence(actor, reference, scores, experience)
    return kl if options.kl_clip is None else kl.clamp(-options.kl_clip, options.kl_clip)


def _distill_loss(
    actor: Any,
    teacher: Any,
    scores: ActionScores,
    experience: Experience,
    normalizer: LossNormalizer,
    config: PPOConfig,
) -> tuple[Tensor, Metrics]:
    """The divergence from a teacher, and what there is to say of it."""
    mask = experience.action_mask
    divergence, teacher_log_probs = _divergence(actor, teacher, scores, experience, config.distill.distill_beta)
    loss = aggregate_loss(divergence, mask, config.loss.loss_agg_mode, normalizer)
    gap = scores.log_probs.detach() - teacher_log_probs
    metrics = {
        "teacher_kl": aggregate_loss(gap, mask, "token-mean", normalizer),
        "teacher_log_prob": aggregate_loss(teacher_log_probs, mask, "token-mean", normalizer),
        "distill_loss": loss.detach(),
    }
    return loss, metrics


def _divergence(
    actor: Any, other: Any, scores: ActionScores, experience: Experience, beta: float = 1.0
) -> tuple[Tensor, Tensor]:
    """From a frozen model over the whole vocabulary, with gradient; and the frozen model's log probs (B, A)."""
    with torch.no_grad():
        frozen = other.score_actions(
            experience.sequences, experience.num_actions, experience.attention_mask, logits=True
        )
    per_token = full_kl(scores.logits, frozen.logits, actor.temperature, beta=beta)  # (K,)
    return torch.zeros_like(scores.log_probs).masked_scatter(scores.real, per_token), frozen.log_probs


def critic_loss(
    critic: Any, experience: Experience, normalizer: LossNormalizer, loss_fn: ValueLoss, value_norm: ValueNorm | None
) -> tuple[Tensor, Metrics]:
    """Value loss and metrics. ``value_norm`` normalises what the critic says; what the experience holds is not."""
    mask, old_values, returns = experience.action_mask, experience.values, experience.returns
    inputs = {"num_actions": experience.num_actions, "attention_mask": experience.attention_mask}
    values = critic(experience.sequences, **inputs)  # (B, A)
    shown = values.detach()
    if value_norm is not None:
        shown = value_norm.denormalize(shown)
        old_values, returns = value_norm.normalize_old(old_values), value_norm.normalize(returns)
    loss, metrics = loss_fn(values, old_values, returns, mask, normalizer)
    mean_value = aggregate_loss(shown, mask, "token-mean", normalizer)
    return loss, metrics | {"critic_loss": loss.detach(), "values": mean_value}


def pretrain_loss(model: Any, batch: Mapping[str, Tensor], loss_fn: GPTLMLoss, tokens: float, dp_size: int) -> Tensor:
    """Language-model loss of a batch: its share of the mean over the ``tokens`` with labels of all ranks."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], return_output=True).logits  # (B, S, V)
    return loss_fn(logits, batch["labels"], tokens, dp_size)


class EarlyStop:
    """Whether an optimizer step goes too far from the policy that sampled; the same on every rank."""

    def __init__(self, config: LossConfig, ranks: Ranks) -> None:
        limits = {"ratio": config.early_stop_imp_ratio, "approx_kl": config.early_stop_kl}
        self.limits = {name: limit for name, limit in limits.items() if limit is not None}
        self.ranks = ranks
        self.sums: Metrics = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take in a micro batch of the step."""
        for name in self.limits:
            self.sums[name] = self.sums.get(name, 0.0) + metrics[name].detach().float()

    def reached(self) -> bool:
        """Whether the step exceeds a limit; begins the next one. Collective where there are limits."""
        sums, self.sums = self.sums, {}
        if not sums:
            return False
        values = self.ranks.all_reduce(torch.stack([sums[name] for name in self.limits]), "mean").tolist()
        return any(value > limit for value, limit in zip(values, self.limits.values()))


def build_policy_loss(config: PPOConfig) -> PolicyLoss:
    """The policy loss of a resolved config."""
    loss = config.loss
    return PolicyLoss(
        loss.eps_clip_low,
        loss.eps_clip_high,
        policy_loss=loss.policy_loss,
        loss_agg_mode=loss.loss_agg_mode,
        options={name: getattr(loss, name) for name in POLICY_LOSSES.find(loss.policy_loss).defaults},
    )


def build_value_norm(loss: LossConfig) -> ValueNorm | None:
    """``--value_norm`` of a resolved section; ``None``: the critic learns raw returns."""
    if loss.value_norm is None:
        return None
    beta = {} if loss.value_norm_beta is None else {"beta": loss.value_norm_beta}
    return ValueNorm(loss.value_norm, eps=loss.value_norm_eps, **beta)
