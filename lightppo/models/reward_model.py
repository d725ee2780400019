"""A reward model: one score per finished sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.critic import SequenceRegressor


class RewardModel(SequenceRegressor):
    """Scores at the last real token of each sequence.

    Args:
        pretrain_or_model: folder, hub id, or a built one-output sequence classifier. A checkpoint without a head is
            an error unless ``init_value_head=True`` (a reward model that is about to be trained).
        normalize_reward: scores are (x - mean) / std, with the mean and std of the config.
        bf16, use_flash_attention_2, ds_config: as in :class:`lightppo.models.actor.Actor`.
        load_options: further arguments of :func:`lightppo.models.loading.load_sequence_classifier`.

    Raises:
        ModelLoadError: not a reward model; normalize_reward without mean and std in the config.
    """

    kind = "reward"

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        *,
        normalize_reward: bool = False,
        bf16: bool = False,
        use_flash_attention_2: bool = False,
        ds_config: dict[str, Any] | None = None,
        **load_options: Any,
    ) -> None:
        super().__init__(
            pretrain_or_model,
            bf16=bf16,
            use_flash_attention_2=use_flash_attention_2,
            ds_config=ds_config,
            **load_options,
        )
        if normalize_reward and not self._use_config_statistics():
            raise ModelLoadError(
                f"--normalize_reward: the config of {self.hf_model.config.name_or_path or 'the reward model'} has no "
                "mean and std. Add them to its config.json, or leave --normalize_reward out"
            )

    def forward(self, sequences: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Score sequences padded on either side.

        Args:
            sequences: (B, S) token ids.
            attention_mask: (B, S), 1 = real token; None: no padding.

        Returns:
            (B,) float32.

        Raises:
            ValueError: a row without real tokens.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences)
        empty = (attention_mask.sum(-1) == 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"rows {empty} have no real token to score (attention_mask is 0)")
        length = sequences.shape[1]
        last = length - 1 - attention_mask.long().flip(-1).argmax(-1)  # (B,)
        hidden = self._hidden(sequences, attention_mask, None).last_hidden_state  # (B, S, H)
        return self._score(hidden[torch.arange(len(last), device=last.device), last])
