"""One optimizer step of actor and critic: losses, backward passes, steps, moving average."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.entries import POLICY_LOSSES
from lightppo.algorithms.kl import approx_kl, full_kl
from lightppo.algorithms.losses import GPTLMLoss, PolicyLoss, ValueLoss
from lightppo.algorithms.masking import aggregate_loss
from lightppo.algorithms.shaping import ValueNorm
from lightppo.config import AlgorithmConfig, LossConfig
from lightppo.experience.batching import Minibatch
from lightppo.experience.experience import Experience
from lightppo.experience.maker import KLController
from lightppo.models.actor import ActionScores
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.trainer.metrics import StepMetrics
from lightppo.trainer.prompts import as_lm_batch


class PPOUpdate:
    """Trains actor and critic on minibatches.

    Every loss is one micro batch's share of the loss of the whole optimizer step (see ``aggregate_loss``), so that the
    gradient depends neither on micro batches nor on ranks.

    Args:
        strategy: backward passes, steps and reductions.
        actor: the policy, prepared, with its ``actor_optim`` and ``actor_scheduler``.
        critic: the value model, prepared, or ``None``; with ``critic_optim`` and ``critic_scheduler``.
        initial_model: the reference, for the KL loss over the whole vocabulary; ``None`` without KL.
        ema_model: moving average of the actor, or ``None``.
        algorithm: KL loss, PTX and moving-average options.
        loss: policy loss, entropy, early stop and value loss.
        kl_ctl: its ``value`` weighs the KL loss.
        value_norm: the critic learns returns normalised by it; ``None``: as they are.

    Attributes:
        pretrain_batches: endless batches for the PTX loss, or ``None``.
        pretrain_taken: batches taken from it.
        skipped_steps: optimizer steps skipped for a non-finite gradient.
        stopped_steps: optimizer steps of the actor skipped by an early stop.
    """

    def __init__(
        self,
        strategy: DeepspeedStrategy,
        actor: Any,
        actor_optim: Any,
        actor_scheduler: Any,
        critic: Any,
        critic_optim: Any,
        critic_scheduler: Any,
        initial_model: Any,
        ema_model: Any,
        algorithm: AlgorithmConfig,
        loss: LossConfig,
        kl_ctl: KLController,
        value_norm: ValueNorm | None = None,
    ) -> None:
        self.strategy = strategy
        self.actor, self.actor_optim, self.actor_scheduler = actor, actor_optim, actor_scheduler
        self.critic, self.critic_optim, self.critic_scheduler = critic, critic_optim, critic_scheduler
        self.initial_model = initial_model
        self.ema_model = ema_model
        self.algorithm, self.loss = algorithm, loss
        self.kl_ctl = kl_ctl
        self.value_norm = value_norm
        self.actor_loss_fn = build_policy_loss(loss)
        self.critic_loss_fn = ValueLoss(
            loss.value_clip, loss_agg_mode=loss.loss_agg_mode, huber_delta=loss.value_huber_delta
        )
        self.ptx_loss_fn = GPTLMLoss()
        self.pretrain_batches: Iterator | None = None
        self.pretrain_taken = 0
        self.skipped_steps = 0
        self.stopped_steps = 0

    def train_actor(self, minibatch: Minibatch) -> dict[str, float]:
        """One optimizer step of the actor, with PTX and moving average. Collective; the same status on every rank."""
        self.actor.train()
        totals = StepMetrics()
        for i, experience in enumerate(minibatch.micro_batches):
            loss, metrics = self.actor_loss(experience, minibatch)
            self.strategy.backward(loss, self.actor, self.actor_optim)
            totals.add(metrics)
            minibatch.note_log_probs(i)
        totals.add(self._ptx_backward(len(minibatch.micro_batches)))
        status = totals.reduce(self.strategy)
        if self._stops_early(status):
            self.stopped_steps += 1
            self.strategy.skip_step(self.actor, name="actor")
            return status | {"actor_stopped": 1.0}
        status |= {"actor_stopped": 0.0} | self._step("actor", self.actor, self.actor_optim, self.actor_scheduler)
        if self.ema_model is not None:
            self.strategy.moving_average(self.actor, self.ema_model, self.algorithm.ema_beta)
        return status

    def train_critic(self, minibatch: Minibatch) -> dict[str, float]:
        """One optimizer step of the critic. Collective; the same status on every rank."""
        self.critic.train()
        totals = StepMetrics()
        for experience in minibatch.of_critic:
            loss, metrics = self.critic_loss(experience, minibatch)
            self.strategy.backward(loss, self.critic, self.critic_optim)
            totals.add(metrics)
        status = totals.reduce(self.strategy)
        return status | self._step("critic", self.critic, self.critic_optim, self.critic_scheduler)

    def actor_loss(self, experience: Experience, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro batch's share of the actor's loss, and of its metrics.

        An experience without ``action_log_probs`` is trained by the policy that sampled it: they are set here.
        """
        a, o, mask, normalizer = self.algorithm, self.loss, experience.action_mask, minibatch.normalizer
        scores = self.actor.score_actions(
            experience.sequences,
            experience.num_actions,
            experience.attention_mask,
            entropy=True,
            entropy_grad=o.entropy_coef > 0,
            logits=a.use_kl_loss and a.kl_estimator == "full",
            router_loss=o.aux_loss_coef > 0,
        )
        if experience.action_log_probs is None:
            experience.action_log_probs = scores.log_probs.detach()
        loss, metrics = self.actor_loss_fn(
            scores.log_probs,
            experience.action_log_probs,
            experience.advantages,
            mask,
            normalizer,
            weights=experience.loss_weights,
            selected=experience.selected if POLICY_LOSSES.find(o.policy_loss).selection else None,
        )
        metrics |= {
            "policy_loss": loss.detach(),
            "entropy": aggregate_loss(scores.entropy.detach(), mask, "token-mean", normalizer),
        }
        if o.entropy_coef > 0:
            loss = loss - o.entropy_coef * aggregate_loss(scores.entropy, mask, o.loss_agg_mode, normalizer)
        if a.use_kl_loss:
            kl_loss = aggregate_loss(self._kl(scores, experience), mask, o.loss_agg_mode, normalizer)
            loss = loss + self.kl_ctl.value * kl_loss
            metrics |= {"kl_loss": kl_loss.detach()}
        if o.aux_loss_coef > 0:
            # The mean over micro batches, by their tokens: as a product of means it cannot be split exactly.
            share = mask.sum() * normalizer.dp_size / max(normalizer.tokens, 1.0)
            aux_loss = share * scores.router_loss
            loss = loss + o.aux_loss_coef * aux_loss
            metrics |= {"aux_loss": aux_loss.detach()}
        return loss, metrics

    def _kl(self, scores: ActionScores, experience: Experience) -> Tensor:
        """KL to the reference per token, with gradient (B, A)."""
        a = self.algorithm
        if a.kl_estimator != "full":
            mask, reference = experience.action_mask, experience.base_action_log_probs
            return approx_kl(scores.log_probs, reference, a.kl_estimator, a.kl_clip, action_mask=mask)
        with torch.no_grad():
            reference = self.initial_model.score_actions(
                experience.sequences, experience.num_actions, experience.attention_mask, logits=True
            )
        per_token = full_kl(scores.logits, reference.logits, self.actor.temperature)  # (K,)
        kl = torch.zeros_like(scores.log_probs).masked_scatter(scores.real, per_token)
        return kl if a.kl_clip is None else kl.clamp(-a.kl_clip, a.kl_clip)

    def critic_loss(self, experience: Experience, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro batch's share of the critic's loss, and of its metrics."""
        mask, normalizer = experience.action_mask, minibatch.normalizer
        old_values, returns = experience.values, experience.returns
        values = self.critic(
            experience.sequences, num_actions=experience.num_actions, attention_mask=experience.attention_mask
        )  # (B, A)
        shown = values.detach()
        if self.value_norm is not None:
            # What the critic says is normalised; what the experience holds is not.
            shown = self.value_norm.denormalize(shown)
            old_values, returns = self.value_norm.normalize_old(old_values), self.value_norm.normalize(returns)
        loss, metrics = self.critic_loss_fn(values, old_values, returns, mask, normalizer)
        mean_value = aggregate_loss(shown, mask, "token-mean", normalizer)
        return loss, metrics | {"critic_loss": loss.detach(), "values": mean_value}

    def _ptx_backward(self, count: int) -> dict[str, Tensor]:
        """Backward passes of the language-model loss on ``count`` batches: one per micro batch, on every rank."""
        coef = self.algorithm.ptx_coef
        if self.pretrain_batches is None or coef == 0:
            return {}
        batches = [as_lm_batch(next(self.pretrain_batches), self.strategy.device) for _ in range(count)]
        self.pretrain_taken += count
        tokens = self.strategy.all_reduce(sum(self.ptx_loss_fn.num_tokens(b.labels) for b in batches), "sum")
        total = torch.zeros((), device=self.strategy.device)
        for batch in batches:
            logits = self.actor(batch.input_ids, attention_mask=batch.attention_mask, return_output=True).logits
            loss = self.ptx_loss_fn(logits, batch.labels, tokens, self.strategy.world_size)
            self.strategy.backward(coef * loss, self.actor, self.actor_optim)
            total += loss.detach()
        return {"ptx_loss": total}

    def _stops_early(self, status: dict[str, float]) -> bool:
        """Whether this optimizer step goes too far from the policy that sampled; the same on every rank."""
        limits = {"ratio": self.loss.early_stop_imp_ratio, "approx_kl": self.loss.early_stop_kl}
        return any(limit is not None and status[name] > limit for name, limit in limits.items())

    def _step(self, name: str, model: Any, optim: Any, scheduler: Any) -> dict[str, float]:
        lr = optim.param_groups[0]["lr"]
        outcome = self.strategy.optimizer_step(optim, model, scheduler, name=name)
        self.skipped_steps += outcome.skipped
        grad_norm = math.nan if outcome.skipped else outcome.grad_norm
        return {f"{name}_lr": lr, f"{name}_grad_norm": grad_norm, f"{name}_skipped": float(outcome.skipped)}


def build_policy_loss(loss: LossConfig) -> PolicyLoss:
    """The policy loss of a resolved section."""
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
