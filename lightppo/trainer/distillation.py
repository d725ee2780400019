"""What a teacher does in a run: its pass over the rollout, its term of the advantages, its term of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.advantages import reward_to_go
from lightppo.algorithms.divergences import divergence_of, top_divergence
from lightppo.algorithms.entries import LOSS_AGG_MODES
from lightppo.algorithms.kl import Divergence, divergence_of_models
from lightppo.algorithms.masking import (
    Aggregation,
    LossNormalizer,
    at_least_float32,
    require_same_shape,
    token_mean,
    zero_where_masked,
)
from lightppo.algorithms.top_tokens import log_probs_at, top_log_probs
from lightppo.config import PPOConfig
from lightppo.config.rules import adds_teacher, needs_teacher
from lightppo.errors import ConfigError
from lightppo.experience.experience import Experience
from lightppo.experience.maker import RolloutPass
from lightppo.models.actor import ActionScores, Actor
from lightppo.trainer.teacher_servers import TeacherServers
from lightppo.trainer.training_losses import Metrics, ScoreTerm

# of the further models of a run, and of what its pass leaves in Experience.extra
TEACHER = "teacher"
LOG_PROBS = "teacher_log_probs"  # (B, A)
# (B, A, K), of its K most likely tokens, and their ids as float
TOP = "teacher_top"
TOP_IDS = "teacher_top_ids"


def check_teacher(building: Any) -> None:
    """The servers of ``--teacher_url`` are asked whether they can judge; a model has as many tokens. Collective."""
    config = building.config
    if not isinstance(config, PPOConfig) or not needs_teacher(config):
        return
    distill = config.distill
    tokens = len(building.tokenizer)
    if distill.teacher_url:
        building.frozen[TEACHER] = TeacherServers(config, building.tokenizer, building.strategy)
    elif (distill.distill_topk or 0) > tokens:
        raise ConfigError(
            f"--distill_topk {distill.distill_topk}: there are {tokens} tokens; set it below, or leave it out to take all"
        )


# -- over the rollout ------------------------------------------------------------------------------------------------


def teacher_pass(config: PPOConfig, models: Mapping[str, Any]) -> RolloutPass | None:
    """Return the teacher's pass over the rollout; ``None``: it makes a pass in training, or there is no teacher."""
    k = config.distill.distill_topk
    if TEACHER not in models or not (adds_teacher(config) or k is not None):
        return None
    teacher = models[TEACHER]
    on_servers = isinstance(teacher, TeacherServers)
    score = teacher.score_actions
    if k is not None:
        score = teacher.score_top if on_servers else partial(score_top, teacher)

    def run(part: Experience) -> dict[str, Tensor]:
        inputs = {
            "sequences": part.sequences,
            "num_actions": part.num_actions,
            "attention_mask": part.attention_mask,
        }
        if k is None:
            return {LOG_PROBS: score(**inputs).log_probs}
        scores, top, ids = score(**inputs, k=k)
        return {LOG_PROBS: scores.log_probs, TOP: top, TOP_IDS: ids}

    return RolloutPass(teacher, run, measure=gap_to_teacher, takes_all=on_servers)


def score_top(
    policy: Actor, sequences: Tensor, num_actions: int, attention_mask: Tensor | None, k: int
) -> tuple[ActionScores, Tensor, Tensor]:
    """Return log probs without gradient, also of the k most likely tokens at each action, largest first.

    Returns:
        the scores; log probs and ids (as float) of the k tokens, (B, A, k) each, 0 unless real.
    """
    scores = policy.score_actions(sequences, num_actions, attention_mask, logits=True)
    best = top_log_probs(scores.logits, k, policy.temperature)  # (K, k) each
    shape = *scores.real.shape, k
    values, ids = (torch.zeros(shape, device=sequences.device) for _ in best)
    values[scores.real], ids[scores.real] = (numbers.float() for numbers in best)
    return scores, values, ids


def gap_to_teacher(experience: Experience, log_probs: Tensor) -> dict[str, Tensor]:
    """Return what is logged of a teacher, (B, A) each."""
    of_teacher = experience.extra[LOG_PROBS]
    return {"teacher_kl": log_probs - of_teacher, "teacher_log_prob": of_teacher}


# -- in the advantages -----------------------------------------------------------------------------------------------


def advantage_term(config: PPOConfig) -> Callable[[Experience], Tensor] | None:
    """Return the teacher's term of the advantages; ``None`` without ``--distill_by advantage``."""
    if not adds_teacher(config):
        return None
    coef = config.distill.distill_coef
    discount = config.distill.distill_discount

    def term(batch: Experience) -> Tensor:  # (B, A)
        return coef * teacher_advantages(
            batch.action_log_probs, batch.extra[LOG_PROBS], batch.action_mask, discount
        )

    return term


@torch.no_grad()
def teacher_advantages(
    log_probs: Tensor, teacher_log_probs: Tensor, action_mask: Tensor, discount: float = 0.0
) -> Tensor:
    """Return Σ_k γ^k (log π_teacher - log π)_{t+k} (B, A): minus the k1 of KL(π || π_teacher), over trained tokens.

    With γ = 0 the gradient is that of each token's reverse KL, whatever follows it; with γ = 1 that of the whole
    response. Source: Lu et al. 2025 (thinkingmachines.ai/blog/on-policy-distillation); γ = 1: arXiv:2306.08543.
    """
    require_same_shape(
        log_probs=log_probs, teacher_log_probs=teacher_log_probs, action_mask=action_mask
    )
    gap = at_least_float32(teacher_log_probs) - at_least_float32(log_probs)
    return reward_to_go(zero_where_masked(gap, action_mask), action_mask, discount)


# -- in the loss -----------------------------------------------------------------------------------------------------


def score_term(config: PPOConfig, models: Mapping[str, Any]) -> ScoreTerm | None:
    """Return the teacher's term of the actor's loss; ``None`` without ``--distill_by loss``."""
    distill = config.distill
    if TEACHER not in models or distill.distill_by != "loss":
        return None
    aggregate = LOSS_AGG_MODES.find(config.loss.loss_agg_mode).fn
    if distill.distill_topk is None:
        loss = WholeLoss(models[TEACHER], divergence_of(distill.distill_beta), aggregate)
    else:
        loss = TopLoss(distill.distill_beta, distill.distill_tail, aggregate)
    return ScoreTerm(loss, distill.distill_coef, logits=True)


@dataclass(frozen=True)
class WholeLoss:
    """The divergence over the vocabulary, with a pass of the teacher beside each pass of the actor."""

    teacher: Any
    divergence: Divergence
    aggregate: Aggregation

    def __call__(
        self, actor: Any, scores: ActionScores, experience: Experience, normalizer: LossNormalizer
    ) -> tuple[Tensor, Metrics]:
        mask = experience.action_mask
        divergence, of_teacher = divergence_of_models(
            actor, self.teacher, scores, experience, self.divergence
        )
        loss = self.aggregate(divergence, mask, normalizer)
        gap = scores.log_probs.detach() - of_teacher
        return loss, {
            "teacher_kl": token_mean(gap, mask, normalizer),
            "teacher_log_prob": token_mean(of_teacher, mask, normalizer),
            "distill_loss": loss.detach(),
        }


@dataclass(frozen=True)
class TopLoss:
    """The divergence over the teacher's most likely tokens, which its pass over the rollout has found."""

    beta: float
    tail: str
    aggregate: Aggregation

    def __call__(
        self, actor: Any, scores: ActionScores, experience: Experience, normalizer: LossNormalizer
    ) -> tuple[Tensor, Metrics]:
        mask = experience.action_mask
        real = scores.real
        nothing = torch.zeros_like(scores.log_probs)  # (B, A)
        divergence = nothing
        mass = nothing
        if TOP in experience.extra:  # else a placeholder, of which no token counts
            top, ids = experience.extra[TOP], experience.extra[TOP_IDS].long()  # (B, A, K) each
            log_probs = log_probs_at(scores.logits, ids[real], actor.temperature)  # (N, K)
            per_token = top_divergence(log_probs, top[real], self.beta, self.tail)  # (N,)
            divergence = nothing.masked_scatter(real, per_token)
            mass = top.exp().sum(-1).masked_fill(~real, 0.0)
        loss = self.aggregate(divergence, mask, normalizer)
        numbers = {
            "distill_loss": loss.detach(),
            "teacher_top_mass": token_mean(mass, mask, normalizer),
        }
        return loss, numbers
