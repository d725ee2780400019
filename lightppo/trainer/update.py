"""The update of a PPO step: passes over the replay buffer, optimizer steps, and the losses of one micro batch.

Each loss is its micro batch's share of the loss of the whole optimizer step (see ``aggregate_loss``), so the gradient
depends neither on micro batches nor on ranks. Nothing is written to what comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.entries import POLICY_LOSSES
from lightppo.algorithms.kl import Divergence, KLEstimate, full_kl, kl_of_rows
from lightppo.algorithms.losses import PolicyLoss, ValueLoss
from lightppo.algorithms.masking import (
    Aggregation,
    LossNormalizer,
    systematic_sample,
    token_mean,
)
from lightppo.algorithms.shaping import ValueNorm
from lightppo.config import LossConfig, PPOConfig
from lightppo.config.rules import micro_batch_spec, of_role, token_weights
from lightppo.errors import RewardError
from lightppo.experience.batching import (
    Minibatch,
    ReplayBuffer,
    StepPart,
    minibatches,
    selection_of,
)
from lightppo.experience.experience import Experience
from lightppo.experience.maker import ExperienceMaker
from lightppo.models.actor import ActionScores
from lightppo.models.packing import all_share_prompts, on_cpu, to_device
from lightppo.plugin import SCORE_TERMS
from lightppo.ranks import Ranks
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.trainer import metrics as m
from lightppo.trainer.loop import SkippedSteps, TrainerState

# least number of tokens, over all ranks, of which the logged entropy of a step is the mean
_ENTROPY_SAMPLE = 2048
_LARGEST_STRIDE = 8  # one of so many tokens is in the sample of a large step

Metrics = dict[str, Tensor]
# numbers by name, or tensors of one number that are read at the end of a step
Status = Mapping[str, Any]


@dataclass
class UpdatedModels:
    """What an update trains, by which optimizers, and what it looks at."""

    actor: Any
    critic: Any | None
    reference: Any | None  # for losses that compare with it
    actor_optim: Any
    critic_optim: Any
    actor_scheduler: Any
    critic_scheduler: Any
    frozen: Mapping[str, Any] = field(default_factory=dict)  # the further models, by name


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
        config: resolved.
        state: of the run; optimizer steps are counted in it.
    """

    def __init__(
        self,
        config: PPOConfig,
        strategy: DeepspeedStrategy,
        *,
        models: UpdatedModels,
        experience_maker: ExperienceMaker,
        replay_buffer: ReplayBuffer,
        kl_ctl: Any,
        value_norm: ValueNorm | None,
        state: TrainerState,
        skipped: SkippedSteps,
        timer: m.PhaseTimer,
        loss_terms: Mapping[str, LossTerm] = {},
    ) -> None:
        self.strategy, self.loss_terms = strategy, dict(loss_terms)
        self.frozen = models.frozen
        self.use(config)
        self.actor, self.critic, self.reference = models.actor, models.critic, models.reference
        self.actor_optim, self.actor_scheduler = models.actor_optim, models.actor_scheduler
        self.critic_optim, self.critic_scheduler = models.critic_optim, models.critic_scheduler
        self.experience_maker, self.replay_buffer = experience_maker, replay_buffer
        self.kl_ctl, self.value_norm = kl_ctl, value_norm
        self.state, self.skipped, self.timer = state, skipped, timer
        algorithm, loss, training = config.algorithm, config.loss, config.training
        self.max_epochs, self.freezing_actor_steps = (
            training.max_epochs,
            algorithm.freezing_actor_steps,
        )
        self.critic_max_epochs = 0
        if self.critic is not None:
            self.critic_max_epochs = of_role(config, "critic").max_epochs or training.max_epochs
        self.epoch = 0  # the pass over the rollout that is under way
        self.policy_loss = build_policy_loss(config)
        self.token_weights = list(token_weights(config, in_training=True).values())
        self.value_loss = ValueLoss(
            loss.value_clip, loss_agg_mode=loss.loss_agg_mode, huber_delta=loss.value_huber_delta
        )
        self.early_stop = EarlyStop(loss, strategy)
        self.observe: Callable[[Experience, Tensor, Tensor], None] = lambda *_: None
        self.entropy_rows: Callable[[Experience], Iterable[int]] = lambda _: ()
        self.stepped: Callable[[str], None] = lambda _: None  # gets the model's name
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
        empty = self.strategy.all_reduce(len(self.replay_buffer), "sum") == 0
        if empty and not self.config.sampling.dynamic_sampling and self.skipped.batch is None:
            raise RewardError(
                f"step {step}: none of the samples was scored, so there is nothing to train on"
            )
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
        micro_batches = self.with_own_losses(minibatch.micro_batches)
        of_critic = (
            micro_batches
            if minibatch.critic_micro_batches is None
            else minibatch.critic_micro_batches
        )
        self.skipped.begin(minibatch)
        self.strategy.accumulate(self.actor, len(micro_batches))
        self.strategy.accumulate(self.critic, len(of_critic))
        if self.critic is None or of_critic is micro_batches:
            done = [
                (experience, self.training_step(experience, step))
                for experience in self.given(micro_batches)
            ]
        else:
            with self.timer("actor_update"):
                of_actor = self.given(micro_batches if self.actor_trains(step) else ())
                done = [
                    (experience, self.training_step_actor(experience)) for experience in of_actor
                ]
            with self.timer("critic_update"):
                trained = self.given(of_critic if self.critic_trains() else ())
                done += [
                    (experience, self.training_step_critic(experience)) for experience in trained
                ]
        # Numbers are read only here, so that no micro batch waits for a GPU.
        statuses = [
            (experience.part.has_samples, m.checked_status(status)) for experience, status in done
        ]
        self.summarise()
        # A placeholder says nothing but the losses of further terms.
        own = [name for term in self.loss_terms.values() for name in term.metrics]
        return [
            status
            if has_samples
            else {name: value for name, value in status.items() if name in own}
            for has_samples, status in statuses
        ]

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
        self.early_stop.add(metrics)
        self.observe(experience, log_probs, entropy)
        if experience.action_log_probs is None and part.has_samples:
            self.unread.append((experience, log_probs))
            experience = self.with_kl(experience, log_probs)
        status: dict[str, Any] = m.micro_batch_status(metrics, part.status_scale)
        for own_loss in part.own_losses:
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

    def with_own_losses(self, micro_batches: list[Experience]) -> list[Experience]:
        """The micro batches of a step, each with what further terms add to the actor's loss. Collective."""
        if self.epoch >= self.max_epochs:
            return micro_batches
        found = [term.losses(len(micro_batches)) for term in self.loss_terms.values()]
        of_each = zip(*filter(None, found))
        parts = [replace(one.part, own_losses=own) for one, own in zip(micro_batches, of_each)]
        return [replace(one, part=part) for one, part in zip(micro_batches, parts)] or micro_batches

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
        if self.strategy.completes_step(self.actor) and self.early_stop.reached():
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
    sample = None if needs_all else entropy_sample(experience, normalizer.tokens, entropy_rows)
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
    metrics["entropy"], per_token = _mean_entropy(scores.entropy.detach(), sample, mask, normalizer)
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


@dataclass(frozen=True)
class EntropySample:
    """The tokens whose entropy is computed where it is only logged; masks (B, A) on the CPU."""

    stride: int  # each token of the sample stands for so many
    counted: Tensor  # the sample
    computed: Tensor  # the sample, and the rows that somebody reads


def entropy_sample(
    experience: Experience, tokens: float, rows: Iterable[int] = ()
) -> EntropySample | None:
    """Which tokens of a micro batch are in the sample of an optimizer step of ``tokens``; ``None``: all are.

    The choice depends on the ids of a row alone, so the logged mean depends neither on micro batches nor on ranks.
    """
    stride = min(_LARGEST_STRIDE, int(tokens) // _ENTROPY_SAMPLE)
    if stride < 2:
        return None
    ids, real, mask = map(
        on_cpu, (experience.sequences, experience.attention_mask, experience.action_mask)
    )
    counted = systematic_sample(mask, start=(ids * real).sum(1), stride=stride)
    computed = counted.clone()
    computed[list(rows)] = True
    return EntropySample(stride, counted, computed)


def _mean_entropy(
    per_token: Tensor, sample: EntropySample | None, mask: Tensor, normalizer: LossNormalizer
) -> tuple[Tensor, Tensor]:
    """This micro batch's share of the mean, and the entropy per token (B, A), NaN where it was not computed."""
    if sample is None:
        return token_mean(per_token, mask, normalizer), per_token
    counted, computed = (
        to_device(places, mask.device) for places in (sample.counted, sample.computed)
    )
    of_sample = per_token.masked_fill(~counted, 0.0)
    mean = sample.stride * token_mean(of_sample, mask, normalizer)
    return mean, per_token.masked_fill(~computed, torch.nan)


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
        selected=experience.selected if selection_of(loss_fn) is not None else None,
    )
    metrics["policy_loss"] = loss.detach()
    if in_training is not None:
        rejected = (in_training == 0).to(in_training.dtype)
        metrics["rejected_ratio"] = token_mean(rejected, experience.action_mask, normalizer)
    return loss, metrics


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
        values = self.ranks.all_reduce(
            torch.stack([sums[name] for name in self.limits]), "mean"
        ).tolist()
        return any(value > limit for value, limit in zip(values, self.limits.values()))


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
