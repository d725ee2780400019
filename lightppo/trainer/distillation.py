"""What a teacher does in a run: its pass over the rollout, its term of the advantages, its term of the loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.advantages import reward_to_go
from lightppo.algorithms.entries import LOSS_AGG_MODES
from lightppo.algorithms.kl import Divergence, divergence_of, divergence_of_models, top_divergence
from lightppo.algorithms.logprobs import log_probs_at, top_log_probs
from lightppo.algorithms.masking import (
    Aggregation,
    LossNormalizer,
    at_least_float32,
    require_same_shape,
    token_mean,
    zero_where_masked,
)
from lightppo.config import PPOConfig
from lightppo.config.rules import adds_teacher
from lightppo.errors import ConfigError, RequestError, RolloutError
from lightppo.experience.experience import Experience
from lightppo.experience.maker import RolloutPass
from lightppo.http_client import HTTPClient, read_token
from lightppo.models.actor import ActionScores, Actor
from lightppo.models.batches import real_actions
from lightppo.ranks import Ranks
from lightppo.trainer.training_losses import Metrics, ScoreTerm
from lightppo.user_code import in_daemon_thread

logger = logging.getLogger(__name__)

# of the further models of a run, and of what its pass leaves in Experience.extra
TEACHER = "teacher"
LOG_PROBS = "teacher_log_probs"  # (B, A)
# (B, A, K), of its K most likely tokens, and their ids as float
TOP = "teacher_top"
TOP_IDS = "teacher_top_ids"


def check_teacher(building: Any) -> None:
    """Ask the servers of ``--teacher_url`` whether they can judge; check ``--distill_topk`` of a model. Collective."""
    config = building.config
    distill = config.distill
    vocab_size = len(building.tokenizer)
    if distill.teacher_url:
        building.frozen[TEACHER] = TeacherServers(config, building.tokenizer, building.strategy)
    elif (distill.distill_topk or 0) > vocab_size:
        raise ConfigError(
            f"--distill_topk {distill.distill_topk}: there are {vocab_size} tokens; set it below, or leave it out to "
            "take all"
        )


# -- over the rollout ------------------------------------------------------------------------------------------------


def teacher_pass(config: PPOConfig, teacher: Any) -> RolloutPass | None:
    """Return the teacher's pass over the rollout; ``None``: it makes a pass in training."""
    k = config.distill.distill_topk
    if not adds_teacher(config) and k is None:
        return None
    on_servers = isinstance(teacher, TeacherServers)
    score = teacher.score_actions
    if k is not None:
        score = teacher.score_top if on_servers else partial(score_top, teacher)

    def run(experience: Experience) -> dict[str, Tensor]:
        inputs = {
            "sequences": experience.sequences,
            "num_actions": experience.num_actions,
            "attention_mask": experience.attention_mask,
        }
        if k is None:
            return {LOG_PROBS: score(**inputs).log_probs}
        scores, top_log_probs, top_ids = score(**inputs, k=k)
        return {LOG_PROBS: scores.log_probs, TOP: top_log_probs, TOP_IDS: top_ids}

    return RolloutPass(teacher, run, measure=gap_to_teacher, takes_all=on_servers)


def score_top(
    policy: Actor, sequences: Tensor, num_actions: int, attention_mask: Tensor | None, k: int
) -> tuple[ActionScores, Tensor, Tensor]:
    """Return log probs without gradient, also of the k most likely tokens at each action, largest first.

    Returns:
        the scores; log probs and ids (as float) of the k tokens, (B, A, k) each, 0 unless real.
    """
    scores = policy.score_actions(sequences, num_actions, attention_mask, logits=True)
    top_tokens = top_log_probs(scores.logits, k, policy.temperature)  # (K, k) each
    shape = *scores.real.shape, k
    values, ids = (torch.zeros(shape, device=sequences.device) for _ in top_tokens)
    values[scores.real], ids[scores.real] = (numbers.float() for numbers in top_tokens)
    return scores, values, ids


def gap_to_teacher(experience: Experience, log_probs: Tensor) -> dict[str, Tensor]:
    """Return what is logged of a teacher, (B, A) each."""
    teacher_log_probs = experience.extra[LOG_PROBS]
    return {"teacher_kl": log_probs - teacher_log_probs, "teacher_log_prob": teacher_log_probs}


# -- in the advantages -----------------------------------------------------------------------------------------------


def advantage_term(config: PPOConfig) -> Callable[[Experience], Tensor]:
    """Return the teacher's term of the advantages, of ``--distill_by advantage``."""
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


def score_term(config: PPOConfig, teacher: Any) -> ScoreTerm:
    """Return the teacher's term of the actor's loss, of ``--distill_by loss``."""
    distill = config.distill
    aggregate = LOSS_AGG_MODES.find(config.loss.loss_agg_mode).fn
    if distill.distill_topk is None:
        loss = WholeLoss(teacher, divergence_of(distill.distill_beta), aggregate)
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
        divergence, teacher_log_probs = divergence_of_models(
            actor, self.teacher, scores, experience, self.divergence
        )
        loss = self.aggregate(divergence, mask, normalizer)
        gap = scores.log_probs.detach() - teacher_log_probs
        return loss, {
            "teacher_kl": token_mean(gap, mask, normalizer),
            "teacher_log_prob": token_mean(teacher_log_probs, mask, normalizer),
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
        is_real = scores.real
        zeros = torch.zeros_like(scores.log_probs)  # (B, A)
        divergence = zeros
        mass = zeros
        if TOP in experience.extra:  # else a placeholder, of which no token counts
            top_log_probs = experience.extra[TOP]  # (B, A, K)
            top_ids = experience.extra[TOP_IDS].long()  # (B, A, K)
            log_probs = log_probs_at(scores.logits, top_ids[is_real], actor.temperature)  # (N, K)
            token_divergence = top_divergence(
                log_probs, top_log_probs[is_real], self.beta, self.tail
            )  # (N,)
            divergence = zeros.masked_scatter(is_real, token_divergence)
            mass = top_log_probs.exp().sum(-1).masked_fill(~is_real, 0.0)
        loss = self.aggregate(divergence, mask, normalizer)
        metrics = {
            "distill_loss": loss.detach(),
            "teacher_top_mass": token_mean(mass, mask, normalizer),
        }
        return loss, metrics


# -- a teacher on vLLM servers: log probs of the student's samples by their ``prompt_logprobs`` -----------------------

_REQUESTS_OF_RANK = 64  # most of them in flight
_REQUESTS_OF_SERVER = 256  # most in flight at a server
_SECONDS = 600.0  # longest wait for one
_NO_LOG_PROB = -9999.0  # what vLLM sends in place of -inf
_PROBE = "Let x = 3.5 and ünïcode: f(x) = [x, {'a': 1}]; 日本\n\tEnd."


class TeacherServers:
    """Any vLLM servers with the completions API; every rank asks them itself, and what ends a call ends it on all.

    Called as a frozen :class:`~lightppo.models.actor.Actor` is. A request that one server fails goes to the next.

    Raises:
        ConfigError: a server cannot be asked, or gives a text other ids than the student's tokenizer; on every rank.
    """

    def __init__(self, config: PPOConfig, tokenizer: Any, ranks: Ranks) -> None:
        distill = config.distill
        self.ranks = ranks
        self.top = distill.distill_topk or 0  # most likely tokens that are asked for, too
        key = read_token(env=distill.teacher_api_key_env, option="--teacher_api_key_env")
        options = {
            "timeout": _SECONDS,
            "connect_timeout": 10.0,
            "retries": 2,
            "retry_timeouts": False,
        }
        self.servers = [
            HTTPClient(url.rstrip("/"), "teacher", token=key, **options)
            for url in distill.teacher_url
        ]
        problem = self._problem(tokenizer) if ranks.get_rank() == 0 else None
        if problem := ranks.broadcast_object(problem):
            raise ConfigError(f"--teacher_url: {problem}")

    def _problem(self, tokenizer: Any) -> str | None:
        """Return why the servers cannot judge what this tokenizer's student says; ``None``: they can."""
        ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        for server in self.servers:
            try:
                body = {"prompt": _PROBE, "add_special_tokens": False}
                server_ids = server.post("/tokenize", body, read=lambda x: list(x["tokens"]))
                if server_ids != ids:
                    return (
                        f"{server.name} reads {_PROBE[:9]!r}… as {server_ids[:6]}…, the student as {ids[:6]}…: serve a "
                        "model with the vocabulary of --pretrain, such as its family"
                    )
                self._ask(server, ids)
            except RequestError as error:
                return f"{error}; serve the teacher by `lightppo serve-vllm` or `vllm serve`"
        return None

    def eval(self) -> None:
        """Do nothing: servers do not train."""

    def score_actions(
        self, sequences: Tensor, num_actions: int, attention_mask: Tensor
    ) -> ActionScores:
        """Return log probs (B, A) of the last tokens of each row. Collective."""
        numbers, is_real = self._numbers(sequences, num_actions, attention_mask)
        return ActionScores(numbers[..., 0], is_real)

    def score_top(
        self, sequences: Tensor, num_actions: int, attention_mask: Tensor, k: int
    ) -> tuple[ActionScores, Tensor, Tensor]:
        """Return what :func:`lightppo.trainer.distillation.score_top` does; k is ``--distill_topk``. Collective."""
        numbers, is_real = self._numbers(sequences, num_actions, attention_mask)
        log_probs, top_log_probs, ids = numbers.split([1, k, k], dim=-1)
        return ActionScores(log_probs[..., 0], is_real), top_log_probs, ids

    def _numbers(
        self, sequences: Tensor, num_actions: int, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the numbers of :meth:`_ask` of each action (B, A, n), and which are real. Collective."""
        is_real = real_actions(attention_mask, num_actions)  # (B, A)
        rows = [
            row_ids[row_mask].tolist()
            for row_ids, row_mask in zip(sequences.cpu(), attention_mask.bool().cpu())
        ]
        numbers = torch.zeros(*is_real.shape, 1 + 2 * self.top)
        failure = None
        answers: list[list[list[float]]] = [[] for _ in rows]
        try:
            rank_share = _REQUESTS_OF_SERVER * len(self.servers) // self.ranks.world_size
            count = max(1, min(_REQUESTS_OF_RANK, rank_share, len(rows)))
            rank = self.ranks.get_rank()
            requests = [
                in_daemon_thread(self._score, rank + k, rows[k::count]) for k in range(count)
            ]
            for k, request in enumerate(requests):
                answers[k::count] = request.result()
            for row, action_mask, scores in zip(numbers, is_real.cpu(), answers):
                row[action_mask] = torch.tensor(scores)[-int(action_mask.sum()) :]
        except Exception as error:
            failure = error
        failures = self.ranks.all_gather_object(
            None if failure is None else f"{type(failure).__name__}: {failure}"
        )
        for rank, problem in enumerate(failures):
            if problem is not None:
                for server in self.servers:
                    server.close()  # other rows are not tried again
                raise RolloutError(f"--teacher_url: rank {rank}: {problem}") from failure
        return numbers.to(sequences.device), is_real

    def _score(self, server_number: int, rows: list[list[int]]) -> list[list[list[float]]]:
        """Score one row after the other, by the server whose turn it is, or by the next that can."""
        scores: list[list[list[float]]] = []
        first = server_number % len(self.servers)
        servers = self.servers[first:] + self.servers[:first]
        for ids in rows:
            for server in servers:
                try:
                    scores.append(self._ask(server, ids))
                    break
                except RequestError as error:
                    if server is servers[-1]:
                        raise
                    logger.warning("%s; the next server is asked", error)
        return scores

    def _ask(self, server: HTTPClient, ids: list[int]) -> list[list[float]]:
        """Return of each token but the first its log prob (NaN: none), the most likely ones' log probs, and their ids."""

        def of_place(answer: dict[str, Any], token: int) -> list[float]:
            log_probs = {int(i): float(entry["logprob"]) for i, entry in answer.items()}
            top_ids = sorted(log_probs, key=log_probs.__getitem__, reverse=True)[: self.top]
            if len(top_ids) < self.top:
                raise ValueError(
                    f"{len(top_ids)} log probs of a token, not --distill_topk {self.top}"
                )
            numbers = [log_probs[i] for i in (token, *top_ids)]
            numbers = [math.nan if number == _NO_LOG_PROB else number for number in numbers]
            return [*numbers, *map(float, top_ids)]

        def read(answer: dict[str, Any]) -> list[list[float]]:
            (choice,) = answer["choices"]
            _, *positions = choice["prompt_logprobs"]
            return [
                of_place(position, token)
                for position, token in zip(positions, ids[1:], strict=True)
            ]

        body = {
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self.top,
        }
        return server.post("/v1/completions", body, read=read)
