"""The update of a PPO step: passes over the replay buffer, optimizer steps, and the losses of one micro batch.

Each loss is its micro batch's share of the loss of the whole optimizer step (see ``aggregate_loss``), so the gradient
depends neither on micro batches nor on ranks. Nothing is written to what comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightppo.algorithms.entries import LOSS_AGG_MODES, POLICY_LOSSES
from lightppo.algorithms.kl import KLEstimate
from lightppo.algorithms.losses import PolicyLoss, ValueLoss
from lightppo.algorithms.masking import (
    Aggregation,
    LossNormalizer,
    token_mean,
)
from lightppo.config import LossConfig, PPOConfig
from lightppo.config.rules import micro_batch_spec, of_role, token_weights
from lightppo.experience.batching import (
    Minibatch,
    ReplayBuffer,
    StepPart,
    minibatches,
)
from lightppo.experience.experience import Experience
from lightppo.experience.maker import ExperienceMaker
from lightppo.logging.performance import PhaseTimer
from lightppo.logging.progress import bar_of_part, minibatch_on_bar
from lightppo.logging.step_metrics import (
    SampleSummaries,
    checked_status,
    micro_batch_status,
    optimizer_status,
)
from lightppo.models.actor import ActionScores
from lightppo.models.wrapper import layout_of_all
from lightppo.plugin import EARLY_STOPS, ENTROPY_SAMPLES, SCORE_TERMS
from lightppo.trainer.loop import SkippedSteps, TrainerState

Metrics = dict[str, Tensor]
# numbers by name, or tensors of one number that are read at the end of a step
Status = Mapping[str, Any]


@dataclass(frozen=True)
class ScoreTerm:
    """A term of the actor's loss, made of the scores of its training pass: see :data:`lightppo.plugin.SCORE_TERMS`."""

    # of the actor, its scores, with gradient, a micro batch, which may be a placeholder, and the step's normalizer: the
    # micro batch's share of the term, and numbers without gradient by their names in train/
    loss: Callable[[Any, ActionScores, Experience, LossNormalizer], tuple[Tensor, Metrics]]
    coef: float = 1.0  # weight of the term
    logits: bool = False  # it reads ``scores.logits``


class EntropySample(Protocol):
    """Some tokens of a micro batch, see :data:`lightppo.plugin.ENTROPY_SAMPLES`."""

    computed: Tensor  # (B, A) bool, on the CPU: whose entropy is computed

    def mean(
        self, entropy: Tensor, mask: Tensor, normalizer: LossNormalizer
    ) -> tuple[Tensor, Tensor]:
        """The micro batch's share of the estimated mean, and the entropy (B, A), NaN where it was not computed."""


class EarlyStop(Protocol):
    """Whether an optimizer step of the actor goes too far; see :data:`lightppo.plugin.EARLY_STOPS`."""

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take in the metrics of a micro batch of the step, on their device."""

    def reached(self) -> bool:
        """Whether the step is left out, the same on every rank; the next one begins. Collective."""


OwnLoss = Callable[[Any], tuple[float, Tensor, Metrics]]
"""Of the actor: the weight of a term, the term, and numbers without gradient by their names in train/."""


class LossTerm:
    """A further term of the actor's loss, with a forward and a backward pass of its own. Its state is in checkpoints."""

    metrics: Sequence[str] = ()  # names of its numbers

    def losses(self, micro_batches: int) -> list[OwnLoss]:
        """One for each micro batch of the optimizer step that begins, or none at all. Collective.

        Each is a share of the step's loss, like that of :func:`~lightppo.algorithms.masking.aggregate_loss`.
        """
        raise NotImplementedError

    def state_dict(self) -> Any:
        """The same on every rank."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""


class Update:
    """Trains actor and critic on the replay buffer: ``max_epochs`` passes, an optimizer step per ``train_batch_size``.

    A subclass may override ``training_step``, ``training_step_actor`` and ``training_step_critic``.

    Args:
        inputs: :class:`lightppo.trainer.build.PPOInputs` with a resolved config.
        state: of the run; optimizer steps are counted in it.
    """

    def __init__(
        self,
        inputs: Any,
        *,
        experience_maker: ExperienceMaker,
        replay_buffer: ReplayBuffer,
        kl_ctl: Any,
        value_norm: Any | None,
        state: TrainerState,
        skipped: SkippedSteps,
        timer: PhaseTimer,
    ) -> None:
        config, self.strategy = inputs.config, inputs.strategy
        self.loss_terms, self.frozen = dict(inputs.loss_terms), inputs.frozen
        self.actor, self.critic, self.reference = inputs.actor, inputs.critic, inputs.initial_model
        self.actor_optim, self.actor_scheduler = inputs.actor_optim, inputs.actor_scheduler
        self.critic_optim, self.critic_scheduler = inputs.critic_optim, inputs.critic_scheduler
        self.experience_maker, self.replay_buffer = experience_maker, replay_buffer
        self.use(config)
        self.kl_ctl, self.value_norm = kl_ctl, value_norm
        self.state, self.skipped, self.timer = state, skipped, timer
        algorithm, loss, training = config.algorithm, config.loss, config.training
        self.max_epochs = training.max_epochs
        self.freezing_actor_steps = algorithm.freezing_actor_steps
        self.critic_max_epochs = 0
        if self.critic is not None:
            self.critic_max_epochs = of_role(config, "critic").max_epochs or training.max_epochs
        self.epoch = 0  # the pass over the rollout that is under way
        self.policy_loss = build_policy_loss(config)
        self.token_weights = list(token_weights(config, in_training=True).values())
        self.value_loss = ValueLoss(
            loss.value_clip, loss_agg_mode=loss.loss_agg_mode, huber_delta=loss.value_huber_delta
        )
        self.early_stop: EarlyStop | None = EARLY_STOPS.first(config, self.strategy)
        self.observe: Callable[[Experience, Tensor, Tensor], None] = lambda *_: None
        self.entropy_rows: Callable[[Experience], Iterable[int]] = lambda _: ()
        # of each further term: those of the micro batches that follow
        self.own_losses: list[Iterator[OwnLoss]] = []
        self.sample_entropy = ENTROPY_SAMPLES.first(config)
        self.samples = SampleSummaries(self)  # their numbers
        self.stepped: Callable[[str], None] = lambda _: None  # gets the model's name

    def use(self, config: PPOConfig) -> None:
        """Work with these options from now on."""
        self.config = config
        self.specs = {
            call: micro_batch_spec(config, call) for call in ("actor_train", "critic_train")
        }
        self.aggregate = LOSS_AGG_MODES.find(config.loss.loss_agg_mode).fn
        self.score_terms: list[ScoreTerm] = list(SCORE_TERMS.made(config, self.frozen).values())
        if config.algorithm.use_kl_loss:
            reads_logits = self.experience_maker.kl_of_models is not None
            self.score_terms.insert(0, ScoreTerm(self.kl_loss, logits=reads_logits))

    def train(self, step: int) -> dict[str, float]:
        """Train on the replay buffer. Collective.

        Args:
            step: number of this PPO step; it seeds the shuffling.

        Returns:
            the means over the optimizer steps, and statistics of the rollout, by the names of
            ``trainer.metrics.METRICS`` without their namespace; the same on every rank.
        """
        self.samples.begin(self.replay_buffer.items)
        trained = []
        with self.timer("train"):
            epochs = max(self.max_epochs, self.critic_max_epochs)
            for epoch in range(epochs):
                self.epoch = epoch
                plan = self.minibatches(step, epoch)
                text = f"train, epoch {epoch + 1}/{epochs}"
                bar = bar_of_part(plan, text, self.strategy)
                for minibatch in bar:
                    trained.append(self.train_minibatch(minibatch, step))
                    samples = [e for e in minibatch.micro_batches if e.part.has_samples]
                    # Not where there is none to see it: the numbers are a wait for a GPU.
                    if samples and not getattr(bar, "disable", True):
                        bar.set_postfix(minibatch_on_bar(samples, trained[-1]))
        self.epoch = 0
        status = optimizer_status(trained, self.strategy) | self.samples.status()
        self.skipped.end_step()
        if not trained:
            status |= {f"{name}_skipped": 1.0 for name in self.skipped.of_model}
        return (
            {"samples": 0.0}
            | status
            | {"kl_coef": self.kl_ctl.value, "optimizer_steps": float(len(trained))}
        )

    def train_minibatch(self, minibatch: Minibatch, step: int = 0) -> list[Mapping[str, float]]:
        """One optimizer step of actor and critic; what ``training_step`` says of each micro batch with samples."""
        micro_batches, of_critic = minibatch.micro_batches, minibatch.critic_micro_batches
        self.begin_terms(len(micro_batches))
        self.skipped.begin(minibatch)
        self.strategy.accumulate(self.actor, len(micro_batches))
        self.strategy.accumulate(self.critic, len(of_critic or micro_batches))
        if of_critic is None:
            done = [
                (experience, self.training_step(experience, step))
                for experience in self.given(micro_batches)
            ]
        else:
            with self.timer("actor_update"):
                trained = self.given(micro_batches if self.actor_trains(step) else ())
                done = [
                    (experience, self.training_step_actor(experience)) for experience in trained
                ]
            with self.timer("critic_update"):
                trained = self.given(of_critic if self.critic_trains() else ())
                done += [
                    (experience, self.training_step_critic(experience)) for experience in trained
                ]
        # A placeholder says nothing but the losses of further terms.
        own = [name for term in self.loss_terms.values() for name in term.metrics]
        statuses = []
        # Numbers are read only here, so that no micro batch waits for a GPU.
        for experience, status in done:
            numbers = checked_status(status)
            if not experience.part.has_samples:
                numbers = {name: value for name, value in numbers.items() if name in own}
            statuses.append(numbers)
        self.summarise()
        return statuses

    # -- one micro batch -----------------------------------------------------------------------------------------

    def training_step(self, experience: Experience, step: int) -> Status:
        """One micro batch of actor and critic; its numbers, whose mean is logged whatever their names. Collective.

        Gradients add up; at the last micro batch of ``train_batch_size`` samples the optimizers step.
        """
        status: dict[str, Any] = {}
        if self.actor_trains(step):
            with self.timer("actor_update"):
                status |= self.training_step_actor(experience)
        if self.critic_trains():
            with self.timer("critic_update"):
                # the actor's pass may know more of the KL
                status = self.training_step_critic(experience) | status
        return status

    def training_step_actor(self, experience: Experience) -> Status:
        """One micro batch of the actor; see :meth:`training_step`."""
        part = self.part_of(experience)
        self.actor.train()
        loss, metrics, log_probs, entropy = actor_loss(
            self.actor,
            experience,
            part.normalizer,
            loss_fn=self.policy_loss,
            aggregate=self.aggregate,
            options=self.config.loss,
            terms=self.score_terms,
            token_weights=self.token_weights,
            sample=self.entropy_sample(experience, part.normalizer),
        )
        self.backward(loss * part.loss_scale, self.actor, self.actor_optim)
        if self.early_stop is not None:
            self.early_stop.add(metrics)
        self.observe(experience, log_probs, entropy)
        if experience.action_log_probs is None and part.has_samples:
            self.samples.add(experience, log_probs)
            experience = self.with_kl(experience, log_probs)
        status: dict[str, Any] = micro_batch_status(metrics, part.status_scale)
        own_losses = (next(losses, None) for losses in self.own_losses)
        for own_loss in filter(None, own_losses):
            coef, loss, own_metrics = own_loss(self.actor)
            self.backward(coef * part.loss_scale * loss, self.actor, self.actor_optim)
            status |= own_metrics
        return self.told(status | self.actor_step(), experience)

    def entropy_sample(
        self, experience: Experience, normalizer: LossNormalizer
    ) -> EntropySample | None:
        """The tokens whose entropy is logged where nothing else needs it; None: all."""
        if self.sample_entropy is None or self.config.loss.entropy_coef > 0 or self.token_weights:
            return None
        return self.sample_entropy(experience, normalizer.tokens, self.entropy_rows(experience))

    def training_step_critic(self, experience: Experience) -> Status:
        """One micro batch of the critic; see :meth:`training_step`."""
        part = self.part_of(experience)
        self.critic.train()
        loss, metrics = critic_loss(
            self.critic, experience, part.normalizer, self.value_loss, self.value_norm
        )
        self.backward(loss * part.loss_scale, self.critic, self.critic_optim)
        status: dict[str, Any] = micro_batch_status(metrics, part.status_scale)
        status |= self.optimizer_step(
            "critic", self.critic, self.critic_optim, self.critic_scheduler
        )
        return self.told(status, experience)

    def kl_loss(
        self, actor: Any, scores: ActionScores, experience: Experience, normalizer: LossNormalizer
    ) -> tuple[Tensor, Metrics]:
        """``--use_kl_loss``, a :class:`ScoreTerm`: the KL to the reference, times its coefficient."""
        maker, mask = self.experience_maker, experience.action_mask
        if maker.kl_of_models is not None:
            kl, _ = maker.kl_of_models(actor, self.reference, scores, experience)  # (B, A)
        else:
            kl = kl_to_reference(maker.kl_of_samples, scores, experience)
        loss = self.aggregate(kl, mask, normalizer)
        return self.kl_ctl.value * loss, {"kl_loss": loss.detach()}

    def given(self, micro_batches: Iterable[Experience]) -> Iterable[Experience]:
        """The micro batches as ``training_step`` gets them."""
        return micro_batches

    def part_of(self, experience: Experience) -> StepPart:
        """What a micro batch is of its optimizer step."""
        return experience.part

    def with_kl(self, experience: Experience, log_probs: Tensor) -> Experience:
        """A micro batch without old log probs, after its pass: :meth:`summarise` tells its KL."""
        return experience

    def backward(self, loss: Tensor, model: Any, optimizer: Any) -> None:
        self.strategy.backward(loss, model, optimizer)

    def told(self, status: Status, experience: Experience) -> Status:
        """The status of a micro batch as ``training_step`` returns it."""
        return status

    def summarise(self) -> None:
        """Take in what is known of log probs that only a training pass has made."""
        self.samples.read()

    # -- optimizer steps -----------------------------------------------------------------------------------------

    def minibatches(self, step: int, epoch: int) -> Iterator[Minibatch]:
        """The optimizer steps of one pass; another order in each step, epoch and on each rank, also after a resume."""
        config, training = self.config, self.config.training
        key = (config.strategy.seed, step, epoch, self.strategy.get_rank())
        models = (self.actor, self.critic, self.reference, *self.frozen.values())
        return minibatches(
            self.replay_buffer.items,
            self.strategy,
            train_batch_size=training.train_batch_size,
            actor=self.specs["actor_train"],
            critic=self.critic_spec(),
            layout=layout_of_all(models),
            # With a load-balancing loss a prompt must count for each of its samples.
            share_prompts=config.loss.aux_loss_coef == 0,
            shuffle=training.shuffle,
            generator=torch.Generator().manual_seed(hash(key) & 0x7FFF_FFFF_FFFF_FFFF),
            collate=self.replay_buffer.collate_fn,
            loss_scale=float(config.rollout.generate_max_len),
        )

    def critic_spec(self) -> Any | None:
        """Micro batches of the critic's own; ``None``: it trains on the actor's."""
        of_critic = self.specs["critic_train"]
        return None if self.critic is None or of_critic == self.specs["actor_train"] else of_critic

    def begin_terms(self, micro_batches: int) -> None:
        """Further terms of the actor's loss get ready for the micro batches that follow. Collective."""
        if self.epoch < self.max_epochs:
            losses = (term.losses(micro_batches) for term in self.loss_terms.values())
            self.own_losses = [iter(of_term) for of_term in losses]

    def actor_trains(self, step: int) -> bool:
        return step > self.freezing_actor_steps and self.epoch < self.max_epochs

    def critic_trains(self) -> bool:
        return self.epoch < self.critic_max_epochs

    def trained_models(self, step: int) -> list[str]:
        """The models that this step trains."""
        trains = {"actor": self.actor_trains(step), "critic": self.critic_trains()}
        return [name for name, does in trains.items() if does]

    def actor_step(self) -> dict[str, float]:
        """At the last micro batch of a step: the optimizer step or an early stop."""
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
        """The optimizer step of a model, if this was the last micro batch of it."""
        status = {f"{name}_lr": optimizer.param_groups[0]["lr"]}
        outcome = self.strategy.optimizer_step(optimizer, model, scheduler, name=name)
        if outcome is None:  # more micro batches follow
            return status
        self.skipped.add(name, outcome.skipped, outcome.overflow)
        if not outcome.skipped:
            self.stepped(name)
        grad_norm = float("nan") if outcome.skipped else outcome.grad_norm
        more = {f"{name}_{key}": value for key, value in outcome.metrics().items()}
        return status | {f"{name}_grad_norm": grad_norm} | more


def actor_loss(
    actor: Any,
    experience: Experience,
    normalizer: LossNormalizer,
    *,
    loss_fn: PolicyLoss,
    aggregate: Aggregation,
    options: LossConfig,
    terms: Sequence[ScoreTerm] = (),
    token_weights: Sequence[Callable[..., Tensor]] = (),
    sample: EntropySample | None = None,
) -> tuple[Tensor, Metrics, Tensor, Tensor]:
    """Policy loss, entropy bonus, further terms of the same pass, and load-balancing loss.

    Without ``action_log_probs`` in the experience, the policy that is trained is the one that sampled.
    ``token_weights`` are those of :class:`lightppo.plugin.TokenWeight` in training; ``sample`` are the tokens whose
    entropy is logged, None: all.

    Returns:
        the loss (scalar), metrics, and without gradient the policy's log probs and its entropy or NaN, (B, A) each.
    """
    mask = experience.action_mask
    scores = actor.score_actions(
        experience.sequences,
        experience.num_actions,
        experience.attention_mask,
        entropy=True if sample is None else sample.computed,
        entropy_grad=options.entropy_coef > 0,
        logits=any(term.logits for term in terms),
        router_loss=options.aux_loss_coef > 0,
    )
    loss, metrics = weighted_policy_loss(
        loss_fn,
        experience,
        normalizer,
        log_probs=scores.log_probs,
        entropy=scores.entropy.detach(),
        token_weights=token_weights,
    )
    per_token = scores.entropy.detach()
    if sample is None:
        metrics["entropy"] = token_mean(per_token, mask, normalizer)
    else:
        metrics["entropy"], per_token = sample.mean(per_token, mask, normalizer)
    if options.entropy_coef > 0:
        entropy = aggregate(scores.entropy, mask, normalizer)
        loss = loss - options.entropy_coef * entropy
    for term in terms:
        share, numbers = term.loss(actor, scores, experience, normalizer)
        loss = loss + term.coef * share
        metrics |= numbers
    if options.aux_loss_coef > 0:
        aux_loss = _token_share(mask, normalizer) * scores.router_loss
        metrics["aux_loss"] = aux_loss.detach()
        loss = loss + options.aux_loss_coef * aux_loss
    return loss, metrics, scores.log_probs.detach(), per_token


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
            in_training = in_training * weigh(
                experience, log_probs=log_probs.detach(), entropy=entropy
            )
        weights = in_training if weights is None else weights * in_training
    loss, metrics = loss_fn(
        log_probs,
        old_log_probs,
        experience.advantages,
        experience.action_mask,
        normalizer,
        weights=weights,
        # a loss of a script selects none
        selected=experience.selected if getattr(loss_fn, "selects_tokens", False) else None,
    )
    metrics["policy_loss"] = loss.detach()
    if in_training is not None:
        rejected = (in_training == 0).to(in_training.dtype)
        metrics["rejected_ratio"] = token_mean(rejected, experience.action_mask, normalizer)
    return loss, metrics


def kl_to_reference(
    kl_of_samples: KLEstimate, scores: ActionScores, experience: Experience
) -> Tensor:
    """Estimates with gradient (B, A), from the log probs of the sampled tokens."""
    old_log_probs = experience.action_log_probs
    if old_log_probs is None:
        old_log_probs = scores.log_probs.detach()
    return kl_of_samples(
        scores.log_probs, experience.base_action_log_probs, experience.action_mask, old_log_probs
    )


def critic_loss(
    critic: Any,
    experience: Experience,
    normalizer: LossNormalizer,
    loss_fn: ValueLoss,
    value_norm: Any | None,
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
    mean_value = token_mean(shown, mask, normalizer)
    return loss, metrics | {"critic_loss": loss.detach(), "values": mean_value}


def build_policy_loss(config: PPOConfig) -> PolicyLoss:
    """The policy loss of a resolved config."""
    loss = config.loss
    return PolicyLoss(
        loss.eps_clip_low,
        loss.eps_clip_high,
        policy_loss=loss.policy_loss,
        loss_agg_mode=loss.loss_agg_mode,
        options={
            name: getattr(loss, name) for name in POLICY_LOSSES.find(loss.policy_loss).defaults
        },
    )
