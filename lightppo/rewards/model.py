"""Rewards from models that live in the training processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightppo.config.micro_batches import MicroBatchSpec
from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.models.packing import micro_batches
from lightppo.rewards.retemplate import RewardInputs, SameIds, Truncation, check_input_options, fit_lengths
from lightppo.rewards.source import RewardOutput

ScoreModel = Callable[[Tensor, Tensor], Tensor]


def _same(count: int) -> int:
    return count


class RewardModelSource:
    """Scores prompt + response with one or several reward models.

    Rows go through a model longest first, so that those of one forward are of like lengths. Metric
    ``input_truncated``: 1 for a sample that was cut for one of the models; only with ``reward_max_length``.

    Args:
        models: callables ``model(sequences (B, S), attention_mask (B, S)) -> (B,)``; modules are put in evaluation
            mode. Rows are right-padded.
        reward_fn: ``reward_fn([scores (B,), …]) -> (B,)``, one tensor per model, float32 on the CPU, B = all samples
            of this rank. Needed with several models. Each model's own score is then metric ``<name>_<i>``.
        device: where the ids go.
        same_count: maximum of a number over all ranks. ZeRO-3 shards need all ranks in every forward, so a rank
            with fewer batches adds empty ones.
        micro_batch_size: rows per forward, or a budget of tokens.
        pad_token_id: fills rows that have the actor's ids; masked out.
        inputs: what each model reads, see :mod:`lightppo.rewards.retemplate`; one for all models, or one each.
            ``None``: prompt and response ids as they are, as the models share the actor's tokenizer.
        reward_max_length: most tokens of a row; ``None``: no limit.
        reward_truncation: a longer row is an ``"error"``, or cut on the ``"left"``.
        name: what errors and metrics call it.

    Attributes:
        needs_all_ranks: it acts on all ranks together, in the order of the program.

    Raises:
        ValueError: no model, several without ``reward_fn``, another number of inputs, or a number out of range.
    """

    needs_all_ranks = True

    def __init__(
        self,
        models: Sequence[ScoreModel],
        reward_fn: Callable[[list[Tensor]], Tensor] | None = None,
        *,
        device: torch.device | str,
        pad_token_id: int | None = None,
        micro_batch_size: int | MicroBatchSpec,
        same_count: Callable[[int], int] = _same,
        inputs: Sequence[RewardInputs] | None = None,
        reward_max_length: int | None = None,
        reward_truncation: Truncation = "error",
        name: str = "reward_model",
    ) -> None:
        if not models:
            raise ValueError("RewardModelSource needs at least one model")
        if len(models) > 1 and reward_fn is None:
            raise ValueError(f"{len(models)} reward models need --reward_fn, which makes one score of theirs")
        if isinstance(micro_batch_size, int):
            micro_batch_size = MicroBatchSpec(micro_batch_size)
        if micro_batch_size.size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size.size}")
        check_input_options(reward_max_length, reward_truncation)
        if inputs is None:
            if pad_token_id is None:
                raise ValueError("RewardModelSource needs pad_token_id or inputs")
            inputs = [SameIds(pad_token_id)]
        if len(inputs) not in (1, len(models)):
            raise ValueError(f"{len(inputs)} inputs for {len(models)} reward models: give one for all, or one for each")
        self.models = list(models)
        self.inputs = list(inputs) * (len(models) if len(inputs) == 1 else 1)
        self.reward_fn = reward_fn
        self.device = torch.device(device)
        self.micro_batch = micro_batch_size
        self.same_count = same_count
        self.reward_max_length = reward_max_length
        self.reward_truncation: Truncation = reward_truncation
        self.name = name

    @torch.no_grad()
    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples. To be called on all ranks together, also by one that has no sample.

        Raises:
            RewardError: a model or ``reward_fn`` returned another shape, or a sample has no token or too many.
        """
        n = len(rollouts)
        rows_of, truncated = self._rows(rollouts)
        scores = []
        for i, model in enumerate(self.models):
            if isinstance(model, nn.Module):
                model.eval()
            scores.append(self._score_rows(i, rows_of[i]))  # (n,)
        metrics: dict[str, list[float | None]] = {}
        if self.reward_max_length is not None:
            metrics["input_truncated"] = [float(cut) for cut in truncated]
        if self.reward_fn is None or n == 0:
            return RewardOutput(scores[0].tolist(), metrics)
        metrics |= {f"{self.name}_{i}": values.tolist() for i, values in enumerate(scores)}
        combined = self.reward_fn(scores)
        if not isinstance(combined, Tensor) or combined.shape != (n,):
            raise RewardError(f"{self.name}: --reward_fn must return a tensor of shape ({n},), got {_what(combined)}")
        return RewardOutput(combined.float().tolist(), metrics)

    def _rows(self, rollouts: list[Rollout]) -> tuple[list[list[list[int]]], list[bool]]:
        """Each model's rows, and which samples were cut for one of them."""
        encoded: dict[int, list[list[int]]] = {}  # models that read the same share the work
        truncated = [False] * len(rollouts)
        for reads in self.inputs:
            if id(reads) in encoded:
                continue
            encoded[id(reads)], cut = fit_lengths(
                reads.encode(rollouts) if rollouts else [],
                rollouts,
                reward_max_length=self.reward_max_length,
                reward_truncation=self.reward_truncation,
                bos_token_id=reads.bos_token_id,
                source_name=self.name,
            )
            truncated = [a or b for a, b in zip(truncated, cut)]
        return [encoded[id(reads)] for reads in self.inputs], truncated

    def _score_rows(self, model_index: int, rows: list[list[int]]) -> Tensor:
        """(n,) scores of rows, in their order, by as many forwards as on any rank."""
        parts = micro_batches([(len(row), 0) for row in rows], self.micro_batch, packed=False)
        parts += [[]] * (self.same_count(len(parts)) - len(parts))
        filler = [[self.inputs[model_index].pad_token_id]]
        scores = torch.empty(len(rows))
        for places in parts:
            batch = self._forward(model_index, [rows[i] for i in places] or filler)
            if places:
                scores[places] = batch
        return scores

    def _forward(self, model_index: int, batch: list[list[int]]) -> Tensor:
        width = max(len(row) for row in batch)
        pad_token_id = self.inputs[model_index].pad_token_id
        sequences = torch.full((len(batch), width), pad_token_id, dtype=torch.long)  # (B, S)
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
