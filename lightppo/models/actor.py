"""The policy: log probs of actions under a causal LM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, stack
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from lightppo.algorithms.logprobs import linear_log_probs, log_probs_and_entropy, token_log_probs
from lightppo.models.cpu import is_plain_linear
from lightppo.models.loading import load_causal_lm
from lightppo.models.packing import (
    action_predictors,
    check_num_actions,
    distinct_places,
    position_ids_from_lengths,
    read,
    real_actions,
    scatter,
)
from lightppo.models.wrapper import PretrainedWrapper, model_inputs, takes


@dataclass(frozen=True)
class ActionScores:
    """Results of one forward for the last A tokens of each sequence; None: not asked for."""

    log_probs: Tensor  # (B, A) float32, under the temperature; 0 unless real
    real: Tensor  # (B, A) bool, the action and the token before it are not padding; K places in all
    entropy: Tensor | None = None  # (B, A) float32, in nats, under the temperature; 0 unless real
    logits: Tensor | None = None  # (K, V), valid ids, rows as log_probs[real]; model's dtype, before the temperature
    router_loss: Tensor | None = None  # scalar, the load-balancing loss over the real tokens of the batch


class Actor(PretrainedWrapper):
    """A causal LM that gives the log probs of the last A tokens of each sequence.

    Unless logits are asked for, the head itself returns log probs chunk by chunk
    (:func:`lightppo.algorithms.logprobs.linear_log_probs`), so memory does not grow with tokens × vocabulary. This
    needs a plain linear head with nothing after it. The first forward of any other model (Gemma 2's soft capping, the
    scaling of Cohere and Granite, adapters or 4 bits in the head) detects this and runs again; from then on all logits
    are made.

    Args:
        pretrain_or_model: folder, hub id, or a built model (its dropout is set to 0 in place).
        temperature: log probs come from softmax(logits / temperature), as in sampling.
        packing_samples: drop the padding in forwards with num_actions; results are the same.
        share_prompts: when packed, run equal prompts of a batch once; results are the same.
        ds_config: DeepSpeed config; stage 3 shards the weights while they load.
        valid_vocab_size: number of ids, from 0, that log probs cover and the engine samples; None: all embedding rows.
        options: ``flag`` and the fields of :class:`lightppo.models.loading.LoadOptions`.
    """

    # strategy.prepare puts the engine under this attribute and returns the Actor itself
    engine_attribute = "model"

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        *,
        temperature: float = 1.0,
        valid_vocab_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(pretrain_or_model, load_causal_lm, **options)
        if not temperature > 0:
            raise ValueError(f"--temperature must be above 0 for training, got {temperature}")
        self.temperature = temperature
        self.valid_vocab_size = valid_vocab_size
        self.head_is_last = True  # False once the model was seen to change what its head returns

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | list[int] | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: list[int] | None = None,
    ) -> Tensor | ModelOutput | tuple[Tensor, ModelOutput]:
        """Log probs (B, A) float32 of the last actions; 0 if the action or the token before it is padding.

        Args:
            sequences: (B, S) token ids, padded on either side; or (1, T) with packed_seq_lens.
            num_actions: A; with packed_seq_lens a list, one number per sequence. None: return only the model's output,
                with the logits of all positions (for the LM loss).
            attention_mask: (B, S), 1 = real token; None: no padding.
            return_output: return the model's output too. Its logits cover only the predicting positions,
                (B, A, V), or (1, K, V) over the real actions of a packed forward.
            packed_seq_lens: lengths of sequences that the caller packed into one row; log probs are (1, sum of
                num_actions).
        """
        if packed_seq_lens is not None:
            position_ids = position_ids_from_lengths(packed_seq_lens, sequences)
            self._probe_packing(sequences.device)
            if num_actions is None:
                return self._run(sequences, None, position_ids)
            batch = _packed_by_caller(sequences, position_ids, packed_seq_lens, num_actions)
        elif num_actions is None:
            return self._run(sequences, torch.ones_like(sequences) if attention_mask is None else attention_mask)
        else:
            batch = self._batch(sequences, num_actions, attention_mask)
        predicted = self._predict(batch, logits=return_output)
        log_probs = batch.per_action(predicted.log_probs)  # (B, A)
        return (log_probs, predicted.output) if return_output else log_probs

    def score_actions(
        self,
        sequences: Tensor,
        num_actions: int,
        attention_mask: Tensor | None = None,
        *,
        entropy: bool = False,
        entropy_grad: bool = False,
        logits: bool = False,
        router_loss: bool = False,
    ) -> ActionScores:
        """Log probs of the last actions, and more on request, from one forward; the same for packed and padded batches.

        ``entropy_grad``: the entropy has a gradient (an entropy bonus). ``logits``: of the real actions (exact KL).
        ``router_loss``: the load-balancing loss of a mixture of experts (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6).
        """
        if router_loss:
            self.check_router()
        batch = self._batch(sequences, num_actions, attention_mask, router_loss)
        predicted = self._predict(
            batch, logits=logits, entropy=entropy, entropy_grad=entropy_grad, router_logits=router_loss
        )
        return ActionScores(
            log_probs=batch.per_action(predicted.log_probs),  # (B, A)
            real=batch.real,
            entropy=batch.per_action(predicted.entropy) if entropy else None,  # (B, A)
            logits=batch.of_real(predicted.logits) if logits else None,
            router_loss=self._router_loss(predicted.output) if router_loss else None,
        )

    @property
    def has_router(self) -> bool:
        """Whether the model is a mixture of experts whose forward can return router logits."""
        return takes(self.hf_model, "output_router_logits")

    def check_router(self) -> None:
        """ValueError for a model without a router, which has no load-balancing loss."""
        if not self.has_router:
            raise ValueError(
                f"--aux_loss_coef: {type(self.hf_model).__name__} gives no router logits, so it has no load-balancing "
                "loss; leave --aux_loss_coef out, or train a mixture of experts such as Mixtral or Qwen3-MoE"
            )

    def _router_loss(self, output: ModelOutput) -> Tensor:
        loss = output.get("aux_loss")
        if not isinstance(loss, Tensor):  # transformers: None or 0 where no layer has a router
            raise ValueError(
                f"--aux_loss_coef: {type(self.hf_model).__name__} took output_router_logits but returned no "
                "load-balancing loss (no layer of it is a mixture of experts?); leave --aux_loss_coef out"
            )
        if torch.is_grad_enabled() and self.training and not loss.requires_grad:
            # reentrant checkpointing runs the layers without a graph, so what is caught inside them has no gradient
            raise ValueError(
                "--aux_loss_coef: the load-balancing loss has no gradient; with --gradient_checkpointing, leave "
                "--gradient_checkpointing_use_reentrant out"
            )
        return loss.float()

    def _batch(
        self, sequences: Tensor, num_actions: int, attention_mask: Tensor | None, router_loss: bool = False
    ) -> _Batch:
        """Inputs of one forward, packed or padded; only positions that predict an action go through the head."""
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences)
        length = sequences.shape[1]
        check_num_actions(num_actions, length)
        real = real_actions(attention_mask, num_actions)  # (B, A)
        actions = sequences[:, -num_actions:]  # (B, A)
        if not self.packing_samples:
            places = torch.arange(length - num_actions - 1, length - 1, device=sequences.device)  # (A,)
            return _Batch(sequences, attention_mask, None, places, actions.masked_fill(~real, 0), real, packed=False)
        self._probe_packing(sequences.device)
        # the load-balancing loss counts every token of every sample
        row, segments = self._pack(sequences, attention_mask, None if router_loss else num_actions)
        places, reads = distinct_places(row.slots[:, -num_actions - 1 : -1][real])  # (U,), (K,)
        return _Batch(row.input_ids, segments, row.position_ids, places, actions[real], real, packed=True, reads=reads)

    def _predict(
        self,
        batch: _Batch,
        *,
        logits: bool = False,
        entropy: bool = False,
        entropy_grad: bool = False,
        router_logits: bool = False,
    ) -> _Predicted:
        """One forward, through the head's log probs if that is enough and possible, else through logits."""
        if not logits:
            predicted = self._ask_head(batch, entropy, entropy_grad, router_logits)
            if predicted is not None:
                return predicted
        output = self._run(batch.input_ids, batch.attention_mask, batch.position_ids, batch.places, router_logits)
        if batch.packed:
            output.logits = read(output.logits[0], batch.reads)[None]  # (1, K, V)
        over = (output.logits[0] if batch.packed else output.logits)[..., : self.valid_vocab_size]
        if not entropy:
            return _Predicted(output, token_log_probs(over, batch.labels, self.temperature), logits=over)
        both = log_probs_and_entropy(over, batch.labels, self.temperature, entropy_grad=entropy_grad)
        return _Predicted(output, *both, logits=over)

    def _ask_head(self, batch: _Batch, entropy: bool, entropy_grad: bool, router_logits: bool) -> _Predicted | None:
        """None if this model's log probs do not come from its head alone. All ranks agree on it."""
        head = scoring_head(self.hf_model) if self.head_is_last else None
        if head is None:
            return None
        selected_in_model = takes(self.hf_model, "logits_to_keep")

        def select(hidden: Tensor) -> Tensor:
            return batch.real_hidden(hidden if selected_in_model else hidden[:, batch.places])

        places = batch.places if selected_in_model else None
        options = {"valid_vocab_size": self.valid_vocab_size, "entropy": entropy, "entropy_grad": entropy_grad}
        with scores_from_head(head, select, batch.of_real(batch.labels), self.temperature, **options) as returned:
            output = self._run(batch.input_ids, batch.attention_mask, batch.position_ids, places, router_logits)
        self.head_is_last = is_untouched(returned, output.logits)
        if not self.head_is_last:
            return None
        scores = output.logits[0]  # (K, 1 or 2), behind the hooks of the whole model
        if not entropy:
            return _Predicted(output, scores[:, 0])
        return _Predicted(output, scores[:, 0], scores[:, 1] if entropy_grad else scores[:, 1].detach())

    def _run(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        places: Tensor | None = None,
        router_logits: bool = False,
    ) -> ModelOutput:
        """One forward; only ``places`` of the sequence dimension go through the head."""
        reads_mask = router_logits or getattr(self.hf_model.config, "output_router_logits", False)
        inputs = model_inputs(self.hf_model, input_ids, attention_mask, position_ids, lengths=not reads_mask)
        in_model = places is not None and takes(self.hf_model, "logits_to_keep")
        if in_model:
            inputs["logits_to_keep"] = places
        if router_logits:
            inputs["output_router_logits"] = True
        partly = position_ids is not None and places is not None and not reads_mask
        with self._offloading(), self._reading(places, input_ids) if partly else nullcontext():
            output = self.model(**inputs)
        if places is not None and not in_model:
            output.logits = output.logits[:, places]
        return output

    def _run_rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self._run(ids, None, positions).logits


@dataclass(frozen=True)
class _Batch:
    """Inputs of one forward, and the places of its K real actions."""

    input_ids: Tensor  # (B, S), or one packed row (1, T)
    attention_mask: Tensor | None  # (B, S); of a packed row its segments, or None
    position_ids: Tensor | None  # of a packed row
    places: Tensor  # (A,) or packed (U,), the distinct positions of a row that go through the head
    labels: Tensor  # (B, A) or packed (K,), the token after each place; 0 where it is padding
    real: Tensor  # (B, A) bool, K of them True
    packed: bool  # one row, without padding
    reads: Tensor | None = None  # packed (K,), the number of the place that predicts each action; None: each its own

    def real_hidden(self, at_places: Tensor) -> Tensor:
        """(B, A, H), or packed (1, U, H), -> (K, H)."""
        return read(at_places[0], self.reads) if self.packed else at_places[self.real]

    def per_action(self, values: Tensor) -> Tensor:
        """(K,) or (B, A) -> (B, A), 0 at padding."""
        return scatter(values, self.real) if values.dim() == 1 else values.masked_fill(~self.real, 0)

    def of_real(self, values: Tensor) -> Tensor:
        """(K, …) or (B, A, …) -> (K, …)."""
        return values if self.packed else values[self.real]


class _Predicted(NamedTuple):
    """Results of a forward: (K,) for the real actions, or (B, A)."""

    output: ModelOutput
    log_probs: Tensor
    entropy: Tensor | None = None
    logits: Tensor | None = None  # (K, V) or (B, A, V), over the valid vocabulary; None where the head gave log probs


def _packed_by_caller(sequences: Tensor, position_ids: Tensor, lengths: list[int], num_actions: list[int]) -> _Batch:
    places = action_predictors(lengths, num_actions, sequences.device)  # (K,)
    real = torch.ones(1, len(places), dtype=torch.bool, device=sequences.device)  # (1, K)
    return _Batch(sequences, None, position_ids, places, sequences[0, places + 1], real, packed=True)


# ---------------------------------------------------------------------------------------------------------------------
# the head that returns log probs


def scoring_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head, if it is an unmodified linear layer over the vocabulary; else None."""
    head = model.get_output_embeddings()
    if not is_plain_linear(head):
        return None
    return head if head.out_features == model.config.get_text_config().vocab_size else None


@contextmanager
def scores_from_head(
    head: nn.Linear, select: Callable[[Tensor], Tensor], labels: Tensor, temperature: float, **options: Any
) -> Iterator[list[Tensor]]:
    """Makes the :func:`scoring_head` return (1, K, 1) float32 log probs of ``labels``, or (1, K, 2) with the entropy.

    ``select`` picks the scored positions, (B, S, H) -> (K, H). Yields the head's results, for :func:`is_untouched`.
    """
    returned: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        log_probs, entropy = linear_log_probs(select(hidden), head.weight, labels, head.bias, temperature, **options)
        scores = log_probs.unsqueeze(-1) if entropy is None else stack([log_probs, entropy], dim=-1)
        returned.append(scores.unsqueeze(0))
        return returned[-1]

    head.forward = forward  # on the instance: module calls, and hooks around them, find it there
    try:
        yield returned
    finally:
        del head.forward


def is_untouched(returned: list[Tensor], logits: Tensor) -> bool:
    """Whether the model called its head once and returned its result unchanged; by storage, so that all ranks agree."""
    if len(returned) != 1 or not isinstance(logits, Tensor):
        return False
    (scores,) = returned
    same_place = scores.untyped_storage()._cdata == logits.untyped_storage()._cdata
    return same_place and logits.shape == scores.shape and logits._version == scores._version == 0
