"""The policy: log probs of actions under a causal LM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from lightppo.algorithms.logprobs import log_probs_and_entropy, token_log_probs
from lightppo.models.batches import (
    Batch,
    check_num_actions,
    on_cpu,
    real_actions,
    refuse_ring,
    takes,
)
from lightppo.models.kernels.linear_log_probs import scores_by_head
from lightppo.models.loading import load_causal_lm
from lightppo.models.router_replay import ReplayPass, RouterReplay
from lightppo.models.wrapper import PretrainedWrapper, adapter_options, prepare_alone

# Of a forward: the model's output; for the K real actions log probs (K,), entropy (K,), logits (K, V) of valid ids.
Predicted = tuple[ModelOutput, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class ActionScores:
    """Results of one forward for the last A tokens of each sequence; None: not asked for."""

    log_probs: Tensor  # (B, A) float32, under the temperature; 0 unless real
    real: Tensor  # (B, A) bool, the action and the token before it are not padding; K places in all
    entropy: Tensor | None = None  # (B, A) float32, in nats, under the temperature; 0 unless real
    # (K, V), valid ids, rows as log_probs[real]; model's dtype, before the temperature
    logits: Tensor | None = None
    # scalar, the load-balancing loss over the real tokens of the batch
    router_loss: Tensor | None = None
    # What is 0 but for ``real``, (B, A, …), of all ranks that hold the batch together: ``real`` is of this one's piece.
    whole: Callable[[Tensor], Tensor] = lambda of_piece: of_piece
    # (B, S, L, k), recorded for each router; see models/router_replay.py
    experts: Tensor | None = None
    # (B, A) float32, share of the routers that would have chosen other experts than the given ones
    replaced_experts: Tensor | None = None


class Actor(PretrainedWrapper):
    """A causal LM that gives the log probs of the last A tokens of each sequence.

    Log probs come from logits, or without them from the head, see :mod:`.kernels.linear_log_probs`.

    Args:
        pretrain_or_model: folder, hub id, or a built model (its dropout is set to 0 in place).
        temperature: log probs come from softmax(logits / temperature), as in sampling.
        ds_config: DeepSpeed config; stage 3 shards the weights while they load.
        valid_vocab_size: number of ids, from 0, that log probs cover and the engine samples; None: all embedding rows.
        lora_rank: above 0 adapters train beside frozen weights, made here as scripts have it; a run makes its own later.
        lora_alpha, lora_dropout, target_modules, use_liger_kernel: as the options of these names.
        options: ``flag``, the fields of :class:`lightppo.models.pretrained.LoadOptions`; with ``packing_samples``,
            forwards with num_actions drop the padding.
    """

    # strategy.prepare puts the engine under this attribute and returns the Actor itself
    engine_attribute = "model"

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        *,
        temperature: float = 1.0,
        valid_vocab_size: int | None = None,
        lora_rank: int = 0,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        target_modules: str | Sequence[str] | None = "all-linear",
        use_liger_kernel: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(pretrain_or_model, load_causal_lm, **options)
        if not temperature > 0:
            raise ValueError(f"--temperature must be above 0 for training, got {temperature}")
        self.temperature = temperature
        self.valid_vocab_size = valid_vocab_size
        # The policy as it was loaded, called like a reference, where it is still there beneath adapters. Then the run
        # needs no second model. What puts adapters in sets this.
        self.as_loaded: Any | None = None
        adapters = adapter_options(lora_rank, lora_alpha, lora_dropout, target_modules)
        prepare_alone(self, "actor", use_liger_kernel=use_liger_kernel, **adapters)

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | list[int] | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: list[int] | None = None,
        ring_attn_group: None = None,
        logps_allgather: bool = False,
    ) -> Tensor | ModelOutput | tuple[Tensor, ModelOutput]:
        """Return log probs (B, A) float32 of the last actions; 0 if the action or the token before it is padding.

        Args:
            sequences: (B, S) token ids, padded on either side; or (1, T) with packed_seq_lens.
            num_actions: A; with packed_seq_lens a list, one number per sequence. None: return only the model's output,
                with the logits of all positions (for the LM loss).
            attention_mask: (B, S), 1 = real token; None: no padding.
            return_output: return the model's output too. Its logits cover only the predicting positions,
                (B, A, V), or (1, K, V) over the real actions of a packed forward.
            packed_seq_lens: lengths of sequences that the caller packed into one row; log probs are (1, sum of
                num_actions).
            ring_attn_group, logps_allgather: OpenRLHF's, for sequences that are split over ranks. Here none is.
        """
        refuse_ring(ring_attn_group)
        if packed_seq_lens is not None:
            batch = self.layout.batch_of_row(
                sequences, packed_seq_lens, cast("list[int] | None", num_actions)
            )
            if num_actions is None:
                return self._run(batch)
            actions = sequences[0, batch.places + 1]
        elif num_actions is None:
            mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
            return self._run(Batch(sequences, mask))
        else:
            batch, actions = self._of_actions(sequences, cast(int, num_actions), attention_mask)
        output, log_probs, *_ = self._predict(batch, actions, logits=return_output)
        log_probs = batch.scatter(log_probs)  # (B, A)
        if not return_output:
            return log_probs
        output.logits = batch.returned(output.logits)
        return log_probs, output

    def score_actions(
        self,
        sequences: Tensor,
        num_actions: int,
        attention_mask: Tensor | None = None,
        *,
        entropy: bool | Tensor = False,
        entropy_grad: bool = False,
        logits: bool = False,
        router_loss: bool = False,
        experts: Tensor | None = None,
        record_experts: bool = False,
    ) -> ActionScores:
        """Return log probs of the last actions, and more on request, from one forward; the same packed and padded.

        ``entropy``: of all actions, or of those that a mask (B, A) on the CPU names; what others get says nothing.
        ``entropy_grad``: the entropy has a gradient (an entropy bonus). ``logits``: of the real actions (exact KL).
        ``router_loss``: the load-balancing loss of a mixture of experts (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6).
        ``experts`` (B, S, L, k): those that each token goes to; ``record_experts``: those that it went to.
        """
        if router_loss:
            self.check_router()
        # the load-balancing loss counts every token of every sample
        batch, actions = self._of_actions(
            sequences, num_actions, attention_mask, shares_prompts=not router_loss
        )
        replay_pass = None
        replaying: AbstractContextManager = nullcontext()
        if experts is not None or record_experts:
            replay_pass = self._replay_pass(batch, experts)
            replaying = self._replay().entered(replay_pass)
        with replaying:
            output, log_probs, entropies, all_logits = self._predict(
                batch,
                actions,
                logits=logits,
                entropy=entropy,
                entropy_grad=entropy_grad,
                router_logits=router_loss,
            )
        replayed = {}
        if replay_pass is not None:
            replayed = self._replayed(batch, replay_pass, sequences)
        return ActionScores(
            log_probs=batch.scatter(log_probs),  # (B, A)
            real=cast(Tensor, batch.real),
            entropy=None if entropies is None else batch.scatter(entropies),  # (B, A)
            logits=all_logits,
            router_loss=self._router_loss(output) if router_loss else None,
            whole=batch.whole,
            **replayed,
        )

    def _replay(self) -> RouterReplay:
        if self.router_replay is None:
            raise ValueError("this actor's routers do not record or replay: set --router_replay")
        return self.router_replay

    def _replay_pass(self, batch: Batch, experts: Tensor | None) -> ReplayPass:
        """Return a pass that replays ``experts`` (B, S, L, k), or records."""
        places = batch.places.sort().values if self.layout.packs else None
        return ReplayPass(None if experts is None else batch.of_tokens(experts), places)

    def _replayed(
        self, batch: Batch, replay_pass: ReplayPass, sequences: Tensor
    ) -> dict[str, Tensor]:
        """Return what a pass has recorded, or where it has replaced choices, as fields of :class:`ActionScores`."""
        replay = self._replay()
        if replay_pass.choices is None:
            choices = replay.recorded(replay_pass, batch.ids.numel())  # (T, L, k)
            blank = replay.blank(*sequences.shape, device=choices.device)
            return {"experts": batch.of_sequences(choices, blank)}
        replaced = replay.replaced(replay_pass).view(*batch.ids.shape, 1)
        of_actions = batch.of_real(batch.at_places(replaced))[:, 0]  # (K,)
        return {"replaced_experts": batch.scatter(of_actions)}

    def check_router(self) -> None:
        """Raise ValueError for a model that is no mixture of experts, which has no load-balancing loss."""
        if not takes(self.hf_model, "output_router_logits"):
            raise ValueError(
                f"--aux_loss_coef: {type(self.hf_model).__name__} gives no router logits: leave it out"
            )

    def _router_loss(self, output: ModelOutput) -> Tensor:
        loss = output.get("aux_loss")
        if not isinstance(loss, Tensor):  # transformers: None or 0 where no layer has a router
            raise ValueError(
                f"--aux_loss_coef: {type(self.hf_model).__name__} gave no load-balancing loss: leave it out"
            )
        if torch.is_grad_enabled() and self.training and not loss.requires_grad:
            # reentrant checkpointing runs the layers without a graph, so what is caught inside them has no gradient
            raise ValueError(
                "--aux_loss_coef: no gradient with --gradient_checkpointing_use_reentrant: leave one out"
            )
        return loss.float()

    def _of_actions(
        self,
        sequences: Tensor,
        num_actions: int,
        attention_mask: Tensor | None,
        shares_prompts: bool = True,
    ) -> tuple[Batch, Tensor]:
        """Return one forward that reads where an action is predicted, and the K real actions."""
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences)
        length = sequences.shape[1]
        check_num_actions(num_actions, length)
        real = real_actions(on_cpu(attention_mask), num_actions)  # (B, A)
        columns = slice(length - num_actions - 1, length - 1)
        shared_actions = num_actions if shares_prompts else None
        batch = self.layout.batch(sequences, attention_mask, columns, real, shared_actions)
        return batch, sequences[:, -num_actions:].flatten()[batch.real_places]

    def _predict(
        self,
        batch: Batch,
        actions: Tensor,
        logits: bool = False,
        entropy: bool | Tensor = False,
        entropy_grad: bool = False,
        router_logits: bool = False,
    ) -> Predicted:
        """Make one forward: without logits if log probs are enough and this model's come from its head alone."""
        options = entropy, entropy_grad, router_logits
        by_head = None if logits else scores_by_head(self, batch, actions, *options)
        return by_head or self._predict_by_logits(batch, actions, *options)

    def _predict_by_logits(
        self,
        batch: Batch,
        actions: Tensor,
        entropy: bool | Tensor,
        entropy_grad: bool,
        router_logits: bool,
    ) -> Predicted:
        """Make one forward that holds the logits of all valid ids."""
        output = self._run(batch, batch.places, router_logits)
        valid_logits = batch.of_real(output.logits)[:, : self.valid_vocab_size]  # (K, V)
        entropies = None
        if entropy is False:
            log_probs = token_log_probs(valid_logits, actions, self.temperature)
        else:
            log_probs, entropies = log_probs_and_entropy(
                valid_logits, actions, self.temperature, entropy_grad=entropy_grad
            )
        return output, log_probs, entropies, valid_logits

    def _run(
        self, batch: Batch, places: Tensor | None = None, router_logits: bool = False
    ) -> ModelOutput:
        """Run one forward; only ``places``, those of the batch, go through the head; None: all."""
        reads_mask = router_logits or getattr(self.hf_model.config, "output_router_logits", False)
        inputs = batch.inputs(self.hf_model, reads_mask)
        keeps_logits = places is not None and takes(self.hf_model, "logits_to_keep")
        if keeps_logits:
            inputs["logits_to_keep"] = places
        if router_logits:
            inputs["output_router_logits"] = True
        reads_some = places is not None and not reads_mask
        reading = batch.reading() if reads_some else nullcontext()
        with self._training_pass(batch), reading:
            output = self.model(**inputs)
        if places is not None and not keeps_logits:
            output.logits = batch.at_places(output.logits)
        return output

    def run_rows(self, batch: Batch) -> Tensor:
        return self._run(batch).logits
