"""Packed rows: a batch without its padding in one row, its attention, shared prompts; and micro batches."""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightppo.config.rules import MicroBatchSpec
from lightppo.errors import PackingNotSupportedError
from lightppo.plugin import NO_POSITIONS, PACKED_ATTENTION, PACKED_LAYERS

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch
    varlen_attn = None

PACKED_SDPA = "packed_sdpa"  # the name of packed_attention in transformers

# Layers that attend inside the packed row by position ids; PACKED_LAYERS has others.
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}

# bytes: the driver of a GPU puts so many aside before it copies, and need not wait
_KEPT_ASIDE = 1 << 16

# -- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedRow:
    """The real tokens of a batch in one row."""

    input_ids: Tensor  # (1, T)
    position_ids: Tensor  # (1, T), restarting at 0 for each sequence
    # (B, S) on the CPU, the place of each token in the row; valid only where the attention mask is
    # 1
    slots: Tensor
    segments: Tensor  # the row's mask (segments_as_mask)


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Position of each real token among the real tokens of its row, (B, S) -> (B, S); left padding gets 0."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def pack(sequences: Tensor, attention_mask: Tensor) -> PackedRow:
    """Drop the padding, which may be on both sides: (B, S) -> (1, T)."""
    # places and sizes are found there: one wait for a GPU, not one for each
    real = on_cpu(attention_mask).bool()
    lengths = [n for n in real.sum(1).tolist() if n]
    if not lengths:
        raise ValueError("cannot pack a batch whose attention_mask is 0 everywhere")
    slots = (real.flatten().long().cumsum(0) - 1).view_as(real)  # (B, S)
    return _row(sequences, real.flatten().nonzero()[:, 0], real, slots, lengths)


def _row(
    sequences: Tensor,
    kept: Tensor,
    real: Tensor,
    slots: Tensor,
    lengths: list[int],
    parents: list[int] | None = None,
) -> PackedRow:
    """The row of the places ``kept`` (T,) of the flat batch; all but ``sequences`` is on the CPU."""
    device = sequences.device
    positions = position_ids_from_mask(real).flatten()[kept]
    return PackedRow(
        input_ids=sequences.flatten()[to_device(kept, device)].unsqueeze(0),  # (1, T)
        position_ids=to_device(positions, device).unsqueeze(0),  # (1, T)
        slots=slots,
        segments=segments_as_mask(lengths, parents, device),
    )


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy from the CPU without waiting for what the GPU is doing; :func:`on_cpu` gives ``x`` again."""
    moved = _pinned(tensor, device).to(device, non_blocking=True)
    if moved is not tensor:
        moved.source = tensor, tensor._version + moved._version
    return moved


def _pinned(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor from which the driver can copy to the device at its leisure; small ones it keeps aside by itself."""
    travels = tensor.device.type == "cpu" and torch.device(device).type not in ("cpu", "meta")
    return (
        tensor.pin_memory()
        if travels and tensor.nbytes > _KEPT_ASIDE and not tensor.is_pinned()
        else tensor
    )


def on_cpu(tensor: Tensor) -> Tensor:
    """On the CPU, without a wait for a GPU if it came by :func:`to_device` and nothing was written to it since."""
    source, version = getattr(tensor, "source", (None, 0))
    return (
        tensor.cpu() if source is None or source._version + tensor._version != version else source
    )


def position_ids_from_lengths(lengths: list[int], row: Tensor) -> Tensor:
    """Position ids (1, T) of a row (1, T) that the caller packed."""
    if row.dim() != 2 or row.shape[0] != 1:
        raise ValueError(f"packed_seq_lens needs sequences of shape (1, T), got {tuple(row.shape)}")
    if any(n < 1 for n in lengths) or sum(lengths) != row.shape[1]:
        raise ValueError(
            f"packed_seq_lens {lengths} must be positive and add up to the {row.shape[1]} packed tokens"
        )
    return torch.cat([torch.arange(n, device=row.device) for n in lengths]).unsqueeze(0)


def action_predictors(
    lengths: list[int],
    num_actions: list[int],
    device: torch.device,
    include_last: bool = False,
) -> Tensor:
    """Places (K,) in a packed row that predict the last ``num_actions[i]`` tokens of sequence i."""
    fit = isinstance(num_actions, list) and len(num_actions) == len(lengths)
    if not fit or any(not 0 <= n < length for n, length in zip(num_actions, lengths)):
        raise ValueError(
            f"num_actions {num_actions} must be a list of numbers below the packed lengths {lengths}"
        )
    ends = zip(accumulate(lengths), num_actions)
    return torch.cat(
        [torch.arange(end - n - 1, end - (not include_last), device=device) for end, n in ends]
    )


def check_num_actions(num_actions: int, sequence_length: int) -> None:
    """ValueError unless every action has a position before it to predict it."""
    if not isinstance(num_actions, int) or not 0 < num_actions < sequence_length:
        raise ValueError(
            f"num_actions = {num_actions} must be between 1 and {sequence_length - 1} (S - 1)"
        )


def real_actions(attention_mask: Tensor, num_actions: int) -> Tensor:
    """(B, S) -> (B, A) bool: the action token and the token that predicts it are both real."""
    real = attention_mask.bool()
    return real[:, -num_actions:] & real[:, -num_actions - 1 : -1]


def check_packing_layers(model: nn.Module) -> None:
    """Refuse families that cannot be packed, judging by the model's class and config alone."""
    base = model.base_model
    no_positions = PACKED_LAYERS.get(NO_POSITIONS)
    if "position_ids" not in inspect.signature(base.forward).parameters and (
        no_positions is None or no_positions.fn(model)
    ):
        raise packing_error(model, f"{type(base).__name__}.forward takes no position_ids")
    # DeepSeek-like configs have no layer_types; then all layers are of one kind, and a first forward tells.
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    for kind in sorted(kinds - _PACKABLE_LAYERS):
        reason = PACKED_LAYERS[kind].fn(model) if kind in PACKED_LAYERS else "it is not known"
        if reason:
            raise packing_error(model, f"it has layers of type {kind}: {reason}")


def packing_error(model: nn.Module, reason: str) -> PackingNotSupportedError:
    kind = model.config.get_text_config().model_type
    return PackingNotSupportedError(
        f"--packing_samples does not work with model type {kind!r}: {reason}. Leave it out."
    )


def why_neighbours_are_seen(model: PreTrainedModel) -> str:
    """Of a model whose packed sequences are not as alone."""
    attention = model.config._attn_implementation
    reason = f"with {attention} attention a packed sequence sees its neighbour"
    if attention != "eager":
        return reason
    if model._supports_sdpa:
        return f"{reason} (--attn_implementation sdpa may pack)"
    return f"{reason}, and {type(model).__name__} has no sdpa, which keeps sequences apart"


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether outputs are equal but for rounding; False where any is NaN."""
    difference = ((one.float() - other.float()).abs().mean() / other.float().abs().mean()).item()
    # Rounding alone gives 1e-6 in fp32 (1e-3 with TF32) and 1e-2 in bf16; a neighbour in sight gives 0.1 and more.
    return difference <= (3e-3 if one.dtype == torch.float32 else 1e-1)


# -- attention inside a packed row ------------------------------------------------------------------------------------


def takes_segments(model: PreTrainedModel) -> bool:
    """Whether :func:`segments_as_mask` may replace the mask of a packed row."""
    return model.config._attn_implementation in (PACKED_SDPA, *PACKED_ATTENTION)


def attention_for_rows(model: PreTrainedModel) -> str | None:
    """The attention that does the same as the model's, and takes :func:`segments_as_mask`; None: there is none."""
    usual = PACKED_SDPA if model.config._attn_implementation == "sdpa" else None
    return next((name for name, entry in PACKED_ATTENTION.items() if entry.fn(model)), usual)


def attend_by(model: PreTrainedModel, name: str) -> None:
    """Set a model's attention, also where its modules are not transformers' and a plugin runs them in rows."""
    ours = name in PACKED_ATTENTION or takes_segments(model)
    if ours and not model._can_set_attn_implementation():
        model.config._attn_implementation = name
    else:
        model.set_attn_implementation(name)


@dataclass(eq=False)
class RowPlan:
    """What each layer's attention asks of a packed row's segments, made once: no layer waits for the GPU."""

    tokens: int
    lengths: list[int]
    parents: list[int]  # the earlier segment that each continues, -1: none
    borders: tuple[Tensor, Tensor]  # (N + 1,) int32, of queries, and of keys with their parents'
    longest: tuple[int, int]  # the most queries and keys of a segment
    keys: Tensor | None  # places of all keys in the row, segment by segment; None: as they stand
    has_flash: bool  # FlashAttention runs on this device
    seen: list[int]  # keys of each segment, with its parent's
    # what else layers make of it once: masks by window and type
    kept: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        lengths: list[int],
        parents: list[int],
        device: torch.device,
    ) -> RowPlan:
        seen = [n if p < 0 else lengths[p] + n for n, p in zip(lengths, parents)]
        borders = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (lengths, seen)]
        keys = None
        if seen != lengths:
            keys = to_device(
                torch.cat(continued(torch.arange(sum(lengths)).split(lengths), parents, 0)), device
            )
        return cls(
            tokens=sum(lengths),
            lengths=lengths,
            parents=parents,
            borders=(to_device(borders[0], device), to_device(borders[1], device)),
            longest=(max(lengths), max(seen)),
            keys=keys,
            seen=seen,
            has_flash=device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0),
        )

    def masks(self, window: int | None, like: Tensor) -> list[Tensor | None]:
        """For each segment (new, seen): 0 where a new position sees another, else -inf; None: it is causal."""
        key = (window, like.dtype)
        if key not in self.kept:
            self.kept[key] = [
                _near(new, seen, window, like) for new, seen in zip(self.lengths, self.seen)
            ]
        return self.kept[key]

    def flash_options(self) -> dict[str, Any]:
        """transformers' ``FlashAttentionKwargs``."""
        (cu_q, cu_k), (max_q, max_k) = self.borders, self.longest
        return {
            "cu_seq_lens_q": cu_q,
            "cu_seq_lens_k": cu_k,
            "max_length_q": max_q,
            "max_length_k": max_k,
        }


def _near(new: int, total: int, window: int | None, like: Tensor) -> Tensor | None:
    if new == total and (window is None or total <= window):
        return None
    seen = torch.ones(new, total, dtype=torch.bool, device=like.device).tril_(total - new)
    if window is not None:
        seen.triu_(total - new + 1 - window)
    return torch.zeros(new, total, dtype=like.dtype, device=like.device).masked_fill_(
        ~seen, float("-inf")
    )


def segments_as_mask(
    lengths: list[int],
    parents: list[int] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A packed row's segments as its attention mask: (1, 1, 2, N) int64 on the CPU, with the plan for ``device``.

    A segment also sees all of its parent, the earlier segment that it continues; -1: none. Parents have no parents.
    """
    parents = [-1] * len(lengths) if parents is None else parents
    mask = torch.tensor([lengths, parents])[None, None]
    mask.plan = RowPlan.of(lengths, parents, torch.device(device))
    return mask


def plan_of(mask: Tensor, device: torch.device) -> RowPlan:
    """The plan of :func:`segments_as_mask`, also where something has copied the mask."""
    plan = getattr(mask, "plan", None)
    return RowPlan.of(*mask[0, 0].tolist(), device) if plan is None else plan


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


def continued(
    segments: Sequence[Tensor],
    parents: list[int],
    dim: int,
) -> list[Tensor]:
    """Each segment after its parent. The backward pass sums the gradients that a prompt gets from its responses."""
    return [
        segment if parent < 0 else torch.cat([segments[parent], segment], dim)
        for segment, parent in zip(segments, parents)
    ]


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


def varlen_parameters(kernel: Callable[..., Tensor] | None) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters) if kernel else frozenset()


VARLEN_TAKES = varlen_parameters(varlen_attn)


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
    return options if scale is None or scale == query.shape[-1] ** -0.5 else None


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


# -- prompts that several samples share -------------------------------------------------------------------------------


def pack_shared(
    sequences: Tensor,
    attention_mask: Tensor,
    num_actions: int,
) -> PackedRow | None:
    """:func:`pack`, but equal prompts (before the last A columns) stand once in the row. None: all differ."""
    split = sequences.shape[1] - num_actions
    if len(sequences) < 2 or split < 1:
        return None
    real = on_cpu(attention_mask).bool()
    prompts = on_cpu(sequences)[:, :split].masked_fill(~real[:, :split], -1)  # (B, S - A)
    group = torch.unique(prompts, dim=0, return_inverse=True)[1]  # (B,)
    of_prompt, of_response = real[:, :split].sum(1), real[:, split:].sum(1)  # (B,)
    shared = (group.bincount()[group] > 1) & (of_prompt > 0)  # (B,)
    if not bool(shared.any()):
        return None
    order = group.argsort(stable=True)  # rows of one prompt stand together
    is_first = group[order].diff(prepend=group.new_tensor([-1])) != 0
    leader = order[is_first][group]  # (B,), the row that brings the prompt
    leads = leader == torch.arange(len(leader))  # (B,)
    kept = real.clone()
    kept[:, :split] &= (leads | ~shared)[:, None]
    slots = (kept[order].flatten().long().cumsum(0) - 1).view_as(real)[order.argsort()]  # (B, S)
    slots[:, :split] = torch.where(shared[:, None], slots[leader, :split], slots[:, :split])
    # length and parent of each that is not empty; rows of a prompt stand together
    segments: list[tuple[int, int]] = []
    parent = -1
    of_rows = (x[order].tolist() for x in (of_prompt, of_response, shared, leads))
    for prompt, response, is_shared, brings_it in zip(*of_rows):
        if is_shared and brings_it:
            parent = len(segments)
            segments.append((prompt, -1))
        if new := response if is_shared else prompt + response:
            segments.append((new, parent if is_shared else -1))
    in_order = torch.arange(real.numel()).view_as(real)[order][kept[order]]  # (T,)
    lengths, parents = map(list, zip(*segments))
    return _row(sequences, in_order, real, slots, lengths, parents)


def distinct_places(places: Tensor) -> tuple[Tensor, Tensor | None]:
    """Places (K,) to read -> the distinct places (U,), and each read's index (K,) into them; None: K = U."""
    different, reads = torch.unique(places, return_inverse=True)
    return (places, None) if len(different) == len(places) else (different, reads)


def read(at_places: Tensor, reads: Tensor | None) -> Tensor:
    """(U, …) at the distinct places -> (K, …), one per read; ``reads`` from :func:`distinct_places`."""
    if reads is None:
        return at_places
    # an embedding's backward pass always adds in the same order; indexing's only in torch's deterministic mode
    return embedding(reads, at_places.reshape(len(at_places), -1)).view(
        len(reads), *at_places.shape[1:]
    )


def all_share_prompts(models: Iterable[Any]) -> bool:
    """Whether every one of these models (except ``None``) has ``shares_prompts``."""
    return all(getattr(model, "shares_prompts", False) for model in models if model is not None)


def all_pack(choice: bool | None, models: Iterable[Any]) -> bool:
    """``--packing_samples``; where it is None, whether every one of these models (except ``None``) packs."""
    if choice is not None:
        return choice
    return all(getattr(model, "packing_samples", False) for model in models if model is not None)


# -- micro batches ----------------------------------------------------------------------------------------------------


def micro_batches(
    lengths: Sequence[tuple[int, int]],
    spec: MicroBatchSpec,
    *,
    packed: bool,
    at_least: int = 0,
    prompts: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Split rows with ``lengths`` (prompt, response) into micro batches: lists of row numbers, each row in one.

    By samples: rows of similar length together, longest first, so that a lack of memory shows at once. By tokens: a
    packed micro batch holds at most the budget in real tokens, and all hold about the same number (``at_least`` is how
    many other ranks need); a padded one holds at most the budget with its padding. A row above the budget is alone.

    When packed, rows with equal ``prompts`` stay together, and the prompt's tokens count once. Only a group above the
    budget is cut, into parts that each hold the prompt; by samples, also a group at the border of a micro batch.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -sum(lengths[i]))
    if spec.unit == "tokens" and not packed:
        return _padded(longest_first, lengths, spec.size)
    of_prompt: dict[Hashable, list[int]] = {}
    for i in longest_first:
        of_prompt.setdefault(prompts[i] if packed and prompts is not None else i, []).append(i)
    groups = sorted(of_prompt.values(), key=lambda group: -_tokens(group, lengths))
    if spec.unit == "samples":
        order = [i for group in groups for i in group]
        return [order[i : i + spec.size] for i in range(0, len(order), spec.size)]
    units = []  # rows of one prompt, cut into as few parts as fit the budget
    for group in groups:
        cuts = _fitting([lengths[i][1] for i in group], max(1, spec.size - lengths[group[0]][0]))
        units += [[group[i] for i in cut] for cut in cuts]
    parts = _fitting([_tokens(unit, lengths) for unit in units], spec.size, at_least)
    return [[i for unit in part for i in units[unit]] for part in parts]


def _tokens(group: Sequence[int], lengths: Sequence[tuple[int, int]]) -> int:
    """Tokens of rows with one prompt, which counts once."""
    return lengths[group[0]][0] + sum(lengths[i][1] for i in group)


def _fitting(tokens: Sequence[int], budget: int, at_least: int = 0) -> list[list[int]]:
    """Few parts of about equal sums within the budget; an item above the budget is a part of its own."""
    if not tokens:
        return []
    least = max(1, -(-sum(tokens) // budget), min(at_least, len(tokens)))
    # fits at the latest when every part has one item
    tries = (_even(tokens, n) for n in count(least))
    return next(
        t
        for t in tries
        if all(len(part) == 1 or sum(tokens[i] for i in part) <= budget for part in t)
    )


def _padded(
    order: list[int],
    lengths: Sequence[tuple[int, int]],
    budget: int,
) -> list[list[int]]:
    """Consecutive rows, as long as rows × (longest prompt + longest response) stays within the budget."""
    parts: list[list[int]] = []
    width = (0, 0)
    for i in order:
        wider = (max(width[0], lengths[i][0]), max(width[1], lengths[i][1]))
        if parts and (len(parts[-1]) + 1) * sum(wider) <= budget:
            parts[-1].append(i)
            width = wider
        else:
            parts.append([i])
            width = lengths[i]
    return parts


def _even(tokens: Sequence[int], number: int) -> list[list[int]]:
    """``number`` parts of about equal sums: the largest remaining item goes to the lightest part (Graham 1969, LPT)."""
    parts: list[list[int]] = [[] for _ in range(number)]
    loads = [(0, part) for part in range(number)]
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        load, part = heapq.heappop(loads)
        parts[part].append(i)
        heapq.heappush(loads, (load + tokens[i], part))
    return [part for part in parts if part]
