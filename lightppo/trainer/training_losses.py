"""The losses of one micro batch, of actor and critic, and the terms that may be added to the actor's.

Each loss is its micro batch's share of the loss of the whole optimizer step (see ``aggregate_loss``), so the gradient
depends neither on micro batches nor on ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.kl import KLEstimate
from lightppo.algorithms.losses import IGNORE_INDEX, PolicyLoss, ValueLoss
from lightppo.algorithms.masking import Aggregation, LossNormalizer, aggregate_loss, token_mean
from lightppo.config import LossConfig
from lightppo.experience.experience import Experience
from lightppo.models.actor import ActionScores
from lightppo.models.batches import on_cpu, to_device

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class ScoreTerm:
    """A term of the actor's loss, made of the scores of its training pass."""

    # of the actor, its scores, with gradient, a micro batch, which may be a placeholder, and the step's normalizer: the
    # micro batch's share of the term, and numbers without gradient by their names in train/
    loss: Callable[[Any, ActionScores, Experience, LossNormalizer], tuple[Tensor, Metrics]]
    coef: float = 1.0  # weight of the term
    logits: bool = False  # it reads ``scores.logits``


TermLoss = Callable[[Any], tuple[float, Tensor, Metrics]]
"""Of the actor: the weight of a term, the term, and numbers without gradient by their names in train/."""


class LossTerm:
    """A further term of the actor's loss, with a forward and a backward pass of its own. Its state is in checkpoints."""

    metrics: Sequence[str] = ()  # names of its numbers

    def losses(self, micro_batches: int) -> list[TermLoss]:
        """Return one for each micro batch of the optimizer step that begins, or none at all. Collective.

        Each is a share of the step's loss, like that of :func:`~lightppo.algorithms.masking.aggregate_loss`.
        """
        raise NotImplementedError

    def state_dict(self) -> Any:
        """Return the state, the same on every rank."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""


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
    """Return policy loss, entropy bonus, further terms of the same pass, and load-balancing loss.

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
        **({} if experience.experts is None else {"experts": experience.experts}),
    )
    loss, metrics = weighted_policy_loss(
        loss_fn,
        experience,
        normalizer,
        log_probs=scores.log_probs,
        entropy=scores.entropy.detach(),
        token_weights=token_weights,
    )
    if scores.replaced_experts is not None:
        metrics["replaced_experts"] = token_mean(scores.replaced_experts, mask, normalizer)
    elif options.router_replay != "off":  # a placeholder
        metrics["replaced_experts"] = torch.zeros_like(loss.detach())
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
    """Return the weight of a micro batch in a mean over micro batches by their tokens.

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
    """Return the policy loss of ``log_probs`` (B, A) under the weights of the experience times those in training."""
    old_log_probs = experience.action_log_probs
    if old_log_probs is None:
        old_log_probs = log_probs.detach()
    weights = experience.loss_weights
    in_training = None
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
    """Return estimates with gradient (B, A), from the log probs of the sampled tokens."""
    old_log_probs = experience.action_log_probs
    if old_log_probs is None:
        old_log_probs = scores.log_probs.detach()
    return kl_of_samples(
        scores.log_probs, experience.base_action_log_probs, experience.action_mask, old_log_probs
    )


def packed_lm_loss(actor: Any, batch: dict[str, Tensor], tokens: float, dp_size: int) -> Tensor:
    """Return the language-model loss of a batch, as ``pretrain_loss``, of a model that packs and without logits."""
    labels = batch["labels"][:, 1:]  # (B, S-1)
    first = int((on_cpu(batch["labels"])[:, 1:] != IGNORE_INDEX).any(0).long().argmax())
    labels = labels[:, first:]  # (B, A)
    log_probs = actor(batch["input_ids"], labels.shape[1], batch["attention_mask"])  # (B, A)
    normalizer = LossNormalizer(tokens, sequences=0, dp_size=dp_size)
    return aggregate_loss(-log_probs, labels != IGNORE_INDEX, "token-mean", normalizer)


def critic_loss(
    critic: Any,
    experience: Experience,
    normalizer: LossNormalizer,
    loss_fn: ValueLoss,
    value_norm: Any | None,
) -> tuple[Tensor, Metrics]:
    """Return value loss and metrics. ``value_norm`` normalises what the critic says; what the experience holds is not."""
    mask = experience.action_mask
    old_values = experience.values
    returns = experience.returns
    inputs = {"num_actions": experience.num_actions, "attention_mask": experience.attention_mask}
    values = critic(experience.sequences, **inputs)  # (B, A)
    denormalized_values = values.detach()
    if value_norm is not None:
        denormalized_values = value_norm.denormalize(denormalized_values)
        old_values = value_norm.normalize_old(old_values)
        returns = value_norm.normalize(returns)
    loss, metrics = loss_fn(values, old_values, returns, mask, normalizer)
    mean_value = token_mean(denormalized_values, mask, normalizer)
    return loss, metrics | {"critic_loss": loss.detach(), "values": mean_value}


# -- the logged entropy, of a sample of the tokens: of all it takes as long as half of the log softmax ----------------


# least number of tokens, over all ranks, of which the logged entropy of a step is the mean
_ENTROPY_SAMPLE = 2048
_LARGEST_STRIDE = 8  # one of so many tokens is in the sample of a large step


def systematic_sample(mask: Tensor, start: Tensor, stride: int) -> Tensor:
    """Return every ``stride``-th unmasked token of each row, (B, A) bool, from the one that ``start`` (B,) decides on.

    The sum over these times ``stride`` estimates the sum over all, without bias where ``start`` is random.
    """
    nth = mask.long().cumsum(1) + start.unsqueeze(1)  # (B, A)
    return mask.bool() & (nth % stride == 0)


@dataclass(frozen=True)
class EntropySample:
    """The tokens whose entropy is computed where it is only logged; masks (B, A) on the CPU."""

    stride: int  # each token of the sample stands for so many
    counted: Tensor  # the sample
    computed: Tensor  # the sample, and the rows that somebody reads

    def mean(
        self, entropy: Tensor, mask: Tensor, normalizer: LossNormalizer
    ) -> tuple[Tensor, Tensor]:
        """Return the micro batch's share of the estimated mean, and the entropy (B, A), NaN where it was not computed."""
        counted, computed = (
            to_device(places, mask.device) for places in (self.counted, self.computed)
        )
        sample_entropy = entropy.masked_fill(~counted, 0.0)
        mean = self.stride * token_mean(sample_entropy, mask, normalizer)
        return mean, entropy.masked_fill(~computed, torch.nan)


def sample_stride(tokens: float) -> int:
    """Return how many tokens of a step of ``tokens`` each token of the sample stands for; 1: all are in the sample."""
    return max(1, min(_LARGEST_STRIDE, int(tokens) // _ENTROPY_SAMPLE))


def entropy_sample(experience: Experience, stride: int, rows: Iterable[int] = ()) -> EntropySample:
    """Return the tokens of a micro batch that are in the sample, and those of ``rows``.

    The choice depends on the ids of a row alone, so the logged mean depends neither on micro batches nor on ranks.
    """
    ids, attention_mask, mask = map(
        on_cpu, (experience.sequences, experience.attention_mask, experience.action_mask)
    )
    counted = systematic_sample(mask, start=(ids * attention_mask).sum(1), stride=stride)
    computed = counted.clone()
    computed[list(rows)] = True
    return EntropySample(stride, counted, computed)
