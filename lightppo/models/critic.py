"""Models with a one-output head: critics (a value per position) and reward models (a score per sequence)."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from lightppo.errors import ModelLoadError
from lightppo.models.loading import load_sequence_classifier, value_head
from lightppo.models.packing import (
    action_predictors,
    check_num_actions,
    distinct_places,
    position_ids_from_lengths,
    read,
    scatter,
)
from lightppo.models.wrapper import PretrainedWrapper, model_inputs


class SequenceRegressor(PretrainedWrapper):
    """A one-output sequence classifier, called position by position."""

    kind: Literal["critic", "reward"]  # which checkpoints a subclass takes

    def __init__(self, pretrain_or_model: str | PreTrainedModel, **options: Any) -> None:
        super().__init__(pretrain_or_model, partial(load_sequence_classifier, kind=self.kind), **options)
        _, head = value_head(self.model)
        if head.out_features != 1:
            raise ModelLoadError(f"a {self.kind} needs one output, the model has {head.out_features}")
        self.mean, self.std = 0.0, 1.0

    def _use_config_statistics(self) -> bool:
        """Take ``mean`` and ``std`` from the config; False if it has none."""
        mean, std = getattr(self.hf_model.config, "mean", None), getattr(self.hf_model.config, "std", None)
        if mean is None or std is None:
            return False
        if not std > 0:
            raise ModelLoadError(f"--normalize_reward: the config has std {std}; it must be above 0")
        self.mean, self.std = float(mean), float(std)
        return True

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> ModelOutput:
        base = self.hf_model.base_model
        with self._offloading():
            return base(**model_inputs(base, input_ids, attention_mask, position_ids))

    def _score(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (...), float32, normalised."""
        _, head = value_head(self.hf_model)
        return (head(hidden).squeeze(-1).float() - self.mean) / self.std


class Critic(SequenceRegressor):
    """Values of the positions from which actions are predicted; (x - mean) / std with ``normalize_reward``.

    Built from a causal LM (with a new head), a reward model or another critic, and saved as a plain
    ``AutoModelForSequenceClassification`` checkpoint. ``options`` as for :class:`lightppo.models.actor.Actor` and
    :func:`lightppo.models.loading.load_sequence_classifier`.
    """

    kind = "critic"

    def __init__(
        self, pretrain_or_model: str | PreTrainedModel, *, normalize_reward: bool = False, **options: Any
    ) -> None:
        super().__init__(pretrain_or_model, **options)
        if normalize_reward:
            self._use_config_statistics()

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | list[int] | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: list[int] | None = None,
        include_last: bool = False,
    ) -> Tensor | tuple[Tensor, ModelOutput]:
        """Values (B, A) float32 before each of the last A actions: column t is position S - A - 1 + t, 0 at padding.

        Arguments as in :meth:`Actor.forward`. Without ``num_actions``: all positions, (B, S). ``include_last`` adds the
        value after the last position, (B, A + 1), to bootstrap an unfinished response.
        """
        if packed_seq_lens is not None:
            position_ids = position_ids_from_lengths(packed_seq_lens, sequences)
            self._probe_packing(sequences.device)
            output = self._hidden(sequences, None, position_ids)
            hidden = output.last_hidden_state  # (1, T, H)
            if num_actions is not None:
                hidden = hidden[:, action_predictors(packed_seq_lens, num_actions, sequences.device, include_last)]
            return (self._score(hidden), output) if return_output else self._score(hidden)
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences)
        length = sequences.shape[1]
        columns = slice(None)
        if num_actions is not None:
            check_num_actions(num_actions, length)
            columns = slice(length - num_actions - 1, length if include_last else length - 1)
        mask = attention_mask.bool()[:, columns]  # (B, A)
        if self.packing_samples:
            self._probe_packing(sequences.device)
            row, segments = self._pack(sequences, attention_mask, num_actions)
            places, reads = distinct_places(row.slots[:, columns][mask])  # (U,), (K,)
            with nullcontext() if return_output else self._reading(places, row.input_ids):
                output = self._hidden(row.input_ids, segments, row.position_ids)
            scores = self._score(output.last_hidden_state[0, places])  # (U,)
            values = scatter(read(scores, reads), mask)
        else:
            output = self._hidden(sequences, attention_mask, None)
            values = self._score(output.last_hidden_state[:, columns]).masked_fill(~mask, 0)
        return (values, output) if return_output else values

    def _run_rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self._hidden(ids, None, positions).last_hidden_state


class RewardModel(SequenceRegressor):
    """Scores at the last real token of each sequence; (x - mean) / std of the config with ``normalize_reward``.

    A checkpoint without a head is an error unless ``init_value_head=True`` (to train a new reward model).
    """

    kind = "reward"

    def __init__(
        self, pretrain_or_model: str | PreTrainedModel, *, normalize_reward: bool = False, **options: Any
    ) -> None:
        super().__init__(pretrain_or_model, **options)
        if normalize_reward and not self._use_config_statistics():
            raise ModelLoadError(
                f"--normalize_reward: the config of {self.hf_model.config.name_or_path or 'the reward model'} has no "
                "mean and std. Add them to its config.json, or leave --normalize_reward out"
            )

    def forward(self, sequences: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Scores (B,) float32 of sequences (B, S), padded on either side; mask None: no padding."""
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences)
        empty = (attention_mask.sum(-1) == 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"rows {empty} have no real token to score (attention_mask is 0)")
        length = sequences.shape[1]
        last = length - 1 - attention_mask.long().flip(-1).argmax(-1)  # (B,)
        hidden = self._hidden(sequences, attention_mask, None).last_hidden_state  # (B, S, H)
        return self._score(hidden[torch.arange(len(last), device=last.device), last])
