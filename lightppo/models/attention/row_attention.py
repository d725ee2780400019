"""Inside a packed row, each sequence sees itself alone, and a response its prompt, too: attention and recurrences."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, library, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import is_flash_attn_2_available

from lightppo.errors import ModelLoadError
from lightppo.models.batches import RowPlan, continued, plan_of, select_rows

try:
    from torch.nn.attention.varlen import varlen_attn

    VARLEN_TAKES = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:  # an older torch
    varlen_attn = None
    VARLEN_TAKES = frozenset()

PACKED_SDPA = "packed_sdpa"  # the name of packed_attention in transformers


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend by transformers' ``sdpa``, also in packed rows with :func:`segments_as_mask`.

    query (1, H, T, D), key and value (1, H_kv, T, D) -> (1, T, H, D). A ``sliding_window`` includes the position
    itself.
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    plan = plan_of(attention_mask, query.device)
    if plan.group is not None:
        query, key, value = plan.group.to_heads(query, key, value)
    if query.shape[2] != plan.tokens:
        raise ValueError(
            f"a packed row of {query.shape[2]} tokens cannot hold sequences of {plan.tokens}"
        )
    window = window_of(module, options)
    scale = options.get("scaling")
    dropout = options.get("dropout", 0.0)
    width = value.shape[-1]
    if width < query.shape[-1]:  # MLA: few fast kernels take values narrower than keys
        value = pad(value, (0, query.shape[-1] - width))
    kernel_options = None
    if dropout == 0 and flash_fits(query, value, plan):
        kernel_options = varlen_options(query, window, scale)
    if kernel_options is not None:
        output = _varlen((query, key, value), plan, kernel_options)
    elif dropout == 0 and torch.compiler.is_compiling():
        output = _attend_op(query, key, value, attention_mask, window, scale)
    else:
        masks = plan.masks(window, query)
        output = _by_sequence(query, key, value, plan, masks, scale=scale, dropout_p=dropout)
    if width < output.shape[-1]:
        output = output[..., :width]
    if plan.group is not None:
        output = plan.group.to_positions(output)
    return output, None


AttentionInterface.register(PACKED_SDPA, packed_attention)
AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)


def window_of(module: nn.Module, attention_options: dict[str, Any]) -> int | None:
    """Return how many positions a layer looks back, itself included; None: all."""
    if "sliding_window" not in attention_options and attends_in_windows(module.config):
        raise NotImplementedError(
            f"--packing_samples: {type(module).__name__} does not tell its attention of its sliding window: leave "
            "--packing_samples out"
        )
    return attention_options.get("sliding_window")


def attends_in_windows(config: PretrainedConfig) -> bool:
    """Tell whether some layers may see fewer positions than the longest sequence has."""
    layer_kinds = getattr(config, "layer_types", None)
    if layer_kinds:
        return "sliding_attention" in layer_kinds
    window = getattr(config, "sliding_window", None)
    longest_sequence = getattr(config, "max_position_embeddings", None)
    return (
        window is not None
        and getattr(config, "use_sliding_window", True)
        and (longest_sequence is None or window < longest_sequence)
    )


def _by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: RowPlan,
    masks: list[Tensor | None],
    **options: Any,
) -> Tensor:
    """Attend with one call for each segment: (1, H, T, D) three times -> (1, T, H, D)."""
    heads_per_key = query.shape[1] // key.shape[1]
    has_masks = any(mask is not None for mask in masks)
    if heads_per_key > 1 and not takes_fewer_keys(query, value, plan, has_masks):
        key, value = (tensor.repeat_interleave(heads_per_key, 1) for tensor in (key, value))
        heads_per_key = 1
    attend = partial(scaled_dot_product_attention, enable_gqa=heads_per_key > 1, **options)
    # split, not slices: a slice's backward pass writes a whole row of zeros for each sequence
    keys, values = (
        continued(tensor.split(plan.lengths, 2), plan.parents, 2) for tensor in (key, value)
    )
    segments = zip(query.split(plan.lengths, 2), keys, values, masks)
    outputs = [
        attend(query_part, key_part, value_part, attn_mask=mask, is_causal=mask is None)
        for query_part, key_part, value_part, mask in segments
    ]
    return torch.cat(outputs, 2).transpose(1, 2)


def takes_fewer_keys(query: Tensor, value: Tensor, plan: RowPlan, masked: bool) -> bool:
    """Tell whether a fast kernel takes fewer heads of keys; on a GPU only FlashAttention does, without a mask."""
    return not query.is_cuda or (not masked and flash_fits(query, value, plan))


def flash_fits(query: Tensor, value: Tensor, plan: RowPlan) -> bool:
    """Tell whether FlashAttention takes these heads."""
    has_16_bits = query.dtype in (torch.bfloat16, torch.float16)
    return (
        plan.has_flash
        and has_16_bits
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
    )


def varlen_options(query: Tensor, window: int | None, scale: float | None) -> dict[str, Any] | None:
    """Return arguments of torch's kernel for packed rows, whose signature changed twice; None: it lacks what is needed.

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


def _varlen(projections: Iterable[Tensor], plan: RowPlan, options: dict[str, Any]) -> Tensor:
    """Attend (1, H, T, D) three times -> (1, T, H, D) on a GPU; the window ends at the last query and key."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in projections)  # (T, H, D)
    heads_per_key = query.shape[1] // key.shape[1]
    if "enable_gqa" in VARLEN_TAKES:
        options = options | {"enable_gqa": heads_per_key > 1}
    elif heads_per_key > 1 and "window_size" not in VARLEN_TAKES:
        # 2.11 takes fewer keys without being told
        key, value = (tensor.repeat_interleave(heads_per_key, 1) for tensor in (key, value))
    if plan.keys is not None:
        key, value = (select_rows(tensor, plan.keys) for tensor in (key, value))
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
    masks = plan.masks(window, query)
    return _by_sequence(query, key, value, plan, masks, scale=scale).contiguous()


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Run the forward pass again. vjp, because operators run below autograd."""
    plan = plan_of(segments, query.device)
    attend_again = partial(_by_sequence, plan=plan, masks=plan.masks(window, query), scale=scale)
    gradients = torch.func.vjp(attend_again, query, key, value)[1](grad)
    return tuple(gradient.contiguous() for gradient in gradients)


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


# -- which attention a model gets -------------------------------------------------------------------------------------


def resolve_attn_implementation(
    name: str,
    dtype: torch.dtype | Literal["auto"],
    model_class: type | None = None,
    config: PretrainedConfig | None = None,
) -> str | None:
    """Return transformers' name; None: it chooses. "auto" is flash_attention_2 if usable, after torch's own kernel.

    Capped scores (Gemma 2) are left out by transformers' sdpa, so that "auto" is then eager. Falcon's alibi is right
    under sdpa only.
    """
    has_capped_scores = caps_scores(config)
    if name == "sdpa" and has_capped_scores:
        raise ModelLoadError(
            "--attn_implementation sdpa leaves out this model's attn_logit_softcapping: leave the option out, or set "
            """--override_config '{"attn_logit_softcapping": null}' to train without it"""
        )
    # Falcon's mask has the alibi in it, and its eager layers add it again.
    if name == "eager" and config is not None and config.model_type == "falcon" and config.alibi:
        raise ModelLoadError(
            "--attn_implementation eager adds this model's alibi twice (Falcon in transformers): leave the option out"
        )
    if name not in ("auto", "flash_attention_2"):
        return name
    if name == "auto" and torch_has_flash(model_class, config):
        return None
    # For a model with code of its own, trying tells.
    supported = getattr(model_class, "_supports_flash_attn", name == "flash_attention_2")
    # For gpt-oss, Granite with sinks and MiMo, transformers would fetch one of these kernels from the hub instead.
    kernels = getattr(model_class, "_compatible_flash_implementations", None) or [
        "flash_attention_2"
    ]
    class_name = getattr(model_class, "__name__", None)
    obstacles = {
        "there is no CUDA device": not torch.cuda.is_available(),
        "the flash-attn package (2.3.3 or newer) is not installed": not is_flash_attn_2_available(),
        "it needs --bf16 or --fp16": dtype not in (torch.bfloat16, torch.float16),
        f"{class_name} does not support it": not supported,
        f"{class_name} takes {', '.join(kernels)} only": "flash_attention_2" not in kernels,
    }
    reasons = [reason for reason, applies in obstacles.items() if applies]
    if reasons and name == "flash_attention_2":
        raise ModelLoadError(
            f"--attn_implementation flash_attention_2 (--flash_attn) cannot be used: {'; '.join(reasons)}. "
            "Set --attn_implementation sdpa."
        )
    if reasons:
        return "eager" if has_capped_scores else None
    return "flash_attention_2"


def has_alibi(config: PretrainedConfig) -> bool:
    """Tell whether attention makes positions by alibi (arXiv:2108.12409): Bloom, MPT, old Falcon."""
    return config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))


def caps_scores(config: PretrainedConfig | None) -> bool:
    """Tell whether attention squeezes its scores between two bounds."""
    text_config = None if config is None else config.get_text_config()
    return getattr(text_config, "attn_logit_softcapping", None) is not None


def torch_has_flash(model_class: type | None, config: PretrainedConfig | None) -> bool:
    """Tell whether sdpa runs packed rows of this model by FlashAttention, as torch does from 2.11 on.

    It is the same kernel as flash-attn's, without waiting in each layer, and shares prompts; decoding keeps its slots.
    """
    supports_flash = "window_size" in VARLEN_TAKES and getattr(model_class, "_supports_sdpa", False)
    return supports_flash and not caps_scores(config)
