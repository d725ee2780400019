"""One optimizer step of actor and critic: losses, backward passes, steps, moving average."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.kl import approx_kl
from lightppo.algorithms.losses import GPTLMLoss, PolicyLoss, ValueLoss
from lightppo.algorithms.masking import aggregate_loss
from lightppo.config.sections import AlgorithmConfig
from lightppo.experience.batching import Minibatch
from lightppo.experience.experience import Experience
from lightppo.experience.experience_maker import KLController
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
        ema_model: moving average of the actor, or ``None``.
        config: clipping, aggregation, KL loss, PTX and moving-average options.
        kl_ctl: its ``value`` weighs the KL loss.

    Attributes:
        pretrain_batches: endless batches for the PTX loss, or ``None``.
        pretrain_taken: batches taken from it.
        skipped_steps: optimizer steps skipped for a non-finite gradient.
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
        ema_model: Any,
        config: AlgorithmConfig,
        kl_ctl: KLController,
    ) -> None:
        self.strategy = strategy
        self.actor, self.actor_optim, self.actor_scheduler = actor, actor_optim, actor_scheduler
        self.critic, self.critic_optim, self.critic_scheduler = critic, critic_optim, critic_scheduler
        self.ema_model = ema_model
        self.config = config
        self.kl_ctl = kl_ctl
        self.actor_loss_fn = PolicyLoss(config.eps_clip_low, config.eps_clip_high, loss_agg_mode=config.loss_agg_mode)
        self.critic_loss_fn = ValueLoss(
            config.value_clip, loss_agg_mode=config.loss_agg_mode, huber_delta=config.value_huber_delta
        )
        self.ptx_loss_fn = GPTLMLoss()
        self.pretrain_batches: Iterator | None = None
        self.pretrain_taken = 0
        self.skipped_steps = 0

    def train_actor(self, minibatch: Minibatch) -> dict[str, float]:
        """One optimizer step of the actor, with PTX and moving average. Collective; the same status on every rank."""
        self.actor.train()
        totals = StepMetrics()
        for experience in minibatch.micro_batches:
            loss, metrics = self.actor_loss(experience, minibatch)
            self.strategy.backward(loss, self.actor, self.actor_optim)
            totals.add(metrics)
        totals.add(self._ptx_backward(len(minibatch.micro_batches)))
        status = totals.reduce(self.strategy) | self._step("actor", self.actor, self.actor_optim, self.actor_scheduler)
        if self.ema_model is not None:
            self.strategy.moving_average(self.actor, self.ema_model, self.config.ema_beta)
        return status

    def train_critic(self, minibatch: Minibatch) -> dict[str, float]:
        """One optimizer step of the critic. Collective; the same status on every rank."""
        self.critic.train()
        totals = StepMetrics()
        for experience in minibatch.micro_batches:
            loss, metrics = self.critic_loss(experience, minibatch)
            self.strategy.backward(loss, self.critic, self.critic_optim)
            totals.add(metrics)
        status = totals.reduce(self.strategy)
        return status | self._step("critic", self.critic, self.critic_optim, self.critic_scheduler)

    def actor_loss(self, experience: Experience, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro batch's share of the actor's loss, and of its metrics."""
        a, mask = self.config, experience.action_mask
        log_probs = self.actor(
            experience.sequences, num_actions=experience.num_actions, attention_mask=experience.attention_mask
        )  # (B, A)
        loss, metrics = self.actor_loss_fn(
            log_probs, experience.action_log_probs, experience.advantages, mask, minibatch.normalizer
        )
        metrics |= {"policy_loss": loss.detach()}
        if a.use_kl_loss:
            kl = approx_kl(log_probs, experience.base_action_log_probs, a.kl_estimator)  # (B, A)
            kl_loss = aggregate_loss(kl, mask, a.loss_agg_mode, minibatch.normalizer)
            loss = loss + self.kl_ctl.value * kl_loss
            metrics |= {"kl_loss": kl_loss.detach()}
        return loss, metrics

    def critic_loss(self, experience: Experience, minibatch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro batch's share of the critic's loss, and of its metrics."""
        mask, normalizer = experience.action_mask, minibatch.normalizer
        values = self.critic(
            experience.sequences, num_actions=experience.num_actions, attention_mask=experience.attention_mask
        )  # (B, A)
        loss, metrics = self.critic_loss_fn(values, experience.values, experience.returns, mask, normalizer)
        mean_value = aggregate_loss(values.detach(), mask, "token-mean", normalizer)
        return loss, metrics | {"critic_loss": loss.detach(), "values": mean_value}

    def _ptx_backward(self, count: int) -> dict[str, Tensor]:
        """Backward passes of the language-model loss on ``count`` batches: one per micro batch, on every rank."""
        coef = self.config.ptx_coef
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

    def _step(self, name: str, model: Any, optim: Any, scheduler: Any) -> dict[str, float]:
        lr = optim.param_groups[0]["lr"]
        outcome = self.strategy.optimizer_step(optim, model, scheduler, name=name)
        self.skipped_steps += outcome.skipped
        grad_norm = math.nan if outcome.skipped else outcome.grad_norm
        return {f"{name}_lr": lr, f"{name}_grad_norm": grad_norm, f"{name}_skipped": float(outcome.skipped)}
