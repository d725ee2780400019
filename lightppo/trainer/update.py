"""The update of a PPO step: passes over the replay buffer, and optimizer steps. Nothing is written to what comes in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.entries import LOSS_AGG_MODES, POLICY_LOSSES
from lightppo.algorithms.losses import PolicyLoss, ValueLoss
from lightppo.algorithms.masking import LossNormalizer
from lightppo.compat.own_steps import (
    lone_part,
    script_status,
    weighed_by_samples,
    with_kl,
    without_means,
)
from lightppo.config import PPOConfig
from lightppo.config.rules import micro_batch_spec
from lightppo.errors import ConfigError
from lightppo.experience.batching import (
    Minibatch,
    StepPart,
    minibatches,
    pass_generator,
    without_advantage,
)
from lightppo.experience.experience import Experience
from lightppo.experience.token_weights import token_weights
from lightppo.logging.performance import minibatch_on_bar, progress_bar
from lightppo.logging.step_metrics import (
    SampleSummaries,
    checked_status,
    micro_batch_status,
    optimizer_status,
)
from lightppo.models.actor import ActionScores
from lightppo.models.batches import layout_of_all
from lightppo.ranks import Ranks
from lightppo.rollout.sampler import nothing_scored
from lightppo.trainer.distillation import TEACHER, score_term
from lightppo.trainer.training_losses import (
    Metrics,
    ScoreTerm,
    TermLoss,
    actor_loss,
    critic_loss,
    entropy_sample,
    kl_to_reference,
    sample_stride,
)
from lightppo.zero3 import find_engine

TRAINING_METHODS = ("ppo_train", "training_step", "training_step_actor", "training_step_critic")

# numbers by name, or tensors of one number that are read at the end of a step
Status = Mapping[str, Any]


class Update:
    """The part of ``PPOTrainer`` that trains actor and critic on the replay buffer.

    That takes ``max_epochs`` passes, with an optimizer step per ``train_batch_size``. A subclass of the trainer may
    override ``ppo_train``, ``training_step``, ``training_step_actor`` and ``training_step_critic``.

    Args:
        parts: :class:`lightppo.trainer.build.PPOParts` with a resolved config.
    """

    has_own_steps = False  # a subclass has training steps of its own, which read numbers

    def __init__(self, parts: Any) -> None:
        config = parts.config
        self.strategy = parts.strategy
        self.ranks = self.strategy.data_parallel
        self.loss_terms = dict(parts.loss_terms)
        self.frozen = parts.frozen
        self.actor = parts.actor
        self.critic = parts.critic
        self.reference = parts.initial_model
        self.actor_optim = parts.actor_optim
        self.actor_scheduler = parts.actor_scheduler
        self.critic_optim = parts.critic_optim
        self.critic_scheduler = parts.critic_scheduler
        self.experience_maker = parts.experience_maker
        self.replay_buffer = parts.replay_buffer
        self.use(config)
        self.kl_ctl = parts.kl_ctl
        self.value_norm = parts.value_norm
        self.state = parts.state
        self.skipped = parts.skipped
        self.timer = parts.timer
        algorithm = config.algorithm
        loss = config.loss
        training = config.training
        self.max_epochs = training.max_epochs
        self.freezing_actor_steps = algorithm.freezing_actor_steps
        self.policy_loss = build_policy_loss(config)
        self.token_weights = token_weights(config, in_training=True)
        self.value_loss = ValueLoss(
            loss.value_clip,
            loss_agg_mode=loss.loss_agg_mode,
            huber_delta=loss.value_huber_delta,
            horizon=float(config.rollout.generate_max_len),
        )
        limits = {"ratio": loss.early_stop_imp_ratio, "approx_kl": loss.early_stop_kl}
        limits = {name: limit for name, limit in limits.items() if limit is not None}
        self.early_stop = StepLimits(limits, self.ranks) if limits else None
        # of each further term: its losses of the micro batches that follow
        self.term_losses: list[Iterator[TermLoss]] = []
        self.samples = SampleSummaries(self)  # the numbers of the rollout

    def use(self, config: PPOConfig) -> None:
        """Work with these options from now on."""
        self.config = config
        self.specs = {
            call: micro_batch_spec(config, call) for call in ("actor_train", "critic_train")
        }
        self.aggregate = LOSS_AGG_MODES.find(config.loss.loss_agg_mode).fn
        self.score_terms: list[ScoreTerm] = []
        if config.algorithm.use_kl_loss:
            reads_logits = self.experience_maker.kl_of_models is not None
            self.score_terms.append(ScoreTerm(self.kl_loss, logits=reads_logits))
        if TEACHER in self.frozen and config.distill.distill_by == "loss":
            self.score_terms.append(score_term(config, self.frozen[TEACHER]))

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """Train on the replay buffer. Collective.

        Args:
            global_steps: number of this PPO step; it seeds the shuffling.

        Returns:
            the means over the optimizer steps, and statistics of the rollout, by the names of
            ``lightppo.metric_names.METRICS`` without their namespace; the same on every rank.
        """
        if self.overrides("fit") and self.buffer_is_empty():
            raise nothing_scored(global_steps)
        self.samples.begin(self.replay_buffer.items)
        statuses = []  # of each optimizer step
        with self.timer("train"):
            for epoch in range(self.max_epochs):
                plan = self.minibatches(global_steps, epoch)
                text = f"train, epoch {epoch + 1}/{self.max_epochs}"
                bar = progress_bar(plan, text, shown=self.strategy.is_rank_0(), leave=False)
                for minibatch in bar:
                    statuses.append(self.train_minibatch(minibatch, global_steps))
                    # Not where there is none to see it: the numbers are a wait for a GPU.
                    if not getattr(bar, "disable", True):
                        samples = [e for e in minibatch.micro_batches if e.part.has_samples]
                        if samples:
                            bar.set_postfix(minibatch_on_bar(samples, statuses[-1]))
        status = {"samples": 0.0} | optimizer_status(statuses, self.ranks)
        status |= self.samples.status()
        self.skipped.end_step()
        self.accumulate_alone()
        if not statuses:
            status |= {f"{name}_skipped": 1.0 for name in self.skipped.of_model}
        status["kl_coef"] = self.kl_ctl.value
        status["optimizer_steps"] = float(len(statuses))
        return status

    def buffer_is_empty(self) -> bool:
        """Tell whether no rank has a sample to train on. Collective."""
        return self.ranks.all_reduce(len(self.replay_buffer), "sum") == 0

    def train_minibatch(
        self, minibatch: Minibatch, global_steps: int = 0
    ) -> list[Mapping[str, float]]:
        """Take one optimizer step of actor and critic; return the numbers of each micro batch with samples."""
        micro_batches: Sequence[Experience] = minibatch.micro_batches
        critic_batches = minibatch.critic_micro_batches
        if self.loss_terms:
            self.begin_terms(len(micro_batches))
        self.skipped.minibatch = minibatch
        self.strategy.accumulate(self.actor, len(micro_batches))
        self.strategy.accumulate(self.critic, len(critic_batches or micro_batches))
        if self.has_own_steps:
            micro_batches = weighed_by_samples(self, micro_batches)
            critic_batches = critic_batches and weighed_by_samples(self, critic_batches)
        if critic_batches is None:
            results = [
                (experience, self.training_step(experience, global_steps))
                for experience in micro_batches
            ]
        else:
            results = self._train_apart(micro_batches, critic_batches, global_steps)
        # A placeholder says nothing but the losses of further terms.
        term_metrics = [name for term in self.loss_terms.values() for name in term.metrics]
        statuses = []
        # Numbers are read only here, so that no micro batch waits for a GPU.
        for experience, status in results:
            numbers = checked_status(status)
            if not experience.part.has_samples:
                numbers = {name: numbers[name] for name in numbers if name in term_metrics}
            statuses.append(without_means(numbers) if self.has_own_steps else numbers)
        if self.samples.unread:
            self.samples.read()
        return statuses

    def _train_apart(
        self, micro_batches: Sequence[Experience], critic_batches: Sequence[Experience], step: int
    ) -> list[tuple[Experience, Status]]:
        """Train the actor, then the critic on micro batches of its own."""
        results = []
        with self.timer("actor_update"):
            for experience in micro_batches if self.actor_trains(step) else ():
                results.append((experience, self.training_step_actor(experience)))
        with self.timer("critic_update"):
            for experience in critic_batches if self.critic is not None else ():
                results.append((experience, self.training_step_critic(experience)))
        return results

    # -- one micro batch -----------------------------------------------------------------------------------------

    def training_step(
        self, experience: Experience, global_steps: int, entropy_mask: Tensor | None = None
    ) -> Status:
        """Train actor and critic on one micro batch; return its numbers, whose means are logged. Collective.

        Gradients add up; at the last micro batch of ``train_batch_size`` samples the optimizers step. In ``fit`` a
        micro batch weighs by its share of the step's tokens, in a loop of a script all weigh the same. Only tokens
        where ``entropy_mask`` (B, A) is True have a policy loss, which is divided as without it.
        """
        status: dict[str, Any] = {}
        if self.actor_trains(global_steps):
            masked = {} if entropy_mask is None else {"entropy_mask": entropy_mask}
            with self.timer("actor_update"):
                status |= self.training_step_actor(experience, **masked)
        if self.critic is not None:
            with self.timer("critic_update"):
                # the actor's pass may know more of the KL
                status = self.training_step_critic(experience) | status
        return status

    def training_step_actor(
        self, experience: Experience, entropy_mask: Tensor | None = None
    ) -> Status:
        """Train the actor on one micro batch; see :meth:`training_step`."""
        if entropy_mask is not None:
            weights = 1.0 if experience.loss_weights is None else experience.loss_weights
            experience = replace(experience, loss_weights=weights * entropy_mask.float())
        part = experience.part or self.lone_part(experience)
        sample = None  # the tokens whose entropy is logged, where nothing else needs it; None: all
        if not (self.config.loss.entropy_coef > 0 or self.token_weights):
            stride = sample_stride(part.normalizer.tokens)
            if stride > 1:
                rows = self.callbacks.entropy_rows(self, experience)
                if self.strategy.sequence_group is not None:  # each of its ranks reads others
                    rows = set().union(*self.strategy.sequence_group.gather_object(rows))
                sample = entropy_sample(experience, stride, rows)
        self.actor.train()
        with torch.set_grad_enabled(part.trains):
            loss, metrics, log_probs, entropy = actor_loss(
                self.actor,
                experience,
                part.normalizer,
                loss_fn=self.policy_loss,
                aggregate=self.aggregate,
                options=self.config.loss,
                terms=self.score_terms,
                token_weights=self.token_weights,
                sample=sample,
            )
        if part.trains:
            self.backward(loss * part.loss_scale, self.actor, self.actor_optim)
        if self.early_stop is not None:
            self.early_stop.add(metrics)
        self.callbacks.on_micro_batch(self, experience, log_probs, entropy)
        if experience.action_log_probs is None and part.has_samples:
            self.samples.add(experience, log_probs)
            if experience.part is None:
                experience = with_kl(self, experience, log_probs)
        status: dict[str, Any] = micro_batch_status(metrics, part.status_scale)
        for losses in self.term_losses:
            if (term_loss := next(losses, None)) is not None:
                coef, loss, term_metrics = term_loss(self.actor)
                self.backward(coef * part.loss_scale * loss, self.actor, self.actor_optim)
                status |= term_metrics
        status |= self.actor_step()
        if experience.part is None or self.has_own_steps:
            return script_status(self, status, experience)
        return status

    def training_step_critic(self, experience: Experience) -> Status:
        """Train the critic on one micro batch; see :meth:`training_step`."""
        part = experience.part or self.lone_part(experience)
        self.critic.train()
        loss, metrics = critic_loss(
            self.critic, experience, part.normalizer, self.value_loss, self.value_norm
        )
        self.backward(loss * part.loss_scale, self.critic, self.critic_optim)
        status: dict[str, Any] = micro_batch_status(metrics, part.status_scale)
        status |= self.optimizer_step(
            "critic", self.critic, self.critic_optim, self.critic_scheduler
        )
        if experience.part is None or self.has_own_steps:
            return script_status(self, status, experience)
        return status

    def kl_loss(
        self, actor: Any, scores: ActionScores, experience: Experience, normalizer: LossNormalizer
    ) -> tuple[Tensor, Metrics]:
        """Return the KL to the reference, times its coefficient: the :class:`ScoreTerm` of ``--use_kl_loss``."""
        maker = self.experience_maker
        if maker.kl_of_models is not None:
            kl, _ = maker.kl_of_models(actor, self.reference, scores, experience)  # (B, A)
        else:
            kl = kl_to_reference(maker.kl_of_samples, scores, experience)
        loss = self.aggregate(kl, experience.action_mask, normalizer)
        return self.kl_ctl.value * loss, {"kl_loss": loss.detach()}

    def backward(self, loss: Tensor, model: Any, optimizer: Any) -> None:
        """Add the gradient of a loss that is its micro batch's share of the step, however losses of scripts count."""
        engine = find_engine(model)
        weight = None if engine is None else self.strategy.loss_weights.pop(engine, None)
        self.strategy.backward(loss, model, optimizer)
        if weight is not None:
            self.strategy.loss_weights[engine] = weight

    # -- steps and loops of scripts ------------------------------------------------------------------------------

    def lone_part(self, experience: Experience) -> StepPart:
        """Return the part of a micro batch in a loop of a script, where all weigh the same. Collective."""
        self.begin_terms(1)
        return lone_part(
            experience,
            self.strategy,
            scale=float(self.config.rollout.generate_max_len),
            accumulation=self.lone_accumulation(),
        )

    def accumulate_alone(self) -> None:
        """Let a loop of a script take a step every ``train_batch_size`` samples; ``fit`` says it for each step."""
        micro_batches = self.lone_accumulation()
        for model in (self.actor, self.critic):
            self.strategy.accumulate(model, micro_batches)
        self.weigh(1 / micro_batches)

    def lone_accumulation(self) -> int:
        """Return how many micro batches hold the ``train_batch_size`` of the strategy."""
        strategy = self.strategy
        samples = strategy.micro_train_batch_size * strategy.world_size
        return max(1, math.ceil(strategy.train_batch_size / samples))

    def weigh(self, weight: float | Tensor) -> None:
        """Multiply what a script gives to ``strategy.backward`` by this factor from now on."""
        for model in (self.actor, self.critic):
            if (engine := find_engine(model)) is not None:
                self.strategy.loss_weights[engine] = weight

    # -- optimizer steps -----------------------------------------------------------------------------------------

    def minibatches(self, step: int, epoch: int) -> Iterator[Minibatch]:
        """Plan the optimizer steps of one pass over the replay buffer."""
        config = self.config
        training = self.config.training
        models = (self.actor, self.critic, self.reference, *self.frozen.values())
        return minibatches(
            self.replay_buffer.items,
            self.ranks,
            train_batch_size=training.train_batch_size,
            actor=self.specs["actor_train"],
            critic=None if self.critic is None else self.critic_spec(),
            layout=layout_of_all(models),
            # With a load-balancing loss a prompt must count for each of its samples.
            share_prompts=config.loss.aux_loss_coef == 0,
            shuffle=training.shuffle,
            generator=pass_generator(config.strategy.seed, step, epoch, self.ranks.get_rank()),
            collate=self.replay_buffer.collate_fn,
            loss_scale=float(config.rollout.generate_max_len),
            is_silent=without_advantage if self.trains_advantages_alone() else None,
        )

    def trains_advantages_alone(self) -> bool:
        """Tell whether a sample without advantage has no gradient: nothing but the policy loss is trained."""
        loss = self.config.loss
        return (
            self.critic is None
            and not (self.score_terms or self.loss_terms or self.has_own_steps)
            and not (loss.entropy_coef > 0 or loss.aux_loss_coef > 0)
            and self.strategy.sequence_group is None
            and isinstance(self.policy_loss, PolicyLoss)  # none of a script
            and self.policy_loss.entry.linear_in_advantages
            and not any(self.overrides(name) for name in TRAINING_METHODS)
        )

    def critic_spec(self) -> Any | None:
        """Return how the critic's own micro batches are made; ``None``: it trains on the actor's."""
        spec = self.specs["critic_train"]
        if spec == self.specs["actor_train"]:
            return None
        if self.overrides("training_step"):
            raise ConfigError(
                f"{type(self).__name__}.training_step trains actor and critic on one micro batch, and the "
                "options give the critic others: set the same for both, or override training_step_actor and "
                "training_step_critic"
            )
        return spec

    def begin_terms(self, micro_batches: int) -> None:
        """Prepare further terms of the actor's loss for the micro batches that follow. Collective."""
        terms = self.loss_terms.values()
        self.term_losses = [iter(term.losses(micro_batches)) for term in terms]

    def actor_trains(self, step: int) -> bool:
        return step > self.freezing_actor_steps

    def trained_models(self, step: int) -> list[str]:
        """Return the names of the models that this step trains."""
        is_trained = {"actor": self.actor_trains(step), "critic": self.critic is not None}
        return [name for name in is_trained if is_trained[name]]

    def actor_step(self) -> dict[str, float]:
        """Take the actor's optimizer step, or stop early, at the last micro batch of a step."""
        ends_step = self.strategy.completes_step(self.actor)
        if self.early_stop is not None and ends_step and self.early_stop.reached():
            self.state.stopped_optimizer_steps += 1
            self.strategy.skip_step(self.actor, name="actor")
            return {"actor_lr": self.actor_optim.param_groups[0]["lr"], "actor_stopped": 1.0}
        status = self.optimizer_step("actor", self.actor, self.actor_optim, self.actor_scheduler)
        if "actor_grad_norm" in status:
            status["actor_stopped"] = 0.0
        return status

    def optimizer_step(
        self, name: str, model: Any, optimizer: Any, scheduler: Any
    ) -> dict[str, float]:
        """Take the optimizer step of a model, if this was its last micro batch."""
        status = {f"{name}_lr": optimizer.param_groups[0]["lr"]}
        outcome = self.strategy.optimizer_step(optimizer, model, scheduler, name=name)
        if outcome is None:  # more micro batches follow
            return status
        self.skipped.add(name, outcome.skipped, outcome.overflow)
        status[f"{name}_grad_norm"] = math.nan
        if not outcome.skipped:
            self.callbacks.on_optimizer_step(self, name)
            status[f"{name}_grad_norm"] = outcome.grad_norm
        return status | {f"{name}_{key}": value for key, value in outcome.metrics().items()}


def build_policy_loss(config: PPOConfig) -> PolicyLoss:
    """Return the policy loss of a resolved config."""
    loss = config.loss
    return PolicyLoss(
        loss.eps_clip_low,
        loss.eps_clip_high,
        policy_loss=loss.policy_loss,
        loss_agg_mode=loss.loss_agg_mode,
        options={
            name: getattr(loss, name) for name in POLICY_LOSSES.find(loss.policy_loss).defaults
        },
        horizon=float(config.rollout.generate_max_len),
    )


# -- early stop -------------------------------------------------------------------------------------------------------


class StepLimits:
    """Limits of an optimizer step that goes too far from the policy that sampled; the same on every rank."""

    def __init__(self, limits: Mapping[str, float], ranks: Ranks) -> None:
        self.limits = limits
        self.ranks = ranks
        self.sums: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take in a micro batch of the step."""
        for name in self.limits:
            self.sums[name] = self.sums.get(name, 0.0) + metrics[name].detach().float()

    def reached(self) -> bool:
        """Tell whether the step exceeds a limit, and begin the next one. Collective."""
        if not self.sums:  # a training step of the user's own
            return False
        sums = torch.stack([self.sums.pop(name) for name in self.limits])
        values = self.ranks.all_reduce(sums, "mean").tolist()
        return any(value > limit for value, limit in zip(values, self.limits.values()))
