"""The update of a PPO step: passes over the replay buffer, optimizer steps, and the losses of one micro batch.

Each loss is its micro batch's share of the loss of the whole optimizer step (see ``aggregate_loss``), so the gradient
depends neither on micro batches nor on ranks. Nothing is written to what comes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightppo.algorithms.entries import POLICY_LOSSES
from lightppo.algorithms.kl import Divergence, KLEstimate, full_kl, kl_of_rows
from lightppo.algorithms.losses import PolicyLoss, ValueLoss
from lightppo.algorithms.masking import (
    Aggregation,
    LossNormalizer,
    token_mean,
)
from lightppo.algorithms.shaping import ValueNorm
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
from lightppo.models.actor import ActionScores
from lightppo.models.packing import all_share_prompts
from lightppo.plugin import EARLY_STOPS, ENTROPY_SAMPLES, SCORE_TERMS
from lightppo.trainer import metrics as m
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


def score_terms(config: PPOConfig, frozen: Mapping[str, Any]) -> list[ScoreTerm]:
    """Those of this run; ``frozen`` are its further models."""
    return list(filter(None, (entry.fn(config, frozen) for entry in SCORE_TERMS.values())))


class EntropySample(Protocol):
    """Which tokens' entropy is computed where it is only logged; see :data:`lightppo.plugin.ENTROPY_SAMPLES`."""

    computed: Tensor  # (B, A) bool, on the CPU

    def mean(
        self, entropy: Tensor, mask: Tensor, normalizer: LossNormalizer
    ) -> tuple[Tensor, Tensor]:
        """This micro batch's share of the mean, and the entropy (B, A), NaN where it was not computed."""


def entropy_sample(
    experience: Experience, normalizer: LossNormalizer, rows: Iterable[int]
) -> EntropySample | None:
    """That of a micro batch; None: every token is computed, not only those of the rows that somebody reads."""
    samples = (entry.fn(experience, normalizer, rows) for entry in ENTROPY_SAMPLES.values())
    return next(filter(None, samples), None)


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

    def before_first_step(self) -> None:
        """The state of a resumed run is loaded. Collective."""

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
        value_norm: ValueNorm | None,
        state: TrainerState,
        skipped: SkippedSteps,
        timer: m.PhaseTimer,
    ) -> None:
        config, self.strategy = inputs.config, inputs.strategy
        self.loss_terms, self.frozen = dict(inputs.loss_terms), inputs.frozen
        self.use(config)
        self.actor, self.critic = inputs.actor, inputs.critic
        self.reference, self.ema_model = inputs.initial_model, inputs.ema_model
        self.actor_optim, self.actor_scheduler = inputs.actor_optim, inputs.actor_scheduler
        self.critic_optim, self.critic_scheduler = inputs.critic_optim, inputs.critic_scheduler
        self.experience_maker, self.replay_buffer = experience_maker, replay_buffer
        self.kl_ctl, self.value_norm = kl_ctl, value_norm
        self.state, self.skipped, self.timer = state, skipped, timer
        algorithm, loss, training = config.algorithm, config.loss, config.training
        self.max_epochs = training.max_epochs
        self.freezing_actor_steps = algorithm.freezing_actor_steps
        self.critic_max_epochs = 0
        if self.critic is not None:
            self.critic_max_epochs = of_role(config, "critic").max_epochs or training.max_epochs
        self.epoch = 0  # the pass over the rollout that is under way
        self.ema_beta = algorithm.ema_beta
        self.policy_loss = build_policy_loss(config)
        self.token_weights = list(token_weights(config, in_training=True).values())
        self.value_loss = ValueLoss(
            loss.value_clip, loss_agg_mode=loss.loss_agg_mode, huber_delta=loss.value_huber_delta
        )
        stops = (entry.fn(config, self.strategy) for entry in EARLY_STOPS.values())
        self.early_stops: list[EarlyStop] = [stop for stop in stops if stop is not None]
        self.observe: Callable[[Experience, Tensor, Tensor], None] = lambda *_: None
        self.entropy_rows: Callable[[Experience], Iterable[int]] = lambda _: ()
        # of each further term: those of the micro batches that follow
        self.own_losses: list[Iterator[OwnLoss]] = []
        # of log probs that only the training pass has made
        self.on_policy: dict[str, m.Summary] = {}
        self.unread: list[tuple[Experience, Tensor]] = []  # those of an optimizer step

    def use(self, config: PPOConfig) -> None:
        """Work with these options from now on."""
        self.config = config
        self.specs = {
            call: micro_batch_spec(config, call) for call in ("actor_train", "critic_train")
        }
        self.aggregate = Aggregation.of_mode(config.loss.loss_agg_mode)
        self.score_terms = score_terms(config, self.frozen)

    def train(self, step: int) -> dict[str, float]:
        """Train on the replay buffer. Collective.

        Args:
            step: number of this PPO step; it seeds the shuffling.

        Returns:
            the means over the optimizer steps, and statistics of the rollout, by the names of
            ``trainer.metrics.METRICS`` without their namespace; the same on every rank.
        """
        maker = self.experience_maker
        rollout = m.rollout_summaries(self.replay_buffer.items, maker.sampled_kl, maker.measures)
        self.on_policy, trained = {}, []
        with self.timer("train"):
            epochs = max(self.max_epochs, self.critic_max_epochs)
            for epoch in range(epochs):
                self.epoch = epoch
                plan = self.minibatches(step, epoch)
                text = f"train, epoch {epoch + 1}/{epochs}"
                for minibatch in m.progress_bar(
                    plan, text, shown=self.strategy.is_rank_0(), leave=False
                ):
                    trained.append(self.train_minibatch(minibatch, step))
        self.epoch = 0
        rollout = m.merge_summaries([rollout, self.on_policy])
        status = m.optimizer_status(trained, self.strategy)
        status |= m.rollout_status(m.merge_summaries(self.strategy.all_gather_object(rollout)))
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
            numbers = m.checked_status(status)
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
            kl_of_samples=self.experience_maker.kl_of_samples,
            config=self.config,
            kl_coef=self.kl_ctl.value,
            reference=self.reference,
            terms=self.score_terms,
            token_weights=self.token_weights,
            entropy_rows=self.entropy_rows(experience),
        )
        self.backward(loss * part.loss_scale, self.actor, self.actor_optim)
        for stop in self.early_stops:
            stop.add(metrics)
        self.observe(experience, log_probs, entropy)
        if experience.action_log_probs is None and part.has_samples:
            self.unread.append((experience, log_probs))
            experience = self.with_kl(experience, log_probs)
        status: dict[str, Any] = m.micro_batch_status(metrics, part.status_scale)
        own_losses = (next(losses, None) for losses in self.own_losses)
        for own_loss in filter(None, own_losses):
            coef, loss, own_metrics = own_loss(self.actor)
            self.backward(coef * part.loss_scale * loss, self.actor, self.actor_optim)
            status |= own_metrics
        return self.told(status | self.actor_step(), experience)

    def training_step_critic(self, experience: Experience) -> Status:
        """One micro batch of the critic; see :meth:`training_step`."""
        part = self.part_of(experience)
        self.critic.train()
        loss, metrics = critic_loss(
            self.critic, experience, part.normalizer, self.value_loss, self.value_norm
        )
        self.backward(loss * part.loss_scale, self.critic, self.critic_optim)
        status: dict[str, Any] = m.micro_batch_status(metrics, part.status_scale)
        status |= self.optimizer_step(
            "critic", self.critic, self.critic_optim, self.critic_scheduler
        )
        return self.told(status, experience)

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
        unread, self.unread = self.unread, []
        maker = self.experience_maker
        summaries = [
            m.policy_summaries(experience, log_probs, maker.sampled_kl, maker.measures)
            for experience, log_probs in unread
        ]
        self.on_policy = m.merge_summaries([self.on_policy, *summaries])

    # -- optimizer steps -----------------------------------------------------------------------------------------

    def minibatches(self, step: int, epoch: int) -> Iterator[Minibatch]:
        """The optimizer steps of one pass; another order in each step, epoch and on each rank, also after a resume."""
        config, training = self.config, self.config.training
        key = (config.strategy.seed, step, epoch, self.strategy.get_rank())
        # With a load-balancing loss a prompt must count for each of its samples.
        models = (self.actor, self.critic, self.reference, *self.frozen.values())
        shares = (
            training.share_prompts and config.loss.aux_loss_coef == 0 and all_share_prompts(models)
        )
        return minibatches(
            self.replay_buffer.items,
            self.strategy,
            train_batch_size=training.train_batch_size,
            actor=self.specs["actor_train"],
            critic=self.critic_spec(),
            packed=self.experience_maker.batching.packed,
            share_prompts=shares,
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
        """At the last micro batch of a step: the optimizer step or an early stop, then the moving average."""
        if self.strategy.completes_step(self.actor):
            reached = [stop.reached() for stop in self.early_stops]
            if any(reached):
                self.state.stopped_optimizer_steps += 1
                self.strategy.skip_step(self.actor, name="actor")
                return {"actor_lr": self.actor_optim.param_groups[0]["lr"], "actor_stopped": 1.0}
        status = self.optimizer_step("actor", self.actor, self.actor_optim, self.actor_scheduler)
        if "actor_grad_norm" in status:
            status["actor_stopped"] = 0.0
            # not after a skipped step
            if self.ema_model is not None and math.isfinite(status["actor_grad_norm"]):
                self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta)
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
    kl_of_samples: KLEstimate,
    config: PPOConfig,
    kl_coef: float,
    reference: Any | None,
    terms: Sequence[ScoreTerm] = (),
    token_weights: Sequence[Callable[..., Tensor]] = (),
    entropy_rows: Iterable[int] = (),
) -> tuple[Tensor, Metrics, Tensor, Tensor]:
    """Policy loss, entropy bonus, KL loss, further terms of the same pass, and load-balancing loss.

    Without ``action_log_probs`` in the experience, the policy that is trained is the one that sampled.
    ``token_weights`` are those of :class:`lightppo.plugin.TokenWeight` in training; ``entropy_rows`` need the entropy
    of every token, even if it is only logged.

    Returns:
        the loss (scalar), metrics, and without gradient the policy's log probs and its entropy or NaN, (B, A) each.
    """
    options, mask = config.loss, experience.action_mask
    needs_all = options.entropy_coef > 0 or bool(token_weights)
    sample = None if needs_all else entropy_sample(experience, normalizer, entropy_rows)
    scores = actor.score_actions(
        experience.sequences,
        experience.num_actions,
        experience.attention_mask,
        entropy=True if sample is None else sample.computed,
        entropy_grad=options.entropy_coef > 0,
        logits=any(term.logits for term in terms)
        or (config.algorithm.use_kl_loss and config.algorithm.kl_estimator == "full"),
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
    if config.algorithm.use_kl_loss:
        kl = _kl_to_reference(actor, reference, scores, experience, config, kl_of_samples)
        kl_loss = aggregate(kl, mask, normalizer)
        loss = loss + kl_coef * kl_loss
        metrics["kl_loss"] = kl_loss.detach()
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
        selected=experience.selected if selects_tokens(loss_fn) else None,
    )
    metrics["policy_loss"] = loss.detach()
    if in_training is not None:
        rejected = (in_training == 0).to(in_training.dtype)
        metrics["rejected_ratio"] = token_mean(rejected, experience.action_mask, normalizer)
    return loss, metrics


def selects_tokens(loss_fn: Any) -> bool:
    """Whether a policy loss treats some tokens differently; one of a script has no entry."""
    entry = getattr(loss_fn, "entry", None)
    return entry is not None and entry.selection is not None


def _kl_to_reference(
    actor: Any,
    reference: Any,
    scores: ActionScores,
    experience: Experience,
    config: PPOConfig,
    kl_of_samples: KLEstimate,
) -> Tensor:
    """KL estimate with gradient (B, A): from the log probs of the sampled tokens, or over the whole vocabulary."""
    if config.algorithm.kl_estimator != "full":
        old_log_probs = experience.action_log_probs
        return kl_of_samples(
            scores.log_probs,
            experience.base_action_log_probs,
            experience.action_mask,
            scores.log_probs.detach() if old_log_probs is None else old_log_probs,
        )
    kl, _ = divergence_from(reference, actor, scores, experience)
    clip = config.algorithm.kl_clip
    return kl if clip is None else kl.clamp(-clip, clip)


def divergence_from(
    frozen: Any,
    actor: Any,
    scores: ActionScores,
    experience: Experience,
    divergence: Divergence = kl_of_rows,
) -> tuple[Tensor, Tensor]:
    """From a frozen model over the whole vocabulary, with gradient; and the frozen model's log probs (B, A)."""
    with torch.no_grad():
        other = frozen.score_actions(
            experience.sequences, experience.num_actions, experience.attention_mask, logits=True
        )
    per_token = full_kl(
        scores.logits, other.logits, actor.temperature, divergence=divergence
    )  # (K,)
    spread = torch.zeros_like(scores.log_probs).masked_scatter(scores.real, per_token)
    return spread, other.log_probs


def critic_loss(
    critic: Any,
    experience: Experience,
    normalizer: LossNormalizer,
    loss_fn: ValueLoss,
    value_norm: ValueNorm | None,
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


def build_value_norm(loss: LossConfig) -> ValueNorm | None:
    """``--value_norm`` of a resolved section; ``None``: the critic learns raw returns."""
    if loss.value_norm is None:
        return None
    beta = {} if loss.value_norm_beta is None else {"beta": loss.value_norm_beta}
    return ValueNorm(loss.value_norm, eps=loss.value_norm_eps, **beta)
