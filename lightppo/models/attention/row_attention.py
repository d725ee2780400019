"""Inside a packed row, each sequence sees itself alone, and a response its prompt, too: attention and recurrences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightppo.models.attention.attention_choice import VARLEN_TAKES
from lightppo.models.batches import RowPlan, continued, plan_of, to_device

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch
    varlen_attn = None

PACKED_SDPA = "packed_sdpa"  # the name of packed_attention in transformers


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' ``sdpa``, also for packed rows with :func:`segments_as_mask`.

    query (1, H, T, D), key and value (1, H_kv, T, D) -> (1, T, H, D). A ``sliding_window`` includes the position
    itself.
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    plan = plan_of(attention_mask, query.device)
    if query.shape[2] != plan.tokens:
        raise ValueError(
            f"a packed row of {query.shape[2]} tokens cannot hold sequences of {plan.tokens}"
        )
    window = window_of(module, options)
    scale = options.get("scaling")
    dropout = options.get("dropout", 0.0)
    width = value.shape[-1]
    narrower = query.shape[-1] - value.shape[-1]
    if narrower > 0:  # MLA: few fast kernels take values narrower than keys
        value = pad(value, (0, narrower))
    fits = dropout == 0 and flash_fits(query, value, plan)
    if (varlen := varlen_options(query, window, scale) if fits else None) is not None:
        output = _varlen((query, key, value), plan, varlen)
    elif dropout == 0 and torch.compiler.is_compiling():
        output = _attend_op(query, key, value, attention_mask, window, scale)
    else:
        masks = plan.masks(window, query)
        output = _by_sequence(query, key, value, plan, masks, scale=scale, dropout_p=dropout)
    return output[..., :width] if narrower > 0 else output, None


AttentionInterface.register(PACKED_SDPA, packed_attention)
AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)


def window_of(module: nn.Module, options: dict[str, Any]) -> int | None:
    """Positions that a layer looks back, itself included; None: all."""
    if "sliding_window" not in options and attends_in_windows(module.config):
        raise NotImplementedError(
            f"--packing_samples: {type(module).__name__} does not tell its attention of its sliding window: leave "
            "--packing_samples out"
        )
    return options.get("sliding_window")


def attends_in_windows(config: PretrainedConfig) -> bool:
    """Whether some layers may see fewer positions than the longest sequence has."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return "sliding_attention" in kinds
    window = getattr(config, "sliding_window", None)
    longest = getattr(config, "max_position_embeddings", None)
    return (
        window is not None
        and getattr(config, "use_sliding_window", True)
        and (longest is None or window < longest)
    )


def _by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: RowPlan,
    masks: list[Tensor | None],
    **options: Any,
) -> Tensor:
    """One call for each segment: (1, H, T, D) three times -> (1, T, H, D)."""
    groups = query.shape[1] // key.shape[1]
    masked = any(mask is not None for mask in masks)
    if groups > 1 and not takes_fewer_keys(query, value, plan, masked):
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
        groups = 1
    sdpa = partial(scaled_dot_product_attention, enable_gqa=groups > 1, **options)
    # split, not slices: a slice's backward pass writes a whole row of zeros for each sequence
    keys, values = (
        continued(tensor.split(plan.lengths, 2), plan.parents, 2) for tensor in (key, value)
    )
    rows = zip(query.split(plan.lengths, 2), keys, values, masks)
    outputs = [sdpa(q, k, v, attn_mask=mask, is_causal=mask is None) for q, k, v, mask in rows]
    return torch.cat(outputs, 2).transpose(1, 2)


def takes_fewer_keys(query: Tensor, value: Tensor, plan: RowPlan, masked: bool) -> bool:
    """Whether a fast kernel takes fewer heads of keys than of queries. On a GPU only FlashAttention, without a mask."""
    return not query.is_cuda or (not masked and flash_fits(query, value, plan))


def flash_fits(query: Tensor, value: Tensor, plan: RowPlan) -> bool:
    """Whether FlashAttention takes these heads."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return (
        plan.has_flash
        and half
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
    )


def varlen_options(
    query: Tensor,
    window: int | None,
    scale: float | None,
) -> dict[str, Any] | None:
    """Arguments of torch's kernel for packed rows, whose signature changed twice; None: it lacks what is needed.

    2.10 has ``is_causal``, 2.11 ``window_size`` and ``scale`` instead, 2.12 also ``enable_gqa``.
    """
    options: dict[str, Any] = {}
    if "window_size" in VARLEN_TAKES:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif "is_causal" in VARLEN_TAKES and window is None:
        options["is_causal"] = True
    else:
        return None
    if "scale" in VARLEN_TAKES:
        return options | {"scale": scale}
    if scale is None or scale == query.shape[-1] ** -0.5:
        return options
    return None


def _varlen(qkv: Iterable[Tensor], plan: RowPlan, options: dict[str, Any]) -> Tensor:
    """(1, H, T, D) three times -> (1, T, H, D) on a GPU. The kernel aligns its window to the last query and key."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in qkv)  # (T, H, D)
    groups = query.shape[1] // key.shape[1]
    if "enable_gqa" in VARLEN_TAKES:
        options = options | {"enable_gqa": groups > 1}
    elif groups > 1 and "window_size" not in VARLEN_TAKES:
        # 2.11 takes fewer keys without being told
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    if plan.keys is not None:
        key, value = (
            embedding(plan.keys, tensor.flatten(1)).unflatten(1, tensor.shape[1:])
            for tensor in (key, value)
        )
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    return varlen_attn(query, key, value, *plan.borders, *plan.longest, **options)[None]


# -- the same inside a compiled layer: one operator, whatever the number of sequences ---------------------------------

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor segments, SymInt? window, float? scale"


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    window: int | None,
    scale: float | None,
) -> Tensor:
    plan = plan_of(segments, query.device)
    return _by_sequence(
        query, key, value, plan, plan.masks(window, query), scale=scale
    ).contiguous()


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Runs the forward pass again. vjp, because operators run below autograd."""
    plan = plan_of(segments, query.device)
    again = partial(_by_sequence, plan=plan, masks=plan.masks(window, query), scale=scale)
    return tuple(
        gradient.contiguous() for gradient in torch.func.vjp(again, query, key, value)[1](grad)
    )


_attend_op = library.custom_op(
    "lightppo::packed_attention", _attend, mutates_args=(), schema=f"({_INPUTS}) -> Tensor"
)
_backward_op = library.custom_op(
    "lightppo::packed_attention_backward",
    _attend_backward,
    mutates_args=(),
    schema=f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
)
_attend_op.register_fake(lambda query, *_: query.new_empty(query.transpose(1, 2).shape))
_backward_op.register_fake(lambda grad, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:3]))


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


_attend_op.register_autograd(
    lambda ctx, grad: (*_backward_op(grad, *ctx.saved_tensors, *ctx.options), None, None, None),
    setup_context=_remember,
)


# -- the segments of a row as batches without neighbours, for what runs along a sequence ------------------------------

CALL_COST = {"cpu": 128, "other": 4096}  # fixed cost of a call, in positions

# inputs (n, L, …), the states that they begin with (n, …) or None, whether to return the last ones
# -> outputs (n, L, …), states (n, …) or None
Step = Callable[[list[Tensor], Tensor | None, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class SegmentBatch:
    """Segments that run together, padded on the right."""

    places: Tensor  # (n, L) in the row of T places; T: padding
    parents: Tensor | None  # (n,) which of the states kept so far each begins with; None: with none
    keeps_states: bool  # others begin with the last ones


@dataclass(frozen=True)
class SegmentBatches:
    """All segments of a row, parents first."""

    batches: list[SegmentBatch]
    back: Tensor  # (T,) where each place of the row stands among the flat outputs of all batches


def batches_of(plan: RowPlan, device: torch.device, equal_lengths: bool = False) -> SegmentBatches:
    """``equal_lengths``: segments that others continue are not padded. Made once for all layers."""
    key = ("segments", equal_lengths)
    if key not in plan.kept:
        plan.kept[key] = _batches(plan, device, equal_lengths)
    return plan.kept[key]


def _batches(plan: RowPlan, device: torch.device, equal_lengths: bool) -> SegmentBatches:
    starts = [0, *accumulate(plan.lengths)]
    call_cost = CALL_COST["cpu" if device.type == "cpu" else "other"]
    continued = set(plan.parents)
    kept: dict[int, int] = {}  # segment -> number of its last state
    batches: list[SegmentBatch] = []
    back = torch.empty(plan.tokens, dtype=torch.long)
    outputs = 0

    def role(segment: int) -> int:
        if segment in continued:
            return 0
        if plan.parents[segment] < 0:
            return 1
        return 2

    order = sorted(range(len(plan.lengths)), key=lambda i: (role(i), -plan.lengths[i]))
    for which, of_role in groupby(order, role):
        members = list(of_role)
        if which == 0 and equal_lengths:
            parts = [list(part) for _, part in groupby(members, plan.lengths.__getitem__)]
        else:
            cuts = cheapest_parts([plan.lengths[i] for i in members], call_cost)
            parts = [members[first:end] for first, end in cuts]
        for part in parts:
            longest = plan.lengths[part[0]]
            places = torch.full((len(part), longest), plan.tokens)
            for row, segment in enumerate(part):
                length = plan.lengths[segment]
                places[row, :length] = torch.arange(starts[segment], starts[segment] + length)
                first = outputs + row * longest
                back[starts[segment] : starts[segment] + length] = torch.arange(
                    first, first + length
                )
            outputs += places.numel()
            parents = [kept[plan.parents[i]] for i in part] if which == 2 else None
            if which == 0:
                kept |= {segment: len(kept) + row for row, segment in enumerate(part)}
            batches.append(
                SegmentBatch(
                    places=to_device(places, device),
                    parents=None if parents is None else to_device(torch.tensor(parents), device),
                    keeps_states=which == 0,
                )
            )
    return SegmentBatches(batches, to_device(back, device))


def by_segment(
    plan: RowPlan,
    step: Step,
    inputs: Sequence[Tensor],
    fills: Sequence[float],
    equal_lengths: bool = False,
) -> Tensor:
    """Runs ``step`` over every segment of a row: inputs (1, T, …) -> (1, T, …).

    A segment with a parent begins with its parent's last state. ``fills`` is what inputs are after the end of a segment:
    there ``step`` must not change its state, unless with ``equal_lengths``.
    """
    split = batches_of(plan, inputs[0].device, equal_lengths)
    rows = [_with_padding(x[0], fill) for x, fill in zip(inputs, fills, strict=True)]
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for batch in split.batches:
        initial = None if batch.parents is None else chosen(torch.cat(states), batch.parents)
        taken = [chosen(x, batch.places) for x in rows]
        output, last = step(taken, initial, batch.keeps_states)
        outputs.append(output.flatten(0, 1))
        if batch.keeps_states:
            states.append(last)
    return chosen(torch.cat(outputs), split.back)[None]


def chosen(rows: Tensor, index: Tensor) -> Tensor:
    """(R, …) -> (*index.shape, …). Gradients are always added in one order, unlike those of ``rows[index]``."""
    return embedding(index, rows.flatten(1)).view(*index.shape, *rows.shape[1:])


def _with_padding(row: Tensor, fill: float) -> Tensor:
    """(T, …) -> (T + 1, …)."""
    return pad(row, (0, 0) * (row.dim() - 1) + (0, 1), value=fill)


# -- convolutions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contexts:
    """A row in which each segment stands behind the last tokens of its parent."""

    places: Tensor  # (T',) in the row of T places; T: a zero
    kept: Tensor  # (T,) where the segments' own places are in it


def contexts_of(plan: RowPlan, width: int, device: torch.device) -> Contexts:
    """``width`` places in front of each segment: its parent's last ones, zeros in front of these."""
    key = ("contexts", width)
    if key not in plan.kept:
        starts = [0, *accumulate(plan.lengths)]
        places: list[Tensor] = []
        kept: list[Tensor] = []
        total = 0
        for segment, (length, parent) in enumerate(zip(plan.lengths, plan.parents)):
            known = min(width, plan.lengths[parent]) if parent >= 0 else 0
            end = starts[parent + 1] if parent >= 0 else 0
            places += [
                torch.full((width - known,), plan.tokens),
                torch.arange(end - known, end),
                torch.arange(starts[segment], starts[segment] + length),
            ]
            kept.append(torch.arange(total + width, total + width + length))
            total += width + length
        plan.kept[key] = Contexts(
            to_device(torch.cat(places), device), to_device(torch.cat(kept), device)
        )
    return plan.kept[key]


def with_contexts(plan: RowPlan, row: Tensor, width: int) -> Tensor:
    """(T, C) -> (T', C), by :func:`contexts_of`."""
    return chosen(_with_padding(row, 0.0), contexts_of(plan, width, row.device).places)


def cheapest_parts(lengths: list[int], call_cost: int) -> list[tuple[int, int]]:
    """(first, end) of consecutive parts of the prompts, so that positions (with padding) plus calls cost least."""
    least, cut = [0], [0]  # of the first k prompts: their cost, and where the last part begins
    for end in range(1, len(lengths) + 1):
        best = (float("inf"), 0)
        longest = 0
        for first in range(end - 1, -1, -1):
            longest = max(longest, lengths[first])
            best = min(best, (least[first] + call_cost + longest * (end - first), first))
        least.append(best[0])
        cut.append(best[1])
    parts = []
    end = len(lengths)
    while end:
        parts.append((cut[end], end))
        end = cut[end]
    return parts[::-1]
