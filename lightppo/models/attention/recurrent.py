"""Recurrent layers of transformers: in a packed row, and in decoding slots.

In a packed row their functions along the sequence run segment by segment.
A mixer's projections run once over the whole row. Its convolution, and the scan that carries its state, are functions
that its forward finds by name in its module; in a packed row it finds these. A prompt's last state is what each of its
responses begins with, and gradients flow back through it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, groupby
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from lightppo.models.attention.slot_layers import SlotLayer, Span
from lightppo.models.batches import (
    RowPlan,
    cheapest_parts,
    on_cpu,
    plan_of,
    segments_as_mask,
    select_rows,
    to_device,
)
from lightppo.models.kernels.layers import is_mixer, with_globals
from lightppo.version import release_of

KNOWN_FROM = (5, 16, 0)  # the release of transformers whose recurrent layers are written as here
NO_STEP = -1e4  # softplus of it is 0: a step that takes no time changes no state


def is_kernel(function: Callable) -> bool:
    """Tell whether transformers found causal-conv1d, flash-linear-attention or mamba-ssm for this function."""
    if not isinstance(function, FunctionType):
        return False
    return bool(inspect.getclosurevars(function).nonlocals.get("is_new_implementation"))


def takes_borders(plan: RowPlan, function: Callable) -> bool:
    """Tell whether a kernel runs the row as it is; one that is to begin with a parent's state gets batches."""
    return is_kernel(function) and max(plan.parents) < 0


def numbers_of(plan: RowPlan, device: torch.device) -> Tensor:
    """Return (1, T) int32: the number of the segment of each place, ``seq_idx`` of kernels."""

    def numbers() -> Tensor:
        lengths = torch.tensor(plan.lengths)
        segments = torch.arange(len(lengths), dtype=torch.int32)
        return to_device(segments.repeat_interleave(lengths)[None], device)

    return plan.once("numbers", numbers)


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
    output_places: (
        Tensor  # (T,) where each place of the row stands among the flat outputs of all batches
    )


def batches_of(plan: RowPlan, device: torch.device, equal_lengths: bool = False) -> SegmentBatches:
    """Return the batches of a row's segments, made once for all layers."""
    return plan.once(("segments", equal_lengths), lambda: _batches(plan, device, equal_lengths))


def _batches(plan: RowPlan, device: torch.device, equal_lengths: bool) -> SegmentBatches:
    call_cost = CALL_COST["cpu" if device.type == "cpu" else "other"]
    lengths = plan.lengths
    starts = [0, *accumulate(lengths)]
    longest_first = sorted(range(len(lengths)), key=lambda segment: -lengths[segment])
    continued = [segment for segment in longest_first if segment in plan.parents]
    children = [segment for segment in longest_first if plan.parents[segment] >= 0]
    alone = [segment for segment in longest_first if segment not in {*continued, *children}]

    def cut(members: list[int]) -> list[list[int]]:
        parts = cheapest_parts([lengths[segment] for segment in members], call_cost)
        return [members[first:end] for first, end in parts]

    if equal_lengths:
        groups = [list(group) for _, group in groupby(continued, lengths.__getitem__)]
    else:
        groups = cut(continued)
    batches: list[SegmentBatch] = []
    state_numbers: dict[int, int] = {}  # segment -> number of its last state
    output_places = torch.empty(plan.tokens, dtype=torch.long)
    output_count = 0
    for group in [*groups, *cut(alone), *cut(children)]:
        width = lengths[group[0]]
        places = torch.full((len(group), width), plan.tokens)
        for row, segment in enumerate(group):
            in_row = torch.arange(starts[segment], starts[segment + 1])
            in_group = torch.arange(lengths[segment])
            places[row, in_group] = in_row
            output_places[in_row] = output_count + row * width + in_group
        output_count += places.numel()
        keeps_states = group[0] in plan.parents
        if keeps_states:
            first = len(state_numbers)
            state_numbers |= {segment: first + row for row, segment in enumerate(group)}
        parents = None
        if plan.parents[group[0]] >= 0:
            numbers = [state_numbers[plan.parents[segment]] for segment in group]
            parents = to_device(torch.tensor(numbers), device)
        batches.append(SegmentBatch(to_device(places, device), parents, keeps_states))
    return SegmentBatches(batches, to_device(output_places, device))


def by_segment(
    plan: RowPlan,
    step: Step,
    inputs: Sequence[Tensor],
    fills: Sequence[float],
    equal_lengths: bool = False,
) -> Tensor:
    """Run ``step`` over every segment of a row: inputs (1, T, …) -> (1, T, …).

    A segment with a parent begins with its parent's last state. ``fills`` is what inputs are after the end of a segment:
    there ``step`` must not change its state, unless with ``equal_lengths``.
    """
    segment_batches = batches_of(plan, inputs[0].device, equal_lengths)
    padded_inputs = [_with_padding(x[0], fill) for x, fill in zip(inputs, fills, strict=True)]
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for batch in segment_batches.batches:
        initial = None if batch.parents is None else select_rows(torch.cat(states), batch.parents)
        batch_inputs = [select_rows(x, batch.places) for x in padded_inputs]
        output, last_states = step(batch_inputs, initial, batch.keeps_states)
        outputs.append(output.flatten(0, 1))
        if batch.keeps_states:
            states.append(last_states)
    return select_rows(torch.cat(outputs), segment_batches.output_places)[None]


def _with_padding(row: Tensor, fill: float) -> Tensor:
    """Pad (T, …) -> (T + 1, …)."""
    return pad(row, (0, 0) * (row.dim() - 1) + (0, 1), value=fill)


# -- convolutions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contexts:
    """A row in which each segment stands behind the last tokens of its parent."""

    places: Tensor  # (T',) in the row of T places; T: a zero
    segment_places: Tensor  # (T,) where the segments' own places are in it


def contexts_of(plan: RowPlan, width: int, device: torch.device) -> Contexts:
    """Return ``width`` places in front of each segment: its parent's last ones, zeros in front of these."""

    def contexts() -> Contexts:
        starts = [0, *accumulate(plan.lengths)]
        places: list[Tensor] = []
        segment_places: list[Tensor] = []
        row_length = 0
        for segment, (length, parent) in enumerate(zip(plan.lengths, plan.parents)):
            context = torch.arange(0)
            if parent >= 0:
                end = starts[parent + 1]
                context = torch.arange(max(starts[parent], end - width), end)
            places.append(pad(context, (width - len(context), 0), value=plan.tokens))
            places.append(torch.arange(starts[segment], starts[segment + 1]))
            segment_places.append(torch.arange(length) + row_length + width)
            row_length += width + length
        return Contexts(
            to_device(torch.cat(places), device), to_device(torch.cat(segment_places), device)
        )

    return plan.once(("contexts", width), contexts)


def with_contexts(plan: RowPlan, row: Tensor, width: int) -> Tensor:
    """Put contexts into a row, (T, C) -> (T', C), by :func:`contexts_of`."""
    return select_rows(_with_padding(row, 0.0), contexts_of(plan, width, row.device).places)


# -- the functions: the plan of the row, what the module has under that name, and the arguments that it is called with -


def convolution(
    plan: RowPlan,
    function: Callable,
    states: Tensor,
    weight: Tensor,
    *arguments: Any,
    **options: Any,
) -> Tensor:
    """Convolve each channel causally, (1, C, T) -> (1, C, T); ``weight`` is (C, K)."""
    if takes_borders(plan, function):
        options["seq_idx"] = numbers_of(plan, states.device)
        return function(states, weight, *arguments, **options)
    width = weight.shape[-1] - 1
    row = with_contexts(plan, states[0].T, width)  # (T', C)
    output = function(row.T[None], weight, *arguments, **options)[0].T
    return select_rows(output, contexts_of(plan, width, states.device).segment_places).T[None]


def delta_rule(
    plan: RowPlan,
    function: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run the gated delta rule (arXiv:2412.06464): (1, T, H, D) three times, (1, T, H) twice -> (1, T, H, D)."""
    options.pop("cu_seqlens", None)
    if takes_borders(plan, function):
        return function(query, key, value, g=g, beta=beta, cu_seqlens=plan.borders[0], **options)

    def step(inputs: list[Tensor], initial: Tensor | None, keeps: bool) -> tuple[Tensor, Any]:
        query_part, key_part, value_part, decay, rate = inputs
        states = {"initial_state": initial, "output_final_state": keeps}
        return function(query_part, key_part, value_part, g=decay, beta=rate, **states, **options)

    # What fills a row up: a decay of exp(0) = 1 is none, and a rate of 0 writes nothing.
    return by_segment(plan, step, (query, key, value, g, beta), (0.0,) * 5), None


def chunk_scan(
    plan: RowPlan,
    function: Callable,
    hidden: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_states: None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Tensor:
    """Run Mamba 2 (arXiv:2405.21060): hidden (1, T, H, P), dt (1, T, H), B and C (1, T, G, N) -> (1, T, H, P)."""
    if takes_borders(plan, function):
        options["seq_idx"] = numbers_of(plan, hidden.device)
        return function(hidden, dt, A, B, C, **options)

    def step(inputs: list[Tensor], initial: Tensor | None, keeps: bool) -> tuple[Tensor, Any]:
        x, time, b, c = inputs
        result = function(
            x, time, A, b, c, initial_states=initial, return_final_states=keeps, **options
        )
        return result if keeps else (result, None)

    shortest, _ = options.get("dt_limit") or (0.0, None)
    return by_segment(
        plan,
        step,
        (hidden, dt, B, C),
        (0.0, NO_STEP, 0.0, 0.0),
        # Where a step must take some time, a filled place, too, would let the state decay.
        equal_lengths=shortest > 0,
    )


def selective_scan(
    plan: RowPlan,
    function: Callable,
    hidden: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    return_last_state: bool = False,
    **options: Any,
) -> Tensor:
    """Run Mamba (arXiv:2312.00752): hidden and dt (1, D, T), A (D, N), B and C (1, N, T) -> (1, D, T).

    The functions begin with a state of 0. Outputs are linear in the state, so what a parent's state h adds is added:
    C_t · exp(A · (dt_1 + … + dt_t)) · h.
    """

    def step(inputs: list[Tensor], initial: Tensor | None, keeps: bool) -> tuple[Tensor, Any]:
        x, time, b, c = (tensor.transpose(1, 2) for tensor in inputs)  # (n, ·, L)
        biases = {"D": D, "delta_bias": delta_bias}
        result = function(x, time, A, b, c, **biases, return_last_state=keeps, **options)
        output, last = result if keeps else (result, None)
        if initial is not None:
            bias = 0 if delta_bias is None else delta_bias.float()[:, None]
            passed = softplus(time.float() + bias).cumsum(-1)  # (n, D, L)
            left = torch.exp(A[:, None] * passed[..., None]) * initial[:, :, None].float()
            output = output + torch.einsum("bdln,bnl->bdl", left, c.float()).to(output.dtype)
        return output.transpose(1, 2), last

    if not options.get("delta_softplus"):
        raise NotImplementedError("--packing_samples: a selective scan without softplus")
    inputs = tuple(tensor.transpose(1, 2) for tensor in (hidden, dt, B, C))
    output = by_segment(plan, step, inputs, (0.0, NO_STEP, 0.0, 0.0)).transpose(1, 2)
    return output if z is None else output * silu(z)


def fused_pass(
    plan: RowPlan, function: Callable, projected: Tensor, *arguments: Any, **options: Any
) -> Tensor | None:
    """Run all of Mamba 2 in one kernel; None: transformers runs the parts one by one."""
    if not takes_borders(plan, function):
        return None
    options["seq_idx"] = numbers_of(plan, projected.device)
    return function(projected, *arguments, **options)


FUNCTIONS: dict[str, Callable] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": chunk_scan,
    "mamba_selective_scan": selective_scan,
    "mamba2_split_conv1d_scan_combined": fused_pass,
}
"""What stands under these names in transformers' modules, in a packed row."""

# -- in a model -------------------------------------------------------------------------------------------------------


def run_by_segment(model: PreTrainedModel) -> None:
    """Teach recurrent layers packed rows, in place; elsewhere their code is transformers'."""
    mixers = [module for module in model.modules() if is_mixer(module)]
    for mixer in mixers:
        mixer.__class__ = _packed(type(mixer))
    if mixers:
        model.base_model.register_forward_pre_hook(_tell_segments, with_kwargs=True)


def why_not_by_segment(model: PreTrainedModel) -> str | None:
    """Return why layers of this model cannot be packed; None: they can, and the first packed row is looked at."""
    return None if has_mixers(model) else f"their code is not known{before_known_code()}"


def before_known_code() -> str:
    """Return what to say of a transformers whose recurrent layers are written otherwise; empty: of none."""
    installed = release_of("transformers")
    if installed is None or installed >= KNOWN_FROM:
        return ""
    return f" before transformers {KNOWN_FROM[0]}.{KNOWN_FROM[1]}"


def has_mixers(model: PreTrainedModel) -> bool:
    """Tell whether :func:`run_by_segment` has taught recurrent layers of this model."""
    return any(isinstance(module, _BySegment) for module in model.modules())


class _BySegment(nn.Module):
    """Mixed into a recurrent layer's class."""


@cache
def _packed(mixer_class: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass with the name of the class, by which transformers and DeepSpeed know it."""
    plain_forward = inspect.unwrap(mixer_class.forward)
    called_names = FUNCTIONS.keys() & set(plain_forward.__code__.co_names)
    scan_functions = {name: plain_forward.__globals__[name] for name in called_names}

    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        *arguments: Any,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if attention_mask is None or attention_mask.dim() != 4:
            return mixer_class.forward(
                self, hidden_states, *arguments, attention_mask=attention_mask, **options
            )
        return in_row(self, attention_mask, hidden_states, *arguments, **options)

    # Compiled graphs end here, because segments differ from row to row.
    @torch.compiler.disable
    def in_row(
        self: nn.Module, segments: Tensor, hidden_states: Tensor, *arguments: Any, **options: Any
    ) -> Tensor:
        plan = plan_of(segments, hidden_states.device)
        if len(plan.lengths) == 1:
            return mixer_class.forward(
                self, hidden_states, *arguments, attention_mask=None, **options
            )
        packed_functions = {
            name: partial(FUNCTIONS[name], plan, function)
            for name, function in scan_functions.items()
        }
        row_forward = with_globals(plain_forward, None, **packed_functions)
        return row_forward(self, hidden_states, *arguments, attention_mask=None, **options)

    # transformers looks at the parameters of a layer's forward.
    forward.__signature__ = inspect.signature(mixer_class.forward)
    return type(
        mixer_class.__name__,
        (_BySegment, mixer_class),
        {"__module__": mixer_class.__module__, "forward": forward},
    )


def _tell_segments(
    model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give recurrent layers a packed row's segments, which transformers keeps from them.

    Attention layers get the segments, too, or with flash-attn its borders of sequences.
    """
    mask = options.get("attention_mask")
    sequence_borders = options.get("cu_seq_lens_q")
    if mask is None and sequence_borders is not None:
        lengths = on_cpu(sequence_borders).diff().tolist()
        segments = segments_as_mask(lengths, device=sequence_borders.device)
    elif isinstance(mask, Tensor) and mask.dim() == 4 and mask.dtype == torch.int64:
        segments = mask
    else:
        return None
    layer_kinds = ("linear_attention", *(model.config.layer_types or ()))
    masks = dict.fromkeys(layer_kinds, segments)
    masks |= dict.fromkeys(("full_attention", "sliding_attention"), mask)
    return arguments, options | {"attention_mask": masks}


# -- in decoding slots ------------------------------------------------------------------------------------------------

KINDS = ("conv_states", "recurrent_states")
RECURRENT_LAYERS: tuple[type, ...] = ()  # of transformers' cache; older ones are decoded in batches
if "number_of_states" in inspect.signature(LinearAttentionLayer.__init__).parameters:
    RECURRENT_LAYERS = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


class RecurrentSlots(LinearAttentionLayer):
    """States of one layer, (slots, …); transformers' code writes the next ones into those of the rows in use."""

    is_croppable = False
    is_sliding = False
    keeps_tokens = False

    def __init__(self, span: Span, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.span = span
        self.buffers: list[Tensor] = []  # no keys and values
        self._pools: dict[tuple[str, int], Tensor] = {}

    def append(self, source: Any, rows: list[int], width: int, slots: int, columns: int) -> None:
        """Add the states of some prompts, as ``SlotCache.append``."""
        new_rows = slice(self.span.rows, self.span.rows + len(rows))
        for kind in KINDS:
            for number, states in getattr(source, kind).items():
                if states is None:  # short convolutions have no other state, experts have none
                    continue
                if (kind, number) not in self._pools:
                    self._pools[kind, number] = states.new_zeros(slots, *states.shape[1:])
                    getattr(self, f"is_{kind}_initialized")[number] = True
                index = torch.tensor(rows, device=states.device)
                self._pools[kind, number][new_rows] = states.index_select(0, index)
        self.has_previous_state |= source.has_previous_state
        self.conv_kernel_size |= source.conv_kernel_size

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copy some rows over others."""
        for pool in self._pools.values():
            index = torch.tensor([sources, targets], device=pool.device)
            pool[index[1]] = pool[index[0]]

    def make_room(self, slots: int, columns: int, first: int, end: int, in_place: bool) -> None:
        """Keep the same states in ``slots`` rows."""
        for pool_key, old_pool in self._pools.items():
            if slots != len(old_pool):
                self._pools[pool_key] = old_pool.new_zeros(slots, *old_pool.shape[1:])
                self._pools[pool_key][: self.span.rows] = old_pool[: self.span.rows]

    def see_rows(self) -> None:
        """Show transformers' code the rows in use."""
        for (kind, number), pool in self._pools.items():
            getattr(self, kind)[number] = pool[: self.span.rows]


class AttendingRecurrentSlots(RecurrentSlots, SlotLayer):
    """Of a layer that also attends: keys and values, too."""

    def __init__(self, span: Span, number_of_states: int = 1) -> None:
        SlotLayer.__init__(self, span)
        RecurrentSlots.__init__(self, span, number_of_states)

    def append(self, source: Any, rows: list[int], width: int, slots: int, columns: int) -> None:
        """Add both."""
        SlotLayer.append(self, source, rows, width, slots, columns)
        RecurrentSlots.append(self, source, rows, width, slots, columns)

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copy both."""
        SlotLayer.move_rows(self, sources, targets)
        RecurrentSlots.move_rows(self, sources, targets)

    def make_room(self, slots: int, columns: int, first: int, end: int, in_place: bool) -> None:
        """Move both."""
        SlotLayer.make_room(self, slots, columns, first, end, in_place)
        RecurrentSlots.make_room(self, slots, columns, first, end, in_place)


def recurrent_slots(layer: LinearAttentionLayer, span: Span) -> RecurrentSlots:
    """Return what stands in place of a recurrent layer of transformers' cache."""
    attends = isinstance(layer, LinearAttentionAndFullAttentionLayer)
    return (AttendingRecurrentSlots if attends else RecurrentSlots)(span, layer.number_of_states)
