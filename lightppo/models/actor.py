"""The policy: log probs of actions under a causal LM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from lightppo.algorithms.logprobs import token_log_probs
from lightppo.models.loading import load_causal_lm
from lightppo.models.packing import (
    action_predictors,
    check_num_actions,
    pack,
    position_ids_from_lengths,
    real_actions,
    scatter,
)
from lightppo.models.wrapper import PretrainedWrapper, model_inputs, takes


class Actor(PretrainedWrapper):
    """A causal LM that gives the log probs of the last A tokens of each sequence.

    Args:
        pretrain_or_model: folder, hub id, or a built model (its dropout is set to 0 in place).
        temperature: log probs are those of softmax(logits / temperature), as in sampling.
        packing_samples: drop the padding in forwards with num_actions; results are the same.
        bf16: weights in bfloat16.
        use_flash_attention_2: the seed's name for ``attn_implementation="flash_attention_2"``.
        ds_config: DeepSpeed config; stage 3 shards the weights while they load.
        valid_vocab_size: log probs are over the first so many tokens only (``valid_vocab_size(tokenizer)``), where
            the rollout engine never samples the others; None: over the whole embedding.
        load_options: further arguments of :func:`lightppo.models.loading.load_causal_lm`.

    Raises:
        ModelLoadError: see :func:`load_causal_lm`.
        PackingNotSupportedError: packing_samples with a family that cannot be packed.
    """

    # strategy.prepare puts the engine there and returns the Actor itself
    engine_attribute = "model"

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        *,
        temperature: float = 1.0,
        packing_samples: bool = False,
        bf16: bool = False,
        use_flash_attention_2: bool = False,
        ds_config: dict[str, Any] | None = None,
        valid_vocab_size: int | None = None,
        **load_options: Any,
    ) -> None:
        super().__init__(
            pretrain_or_model,
            load_causal_lm,
            bf16=bf16,
            use_flash_attention_2=use_flash_attention_2,
            ds_config=ds_config,
            packing_samples=packing_samples,
            load_options=load_options,
        )
        if not temperature > 0:
            raise ValueError(f"--temperature must be above 0 for training, got {temperature}")
        self.temperature = temperature
        self.valid_vocab_size = valid_vocab_size

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | list[int] | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: list[int] | None = None,
    ) -> Tensor | ModelOutput | tuple[Tensor, ModelOutput]:
        """Log probs of the last actions of each sequence.

        Args:
            sequences: (B, S) token ids, padded on either side; or (1, T) with packed_seq_lens.
            num_actions: A; with packed_seq_lens a list, one number per sequence. None: no log probs are computed,
                the model's output is returned with the logits of all positions (as the LM loss needs them).
            attention_mask: (B, S), 1 = real token; None: no padding.
            return_output: return the model's output too. Its logits are those of the predicting positions only,
                (B, A, V), or (1, K, V) over the real actions where the forward was packed.
            packed_seq_lens: lengths of the sequences that the caller packed into one row.

        Returns:
            (B, A) float32, 0 where the action or the token before it is padding; (1, sum of num_actions) with
            packed_seq_lens.

        Raises:
            ValueError: num_actions or packed_seq_lens that do not fit the sequences.
            PackingNotSupportedError: at the first packed forward, if the model mixes packed sequences.
        """
        if packed_seq_lens is not None:
            return self._forward_packed_by_caller(sequences, num_actions, packed_seq_lens, return_output)
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences)
        if num_actions is None:
            return self._run(sequences, attention_mask)
        length = sequences.shape[1]
        check_num_actions(num_actions, length)
        mask = real_actions(attention_mask, num_actions)  # (B, A)
        actions = sequences[:, -num_actions:]  # (B, A)
        if self.packing_samples:
            self._probe_packing(sequences.device)
            row = pack(sequences, attention_mask)
            places = row.slots[:, -num_actions - 1 : -1][mask]  # (K,)
            output = self._run(row.input_ids, None, row.position_ids, places)
            log_probs = scatter(self._log_probs(output.logits[0], actions[mask]), mask)  # (B, A)
        else:
            places = torch.arange(length - num_actions - 1, length - 1, device=sequences.device)  # (A,)
            output = self._run(sequences, attention_mask, None, places)
            log_probs = self._log_probs(output.logits, actions.masked_fill(~mask, 0)).masked_fill(~mask, 0)  # (B, A)
        return (log_probs, output) if return_output else log_probs

    def _forward_packed_by_caller(
        self, sequences: Tensor, num_actions: list[int] | None, lengths: list[int], return_output: bool
    ) -> Tensor | ModelOutput | tuple[Tensor, ModelOutput]:
        position_ids = position_ids_from_lengths(lengths, sequences)
        self._probe_packing(sequences.device)
        if num_actions is None:
            return self._run(sequences, None, position_ids)
        places = action_predictors(lengths, num_actions, sequences.device)  # (K,)
        output = self._run(sequences, None, position_ids, places)
        log_probs = self._log_probs(output.logits, sequences[:, places + 1])  # (1, K)
        return (log_probs, output) if return_output else log_probs

    def _run(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        places: Tensor | None = None,
    ) -> ModelOutput:
        """One forward; only ``places`` of the sequence dimension go through the head."""
        inputs = model_inputs(self.hf_model, input_ids, attention_mask, position_ids)
        in_model = places is not None and takes(self.hf_model, "logits_to_keep")
        if in_model:
            inputs["logits_to_keep"] = places
        output = self.model(**inputs)
        if places is not None and not in_model:
            output.logits = output.logits[:, places]
        return output

    def _log_probs(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_log_probs(logits[..., : self.valid_vocab_size], labels, temperature=self.temperature)

    def _probe_packing(self, device: torch.device) -> None:
        self._probe_packing_once(lambda ids, positions: self._run(ids, None, positions).logits, device)
