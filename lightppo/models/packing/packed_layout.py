"""The layout of a model's batches, packed rows or padded ones; whether a model runs them exactly is tried out."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightppo.config.rules import MicroBatchSpec
from lightppo.errors import PackingNotSupportedError
from lightppo.models.batches import Batch, PaddedLayout, to_device
from lightppo.models.inspection import recomputes, takes
from lightppo.models.packing.last_layer import only_at, position_wise
from lightppo.models.packing.packable import (
    attend_by,
    attention_for_rows,
    check_packing_layers,
    packing_error,
    takes_segments,
    why_neighbours_are_seen,
)
from lightppo.models.packing.packed_rows import (
    action_predictors,
    distinct_places,
    pack,
    pack_shared,
    plan_of,
    position_ids_from_lengths,
    read,
    segments_as_mask,
)
from lightppo.models.packing.token_budgets import packed_micro_batches
from lightppo.models.packing.trials import alike, is_models_own, one_line
from lightppo.ranks import Ranks

logger = logging.getLogger(__name__)

# where more of a packed row is read, its last layer runs whole: gathering rows costs time too
READ_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class PackedBatch(Batch):
    """One packed row: ``ids`` are (1, T), and ``mask`` has its segments (:func:`.packed_rows.segments_as_mask`)."""

    positions: Tensor  # (1, T)
    read_at: Tensor | None = None  # (U,), the distinct places that are read; None: all are
    reads: Tensor | None = None  # (K,), the number of the place that each reads; None: each its own
    layout: PackedLayout

    @property
    def places(self) -> Tensor:
        return self.read_at

    def at_places(self, values: Tensor) -> Tensor:
        return values[:, self.read_at]  # (1, U, ·)

    def of_real(self, at_places: Tensor) -> Tensor:
        return read(at_places[0], self.reads)

    def returned(self, at_places: Tensor) -> Tensor:
        return self.of_real(at_places)[None]  # (1, K, ·)

    def inputs(self, module: nn.Module, reads_mask: bool = False) -> dict[str, Any]:
        inputs = {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": False}
        if reads_mask or not takes_segments(module):
            if module.config._attn_implementation == "flash_attention_2" and takes(
                module, "kwargs"
            ):
                # Otherwise each layer would find the borders in the positions, and wait for the GPU.
                inputs |= plan_of(self.mask, self.ids.device).flash_options()
            inputs["attention_mask"] = None  # positions say it all
        if takes(module, "position_ids"):
            inputs["position_ids"] = self.positions
        return inputs

    def reading(self) -> AbstractContextManager:
        model = self.layout.hf_model
        worth_it = 0 < len(self.read_at) < READ_SHARE * self.ids.shape[1]
        # A checkpointed layer runs again in the backward pass, which is outside of this context.
        if not worth_it or (torch.is_grad_enabled() and recomputes(model)):
            return nullcontext()
        return only_at(self.layout.last_layer_parts, self.read_at)


class PackedLayout(PaddedLayout):
    """Packed rows as soon as ``packs`` is True, padded batches until then.

    Args:
        packing_samples: pack, or raise PackingNotSupportedError; None: not before :meth:`try_packing`.
        share_prompts: run equal prompts of a batch once, where the attention can.
    """

    def __init__(
        self,
        model: Any,
        packing_samples: bool | None = False,
        share_prompts: bool = True,
    ) -> None:
        self.model = model  # the :class:`~lightppo.models.wrapper.PretrainedWrapper`
        self.share_prompts = share_prompts
        self.own_attention = "sdpa"  # in place of which another one attends in packed rows
        # What runs at the read positions only. None until the first packed forward has looked.
        self.last_layer_parts: list[nn.Module] | None = None
        if packing_samples:
            self.pack()

    @property
    def hf_model(self) -> PreTrainedModel:
        return self.model.hf_model

    @property
    def shares_prompts(self) -> bool:
        """Needs packing and an attention that takes segments, and no load-balancing loss."""
        balances = getattr(self.hf_model.config, "output_router_logits", False)
        return self.packs and self.share_prompts and takes_segments(self.hf_model) and not balances

    # -- packed or padded ----------------------------------------------------------------------------------------

    def pack(self) -> None:
        """Pack from now on; PackingNotSupportedError for a family that cannot, as far as its config tells."""
        self._attend()
        self.packs = True
        if self.share_prompts and not takes_segments(self.hf_model):
            warn_that_nothing_is_shared(self.hf_model.config._attn_implementation)

    def try_packing(self, device: torch.device) -> str | None:
        """Pack from now on; why not, if the model would not do it exactly. Under ZeRO-3 on all ranks together."""
        attention = self.hf_model.config._attn_implementation
        # Eager attention goes over all of a row, with a mask.
        rows = attention == "flash_attention_2" or takes_segments(self.hf_model)
        if not rows and attention_for_rows(self.hf_model) is None:
            if not self.hf_model._supports_sdpa:
                return f"{type(self.hf_model).__name__} has no sdpa, and its eager attention does not keep rows apart"
            return f"it needs --attn_implementation sdpa or flash_attention_2, not {attention}"
        if reason := self.obstacle(device):
            self.stop_packing()
            return reason
        self.packs = True
        return None

    def obstacle(self, device: torch.device) -> str | None:
        """Why the model does not pack exactly; None: it does. Under ZeRO-3 on all ranks together."""
        try:
            self._attend()
            self._probe(device)
        except (PackingNotSupportedError, NotImplementedError) as error:
            return str(error)
        return None

    def stop_packing(self) -> None:
        """Pad from now on."""
        self.packs = False
        self.last_layer_parts = None
        if takes_segments(self.hf_model):
            attend_by(self.hf_model, self.own_attention)

    def _attend(self) -> None:
        check_packing_layers(self.hf_model)
        attention = attention_for_rows(self.hf_model)
        if attention is not None:
            self.own_attention = self.hf_model.config._attn_implementation
            attend_by(self.hf_model, attention)

    @torch.no_grad()
    def _probe(self, device: torch.device) -> None:
        """At the first packed forward: are sequences kept apart, and can the last layer run at some positions only?

        Then, because the passes run sharded, on the real device, with the real attention kernel, on all ranks together.
        """
        if self.last_layer_parts is not None:
            return
        model = self.hf_model
        parts = position_wise(model)
        vocabulary = model.config.get_text_config().vocab_size
        ids = (7 * torch.arange(9, device=device)[None] + 3) % vocabulary
        places = torch.tensor([2, 5, 8], device=device)
        was_training = model.training
        model.eval()
        try:
            both = self._whole_row(ids, [5, 4])
            alone = self.model.run_rows(self._whole_row(ids[:, 5:], [4]))
            row = self.model.run_rows(both)
            with only_at(parts, places):
                partly = self.model.run_rows(both)
        except Exception as error:
            if not is_models_own(error):
                raise
            raise packing_error(
                model, f"its code fails on a packed row: {one_line(error)}"
            ) from error
        finally:
            model.train(was_training)
        if not alike(row[:, 5:], alone):
            raise packing_error(model, why_neighbours_are_seen(model))
        self.last_layer_parts = parts if alike(partly[:, places], row[:, places]) else []

    # -- batches -------------------------------------------------------------------------------------------------

    def batch(
        self,
        sequences: Tensor,
        attention_mask: Tensor,
        columns: slice,
        real: Tensor,
        num_actions: int | None,
    ) -> Batch:
        if not self.packs:
            return super().batch(sequences, attention_mask, columns, real, num_actions)
        device = sequences.device
        self._probe(device)
        row = None
        if num_actions is not None and self.shares_prompts:
            row = pack_shared(sequences, attention_mask, num_actions)
        row = pack(sequences, attention_mask) if row is None else row
        places, reads = distinct_places(row.slots[:, columns][real])  # (U,), (K,)
        return PackedBatch(
            ids=row.input_ids,
            mask=row.segments,
            real=to_device(real, device),
            kept=to_device(real.flatten().nonzero()[:, 0], device),
            positions=row.position_ids,
            read_at=to_device(places, device),
            reads=None if reads is None else to_device(reads, device),
            layout=self,
        )

    def batch_of_row(
        self,
        row: Tensor,
        lengths: list[int],
        num_actions: list[int] | None,
        include_last: bool = False,
    ) -> Batch:
        whole = self._whole_row(row, lengths)
        self._probe(row.device)
        if num_actions is None:
            places = torch.arange(row.shape[1], device=row.device)
        else:
            places = action_predictors(lengths, num_actions, row.device, include_last)  # (K,)
        return PackedBatch(
            ids=row,
            mask=whole.mask,
            real=torch.ones(1, len(places), dtype=torch.bool, device=row.device),
            kept=torch.arange(len(places), device=row.device),
            positions=whole.positions,
            read_at=places,
            layout=self,
        )

    def _whole_row(self, row: Tensor, lengths: list[int]) -> PackedBatch:
        """A row (1, T) of sequences that is read everywhere."""
        positions = position_ids_from_lengths(lengths, row)
        segments = segments_as_mask(lengths, device=row.device)
        return PackedBatch(ids=row, mask=segments, positions=positions, layout=self)

    def split(
        self,
        lengths: Sequence[tuple[int, int]],
        spec: MicroBatchSpec,
        ranks: Ranks,
        prompts: Sequence[Hashable] = (),
    ) -> list[list[int]]:
        """All ranks make equally many if they have enough rows."""
        if not self.packs:
            return super().split(lengths, spec, ranks, prompts)
        parts = packed_micro_batches(lengths, spec, prompts)
        most = ranks.same_count(len(parts))
        return packed_micro_batches(lengths, spec, prompts, at_least=most)


@cache  # once per process and kind of attention
def warn_that_nothing_is_shared(attention: str) -> None:
    logger.warning(
        "--share_prompts needs --attn_implementation sdpa; with %s every sample brings its prompt along",
        attention,
    )


# -- what cannot be packed ----------------------------------------------------------------------------------------------
