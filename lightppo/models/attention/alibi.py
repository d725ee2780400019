"""Packed rows of models with alibi (arXiv:2108.12409), whose attention is code of their own: Bloom, MPT, Falcon.

An attention's projections run once over the whole row. What is between them runs on batches of sequences, padded on
the right. A response stands behind its prompt there, so that scores of a shared prompt are computed for each response.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from lightppo.models.attention.row_attention import CALL_COST, cheapest_parts, chosen
from lightppo.models.batches import RowPlan, plan_of, to_device

PACKED_ALIBI = "packed_alibi"  # in the model's config, where its layers know packed rows


@dataclass(frozen=True)
class RowSequences:
    """Each segment that no other continues, behind its parent, in batches padded on the right."""

    places: list[Tensor]  # for each batch (n, L) in the row of T places; 0 after a sequence's end
    back: Tensor  # (T,) where each place of the row stands among the flat outputs of all batches


def sequences_of(plan: RowPlan, device: torch.device) -> RowSequences:
    """Made once for all layers. A parent's outputs are those in its first child's sequence."""
    if "sequences" not in plan.kept:
        plan.kept["sequences"] = _sequences(plan, device)
    return plan.kept["sequences"]


def _sequences(plan: RowPlan, device: torch.device) -> RowSequences:
    segments = torch.arange(plan.tokens).split(plan.lengths)
    continued = set(plan.parents)
    members = [i for i in range(len(segments)) if i not in continued]
    members.sort(key=lambda i: -plan.seen[i])
    call_cost = CALL_COST["cpu" if device.type == "cpu" else "other"]
    back = torch.full((plan.tokens,), -1)
    batches: list[Tensor] = []
    outputs = 0
    for first, end in cheapest_parts([plan.seen[i] for i in members], call_cost):
        longest = plan.seen[members[first]]
        places = torch.zeros(end - first, longest, dtype=torch.long)
        for row, segment in enumerate(members[first:end]):
            parent = plan.parents[segment]
            own = segments[segment]
            sequence = own if parent < 0 else torch.cat([segments[parent], own])
            places[row, : len(sequence)] = sequence
            there = outputs + row * longest + torch.arange(len(sequence))
            is_new = back[sequence] < 0
            back[sequence[is_new]] = there[is_new]
        outputs += places.numel()
        batches.append(to_device(places, device))
    return RowSequences(batches, to_device(back, device))


# -- the families: what their attention gets for n sequences of L tokens -----------------------------------------------


def future(plan: RowPlan, length: int, device: torch.device) -> Tensor:
    """(L, L) bool: True where a position must not see another."""
    key = ("future", length)
    if key not in plan.kept:
        plan.kept[key] = torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
    return plan.kept[key]


def of_bloom(
    module: nn.Module, plan: RowPlan, places: Tensor, states: Tensor, *, alibi: Tensor
) -> dict[str, Any]:
    """alibi (H, 1, T) of the row -> of the batch (n·H, 1, L)."""
    count, length = places.shape
    hidden = future(plan, length, states.device)
    lowest = torch.finfo(states.dtype).min
    return {
        "residual": 0.0,  # the row's is added in the end
        "alibi": alibi[..., :length].repeat(count, 1, 1),
        "attention_mask": states.new_zeros(length, length).masked_fill_(hidden, lowest),
    }


def of_mpt(
    module: nn.Module, plan: RowPlan, places: Tensor, states: Tensor, *, position_bias: Tensor
) -> dict[str, Any]:
    """position_bias (H, 1, the longest sequence that the model takes), of which its layers take the end."""
    hidden = future(plan, places.shape[1], states.device)
    return {"position_bias": position_bias, "attention_mask": hidden}


def of_falcon(
    module: nn.Module, plan: RowPlan, places: Tensor, states: Tensor, *, alibi: Tensor
) -> dict[str, Any]:
    """alibi (H, 1, T) of the row; sdpa has it in the mask, (1, H, L, L)."""
    length = places.shape[1]
    key = ("alibi in mask", length, alibi.dtype)
    if key not in plan.kept:
        hidden = future(plan, length, states.device)
        slopes = alibi[..., :length] / module.head_dim**0.5
        plan.kept[key] = slopes.masked_fill(hidden, torch.finfo(alibi.dtype).min)[None]
    return {"alibi": alibi, "attention_mask": plan.kept[key]}


@dataclass(frozen=True)
class Family:
    """An attention with alibi in transformers."""

    inner: str  # its projection to queries, keys and values
    outer: str  # its projection of what heads give
    own: str  # its name among transformers' attentions
    # (the module, the plan, places (n, L), states (n, L, ·), by name what the model gave it for the row) → what it gets
    # for the batch
    options: Callable[..., dict[str, Any]]
    takes: tuple[str, ...]  # those names
    # Attributes that it has while it runs on a batch.
    instead: dict[str, Any] = field(default_factory=dict)


SDPA = SimpleNamespace(_attn_implementation="sdpa")
FAMILIES = {
    "BloomAttention": Family(
        inner="query_key_value",
        outer="dense",
        own="eager",
        options=of_bloom,
        takes=("alibi",),
        instead={"hidden_dropout": 0.0, "pretraining_tp": 1},
    ),
    "MptAttention": Family(
        inner="Wqkv", outer="out_proj", own="eager", options=of_mpt, takes=("position_bias",)
    ),
    "FalconAttention": Family(
        inner="query_key_value",
        outer="dense",
        own="sdpa",  # eager adds the alibi twice
        options=of_falcon,
        takes=("alibi",),
        instead={"config": SDPA},
    ),
}
"""By the names of their classes in transformers."""


# -- in a model -------------------------------------------------------------------------------------------------------


def run_by_sequence(model: PreTrainedModel) -> None:
    """Attention with alibi learns packed rows, in place."""
    modules = [module for module in model.modules() if has_alibi(module)]
    for module in modules:
        module.__class__ = _packed(type(module))
    if modules:
        model.base_model.register_forward_pre_hook(_hide_segments, with_kwargs=True)


def has_alibi(module: nn.Module) -> bool:
    """Whether it is of one of :data:`FAMILIES`; Falcon's has alibi only if its config says so."""
    kind = type(module)
    return (
        kind.__name__ in FAMILIES
        and kind.__module__.startswith("transformers.models.")
        and "forward" not in vars(module)
        and getattr(getattr(module, "config", None), "alibi", True)
    )


def attends_with_alibi(model: PreTrainedModel) -> bool:
    """Whether the model's attention may be called :data:`PACKED_ALIBI`."""
    kinds = [type(module).__name__ for module in model.modules() if isinstance(module, _ByAlibi)]
    return bool(kinds) and model.config._attn_implementation == FAMILIES[kinds[0]].own


def makes_positions(model: PreTrainedModel) -> bool:
    """Return whether alibi makes the positions of a model that takes no position ids."""
    return any(isinstance(module, _ByAlibi) for module in model.modules())


class _ByAlibi(nn.Module):
    """Mixed into the class of an attention with alibi."""


class _Instead:
    """A module, of which some attributes are others."""

    def __init__(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _as_it_is(states: Tensor) -> Tensor:
    return states


@cache
def _packed(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass with the name of ``kind``, by which transformers and DeepSpeed know it."""
    family = FAMILIES[kind.__name__]
    on_batch = family.instead | {family.inner: _as_it_is, family.outer: _as_it_is}

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        *args: Any,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if attention_mask is not None and attention_mask.dim() == 1:
            return in_row(self, attention_mask, hidden_states, *args, **kwargs), None
        padded = self
        if "config" in family.instead and self.config._attn_implementation == PACKED_ALIBI:
            padded = _Instead(self, {"config": family.instead["config"]})
        return kind.forward(padded, hidden_states, *args, attention_mask=attention_mask, **kwargs)

    # Compiled graphs end here, because segments differ from row to row.
    @torch.compiler.disable
    def in_row(
        self: nn.Module,
        stand_in: Tensor,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        plan = plan_of(stand_in.segments, hidden_states.device)
        states = getattr(self, family.inner)(hidden_states)  # (1, T, ·)
        sequences = sequences_of(plan, hidden_states.device)
        given = {name: kwargs[name] for name in family.takes}
        between = _Instead(self, on_batch)
        outputs = []
        for places in sequences.places:
            batch = chosen(states[0], places)
            options = family.options(self, plan, places, batch, **given)
            outputs.append(kind.forward(between, batch, **options)[0].flatten(0, 1))
        row = chosen(torch.cat(outputs), sequences.back)[None]
        output = getattr(self, family.outer)(row)
        if residual is None:
            return output
        return residual + dropout(output, self.hidden_dropout, self.training)

    # transformers looks at the parameters of a layer's forward.
    forward.__signature__ = inspect.signature(kind.forward)
    return type(
        kind.__name__, (_ByAlibi, kind), {"__module__": kind.__module__, "forward": forward}
    )


def _hide_segments(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gives a model that makes alibi of its mask ones (1, T); :func:`row_mask` finds the row's segments on them."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.dtype != torch.int64:
        return None
    row = next(
        x for x in (*args, *map(kwargs.get, ("input_ids", "inputs_embeds"))) if x is not None
    )
    ones = torch.ones(row.shape[:2], dtype=torch.bool, device=row.device)
    ones.segments = mask
    return args, kwargs | {"attention_mask": ones}


def row_mask(*, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
    """The eager mask; of a packed row one element, bool, with the segments: a mask (1, 1, T, T) would be large."""
    segments = getattr(attention_mask, "segments", None)
    if segments is None:
        return eager_mask(attention_mask=attention_mask, **options)
    stand_in = torch.ones(1, dtype=torch.bool, device=attention_mask.device)
    stand_in.segments = segments
    return stand_in


def _never_called(module: nn.Module, *args: Any, **options: Any) -> Any:
    raise NotImplementedError(f"{type(module).__name__} has no attention with alibi of its own")


AttentionInterface.register(PACKED_ALIBI, _never_called)
AttentionMaskInterface.register(PACKED_ALIBI, row_mask)
