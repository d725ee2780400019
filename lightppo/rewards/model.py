"""Rewards from models that live in the training processes, on prompt and response ids as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightppo.data.records import Rollout
from lightppo.rewards.source import RewardError, RewardOutput, describe_sample

ScoreModel = Callable[[Tensor, Tensor], Tensor]


def _same(count: int) -> int:
    return count


class RewardModelSource:
    """Scores prompt + response with one or several reward models that share the actor's tokenizer.

    Args:
        models: callables ``model(sequences (B, S), attention_mask (B, S)) -> (B,)``; modules are put in evaluation
            mode. Rows are right-padded.
        reward_fn: ``reward_fn([scores (B,), …]) -> (B,)``, one tensor per model, float32 on the CPU, B = all samples
            of this rank. Needed with several models. Each model's own score is then metric ``<name>_<i>``.
        device: where the ids go.
        same_count: maximum of a number over all ranks. ZeRO-3 shards need all ranks in every forward, so a rank
            with fewer batches adds empty ones.
        micro_batch_size: rows per forward.
        pad_token_id: fills rows; masked out.
        name: what errors and metrics call it.

    Raises:
        ValueError: no model, several without ``reward_fn``, or a micro-batch below 1.
    """

    def __init__(
        self,
        models: Sequence[ScoreModel],
        reward_fn: Callable[[list[Tensor]], Tensor] | None = None,
        *,
        device: torch.device | str,
        pad_token_id: int,
        micro_batch_size: int,
        same_count: Callable[[int], int] = _same,
        name: str = "reward_model",
    ) -> None:
        if not models:
            raise ValueError("RewardModelSource needs at least one model")
        if len(models) > 1 and reward_fn is None:
            raise ValueError(f"{len(models)} reward models need --reward_fn, which makes one score of theirs")
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size}")
        self.models = list(models)
        self.reward_fn = reward_fn
        self.device = torch.device(device)
        self.pad_token_id = pad_token_id
        self.micro_batch_size = micro_batch_size
        self.same_count = same_count
        self.name = name

    @torch.no_grad()
    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples. To be called on all ranks together, also by one that has no sample.

        Raises:
            RewardError: a model or ``reward_fn`` returned another shape, or a sample has no token.
        """
        n, size = len(rollouts), self.micro_batch_size
        rows = [rollout.prompt.token_ids + rollout.response_ids for rollout in rollouts]
        if [] in rows:
            raise RewardError(f"{self.name}: {describe_sample(rollouts, rows.index([]))} has no token")
        batches = [rows[start : start + size] for start in range(0, n, size)]
        n_batches = self.same_count(len(batches))
        filler = [[self.pad_token_id]]
        batches += [filler] * (n_batches - len(batches))

        scores = []
        for i, model in enumerate(self.models):
            if isinstance(model, nn.Module):
                model.eval()
            parts = [self._forward(i, batch) for batch in batches]
            scores.append(torch.cat(parts)[:n] if parts else torch.empty(0))  # (n,)
        if self.reward_fn is None or n == 0:
            return RewardOutput(scores[0].tolist())
        metrics = {f"{self.name}_{i}": values.tolist() for i, values in enumerate(scores)}
        combined = self.reward_fn(scores)
        if not isinstance(combined, Tensor) or combined.shape != (n,):
            raise RewardError(f"{self.name}: --reward_fn must return a tensor of shape ({n},), got {_what(combined)}")
        return RewardOutput(combined.float().tolist(), metrics)

    def _forward(self, model_index: int, batch: list[list[int]]) -> Tensor:
        width = max(len(row) for row in batch)
        sequences = torch.full((len(batch), width), self.pad_token_id, dtype=torch.long)  # (B, S)
        attention_mask = torch.zeros_like(sequences)  # (B, S)
        for i, row in enumerate(batch):
            sequences[i, : len(row)] = torch.tensor(row)
            attention_mask[i, : len(row)] = 1
        scores = self.models[model_index](sequences.to(self.device), attention_mask.to(self.device))
        if not isinstance(scores, Tensor) or scores.shape != (len(batch),):
            raise RewardError(f"{self.name}: model {model_index} must return a tensor of shape ({len(batch)},), "
                              f"got {_what(scores)}")  # fmt: skip
        return scores.float().cpu()


def _what(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
