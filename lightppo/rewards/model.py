"""Rewards from a model that lives in the training processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightppo.config.rules import MicroBatchSpec
from lightppo.data.chat_templates import ended
from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.models.batches import micro_batches, to_device
from lightppo.models.critic import RowForm
from lightppo.ranks import Ranks, heartbeat, level
from lightppo.rewards.reward_source import RewardOutput

# model(sequences (B, S), attention_mask (B, S)) -> (B,), for right-padded rows
ScoreModel = Callable[[Tensor, Tensor], Tensor]
Rows = list[list[int]]


@dataclass(eq=False)
class RewardModelSource:
    """Scores prompt + response with a reward model that has the actor's tokenizer."""

    needs_all_ranks: ClassVar[bool] = True

    model: ScoreModel
    _: KW_ONLY
    pad_token_id: int
    micro_batch: MicroBatchSpec
    ranks: Ranks
    name: str = "reward_model"

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples. Collective: a rank without samples takes part too."""
        rows = rows_of_ids(rollouts, form_of(self.model))
        scores = score_rows(
            self.model,
            rows,
            pad_token_id=self.pad_token_id,
            micro_batch=self.micro_batch,
            ranks=self.ranks,
            device=self.ranks.device,
            whose=self.name,
        )
        return RewardOutput(scores.tolist())


def form_of(model: ScoreModel) -> RowForm | None:
    """How rows must be written for a model; None: it is no :class:`RewardModel`, or its config does not say it."""
    return getattr(model, "row_form", None)


def rows_of_ids(rollouts: list[Rollout], form: RowForm | None) -> Rows:
    """The actor's ids; a finished answer ends as the model's rows did in its training, at the turn's end or behind it."""
    rows = [rollout.prompt.token_ids + rollout.response_ids for rollout in rollouts]
    if form is None:
        return rows
    return [
        row if rollout.truncated else ended(row, form.end_id)
        for rollout, row in zip(rollouts, rows)
    ]


@torch.no_grad()
def score_rows(
    model: ScoreModel,
    rows: Rows,
    *,
    pad_token_id: int,
    micro_batch: MicroBatchSpec,
    ranks: Ranks,
    device: torch.device | str,
    whose: str,
) -> Tensor:
    """Scores of rows of ids, (n,) float32 on the CPU; the longest rows go first, for little padding. Collective.

    Every rank makes the same number of passes: under ZeRO-3 each must join every pass.
    """
    if isinstance(model, nn.Module):
        model.eval()
    parts = micro_batches([(len(row), 0) for row in rows], micro_batch)
    scores = torch.empty(len(rows))
    for places in level(parts, ranks, list):
        # a rank without rows scores padding
        batch = [torch.tensor(rows[i]) for i in places] or [torch.tensor([pad_token_id])]
        sequences = pad_sequence(batch, batch_first=True, padding_value=pad_token_id)  # (B, S)
        attention_mask = pad_sequence([torch.ones_like(row) for row in batch], batch_first=True)
        of_batch = model(to_device(sequences, device), to_device(attention_mask, device))
        of_batch = checked_scores(of_batch, len(batch), whose).float().cpu()
        heartbeat.beat()
        if places:
            scores[places] = of_batch
    return scores


def checked_scores(scores: Any, rows: int, whose: str) -> Tensor:
    """The scores (rows,), or a :class:`RewardError` for another shape or type."""
    if isinstance(scores, Tensor) and scores.shape == (rows,):
        return scores
    got = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
    raise RewardError(f"{whose} must return a tensor of shape ({rows},), got {got}")
