"""A teacher on vLLM servers: log probs of the student's samples by their ``prompt_logprobs``."""

from __future__ import annotations

import logging
from typing import Any

import torch
from pebble.concurrent import thread
from torch import Tensor

from lightppo.config import PPOConfig
from lightppo.errors import ConfigError, RequestError, RolloutError
from lightppo.http_client import HTTPClient, read_token
from lightppo.models.actor import ActionScores
from lightppo.models.batches import real_actions
from lightppo.ranks import Ranks

logger = logging.getLogger(__name__)

_OF_RANK, _OF_SERVER = 64, 256  # most requests in flight, of a rank and at a server
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
                theirs = server.post("/tokenize", body, read=lambda answer: list(answer["tokens"]))
                if theirs != ids:
                    both = f"reads {_PROBE[:9]!r}… as {theirs[:6]}…, the student as {ids[:6]}…"
                    return f"{server.name} {both}: serve a model with the vocabulary of --pretrain, such as its family"
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
        numbers, real = self._numbers(sequences, num_actions, attention_mask)
        return ActionScores(numbers[..., 0], real)

    def score_top(
        self, sequences: Tensor, num_actions: int, attention_mask: Tensor, k: int
    ) -> tuple[ActionScores, Tensor, Tensor]:
        """Return what :func:`lightppo.trainer.distillation.score_top` does; k is ``--distill_topk``. Collective."""
        numbers, real = self._numbers(sequences, num_actions, attention_mask)
        log_probs, top, ids = numbers.split([1, k, k], dim=-1)
        return ActionScores(log_probs[..., 0], real), top, ids

    def _numbers(
        self, sequences: Tensor, num_actions: int, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the numbers of :meth:`_ask` of each action (B, A, n), and which are real. Collective."""
        real = real_actions(attention_mask, num_actions)  # (B, A)
        rows = [
            ids[mask].tolist() for ids, mask in zip(sequences.cpu(), attention_mask.bool().cpu())
        ]
        numbers = torch.zeros(*real.shape, 1 + 2 * self.top)
        failure = None
        answers: list[list[list[float]]] = [[] for _ in rows]
        try:
            share = _OF_SERVER * len(self.servers) // self.ranks.world_size
            calls = max(1, min(_OF_RANK, share, len(rows)))
            rank = self.ranks.get_rank()
            begun = [thread(self._score)(rank + k, rows[k::calls]) for k in range(calls)]
            for k, scored in enumerate(begun):
                answers[k::calls] = scored.result()
            for row, kept, answer in zip(numbers, real.cpu(), answers):
                row[kept] = torch.tensor(answer)[-int(kept.sum()) :]
        except Exception as error:
            failure = error
        failures = self.ranks.all_gather_object(
            None if failure is None else f"{type(failure).__name__}: {failure}"
        )
        for rank, text in enumerate(failures):
            if text is not None:
                for server in self.servers:
                    server.close()  # other rows are not tried again
                raise RolloutError(f"--teacher_url: rank {rank}: {text}") from failure
        return numbers.to(sequences.device), real

    def _score(self, first: int, rows: list[list[int]]) -> list[list[list[float]]]:
        """Score one row after the other, by the server whose turn it is, or by the next that can."""
        answers: list[list[list[float]]] = []
        servers = (
            self.servers[first % len(self.servers) :] + self.servers[: first % len(self.servers)]
        )
        for ids in rows:
            for server in servers:
                try:
                    answers.append(self._ask(server, ids))
                    break
                except RequestError as error:
                    if server is servers[-1]:
                        raise
                    logger.warning("%s; the next server is asked", error)
        return answers

    def _ask(self, server: HTTPClient, ids: list[int]) -> list[list[float]]:
        """Return of each token but the first its log prob (NaN: none), the most likely ones' log probs, and their ids."""

        def of_place(answer: dict[str, Any], token: int) -> list[float]:
            log_probs = {int(i): float(entry["logprob"]) for i, entry in answer.items()}
            best = sorted(log_probs, key=log_probs.__getitem__, reverse=True)[: self.top]
            if len(best) < self.top:
                raise ValueError(f"{len(best)} log probs of a token, not --distill_topk {self.top}")
            numbers = (log_probs[i] for i in (token, *best))
            return [float("nan") if x == _NO_LOG_PROB else x for x in numbers] + [*map(float, best)]

        def read(answer: dict[str, Any]) -> list[list[float]]:
            (choice,) = answer["choices"]
            _, *places = choice["prompt_logprobs"]
            return [of_place(place, i) for place, i in zip(places, ids[1:], strict=True)]

        body = {
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self.top,
        }
        return server.post("/v1/completions", body, read=read)
