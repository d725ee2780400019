"""Rewards from several models, or from models with tokenizers and limits of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightppo.config.rules import MicroBatchSpec, micro_batch_spec
from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.ranks import Alone, Ranks
from lightppo.rewards.model import Rows, ScoreModel, checked_scores, form_of, score_rows
from lightppo.rewards.registry import RewardRequest
from lightppo.rewards.reward_inputs import RewardInputs, SameIds, reward_inputs
from lightppo.rewards.reward_source import RewardOutput, RewardSource, describe_sample
from lightppo.user_code import load_python_function

COMBINE_NAME = "reward_fn"  # that a file is searched for

Truncation = Literal["error", "left"]


@dataclass(eq=False)
class RewardModelSource:
    """Scores prompt + response with one or several reward models, longest rows first (for little padding).

    Metric ``input_truncated``: 1 for a sample that was cut for any model; only with ``reward_max_length``.
    """

    needs_all_ranks: ClassVar[bool] = True

    # model(sequences (B, S), attention_mask (B, S)) -> (B,), for right-padded rows
    models: Sequence[ScoreModel]
    # reward_fn([scores (B,), …]) -> (B,): one float32 CPU tensor per model, B = all samples of this rank. Needed with
    # several models; each model's own score is then metric <name>_<i>.
    reward_fn: Callable[[list[Tensor]], Tensor] | None = None
    _: KW_ONLY
    device: torch.device | str = "cpu"
    pad_token_id: int | None = None  # fills rows with the actor's ids; masked out
    micro_batch_size: int | MicroBatchSpec = 8  # rows per forward, or a budget of tokens
    # With ZeRO-3 every rank must join every forward: a rank with fewer batches adds empty ones.
    ranks: Ranks | None = None
    # One for all models, or one for each. None: models read the actor's ids.
    inputs: Sequence[RewardInputs] | None = None
    reward_max_length: int | None = None  # most tokens per row
    reward_truncation: Truncation = "error"  # or cut a longer row on the left
    name: str = "reward_model"

    def __post_init__(self) -> None:
        count, longest, size = len(self.models), self.reward_max_length, self.micro_batch_size
        if count == 0 or (count > 1 and self.reward_fn is None):
            raise ValueError(
                f"{count} reward models: give one, or several with --reward_fn to combine them"
            )
        if longest is not None and longest < 2:
            raise ValueError(f"--reward_max_length must be at least 2, got {longest}")
        if self.reward_truncation not in get_args(Truncation):
            raise ValueError(
                f"--reward_truncation must be error or left, got {self.reward_truncation!r}"
            )
        self._micro_batch = MicroBatchSpec(size) if isinstance(size, int) else size
        if self._micro_batch.size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {self._micro_batch.size}")
        if self.inputs is None:
            if self.pad_token_id is None:
                raise ValueError("RewardModelSource needs pad_token_id or inputs")
            self.inputs = [
                SameIds(self.pad_token_id, form=form) for form in map(form_of, self.models)
            ]
        if len(self.inputs) not in (1, count):
            raise ValueError(
                f"{len(self.inputs)} inputs for {count} reward models: give one for all, or one for each"
            )
        self.inputs = list(self.inputs) * (count if len(self.inputs) == 1 else 1)
        self.ranks = self.ranks or Alone(self.device)

    @torch.no_grad()
    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Scores the samples. Collective: a rank without samples takes part too."""
        count = len(rollouts)
        # models may share their inputs
        rows = {id(reads): self._rows(reads, rollouts) for reads in self.inputs}
        scores = [
            score_rows(
                model,
                rows[id(reads)][0],
                pad_token_id=reads.pad_token_id,
                micro_batch=self._micro_batch,
                ranks=self.ranks,
                device=self.device,
                whose=f"{self.name}: model {i}",
            )  # (n,)
            for i, (model, reads) in enumerate(zip(self.models, self.inputs))
        ]
        metrics: dict[str, list[float | None]] = {}
        if self.reward_max_length is not None:
            metrics["input_truncated"] = [
                float(any(cut)) for cut in zip(*(cut for _, cut in rows.values()))
            ]
        if self.reward_fn is None or count == 0:
            return RewardOutput(scores[0].tolist(), metrics)
        metrics |= {f"{self.name}_{i}": values.tolist() for i, values in enumerate(scores)}
        combined = checked_scores(self.reward_fn(scores), count, f"{self.name}: --reward_fn")
        return RewardOutput(combined.float().tolist(), metrics)

    def _rows(self, reads: RewardInputs, rollouts: list[Rollout]) -> tuple[Rows, list[bool]]:
        """A model's rows, cut where they are too long, and which were cut; begin-of-text and the scored end stay."""
        rows = list(reads.encode(rollouts)) if rollouts else []
        longest = self.reward_max_length
        cut = [longest is not None and len(row) > longest for row in rows]
        for i, row in enumerate(rows):
            if not row:
                raise RewardError(f"{self.name}: {describe_sample(rollouts, i)} has no token")
            if cut[i] and self.reward_truncation == "error":
                raise RewardError(
                    f"{self.name}: {describe_sample(rollouts, i)} has {len(row)} tokens for the reward model, more "
                    f"than --reward_max_length {longest}: raise it, or set --reward_truncation left"
                )
            if cut[i]:
                kept = row[:1] if row[0] == reads.bos_token_id else []
                rows[i] = kept + row[len(row) - longest + len(kept) :]
        return rows, cut


def source_of_models(
    models: Sequence[Any], combine: Any, options: Mapping[str, Any]
) -> RewardSource:
    """The source of models, and of what combines their scores: a function, a file with one, or None."""
    if isinstance(combine, str):
        combine = load_python_function(combine, COMBINE_NAME, option="--reward_fn")
    if combine is not None and not callable(combine):
        raise ValueError(
            f"--reward_fn must combine the scores of --reward_pretrain, got {combine!r}"
        )
    return RewardModelSource(models, combine, **options)


def model_reward(request: RewardRequest) -> RewardSource:
    """``--reward_pretrain``."""
    reward = request.config.reward
    options = {
        "device": request.ranks.device,
        "ranks": request.ranks,
        "micro_batch_size": micro_batch_spec(request.config, "reward"),
        "reward_max_length": reward.reward_max_length,
        "reward_truncation": reward.reward_truncation,
        "inputs": reward_inputs(
            request.config, request.tokenizer, [*map(form_of, request.reward_models)]
        ),
    }
    combine = None if "function" in request.names else reward.reward_fn
    return source_of_models(request.reward_models, combine, options)
