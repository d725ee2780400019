"""Inside a packed row, each sequence sees itself alone, and a response its prompt, too: attention and recurrences."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, library, nn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import is_flash_attn_2_available

from lightppo.errors import ModelLoadError
from lightppo.models.batches import RowPlan, continued, plan_of

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


# -- which attention a model gets -------------------------------------------------------------------------------------


def resolve_attn_implementation(
    name: str,
    dtype: torch.dtype | Literal["auto"],
    model_class: type | None = None,
    config: PretrainedConfig | None = None,
) -> str | None:
    """The flag for transformers; None: it chooses. "auto" is flash_attention_2 if usable, after torch's own kernel.

    Capped scores (Gemma 2) are left out by transformers' sdpa, so that "auto" is then eager. Falcon's alibi is right
    under sdpa only.
    """
    capped = caps_scores(config)
    if name == "sdpa" and capped:
        raise ModelLoadError(
            "--attn_implementation sdpa leaves out this model's attn_logit_softcapping: leave the option out, or set "
            """--override_config '{"attn_logit_softcapping": null}' to train without it"""
        )
    if name == "eager" and adds_alibi_twice(config):
        raise ModelLoadError(
            "--attn_implementation eager adds this model's alibi twice (Falcon in transformers): leave the option out"
        )
    if name not in ("auto", "flash_attention_2") or (
        name == "auto" and torch_has_flash(model_class, config)
    ):
        return None if name == "auto" else name
    # For a model with code of its own, trying tells.
    supported = getattr(model_class, "_supports_flash_attn", name == "flash_attention_2")
    # For gpt-oss, Granite with sinks and MiMo, transformers would fetch one of these kernels from the hub instead.
    own_kernels = getattr(model_class, "_compatible_flash_implementations", None) or [
        "flash_attention_2"
    ]
    obstacles = {
        "there is no CUDA device": not torch.cuda.is_available(),
        "the flash-attn package (2.3.3 or newer) is not installed": not is_flash_attn_2_available(),
        "it needs --bf16 or --fp16": dtype not in (torch.bfloat16, torch.float16),
        f"{getattr(model_class, '__name__', None)} does not support it": not supported,
        f"{getattr(model_class, '__name__', None)} takes {', '.join(own_kernels)} only": (
            "flash_attention_2" not in own_kernels
        ),
    }
    reasons = [reason for reason, holds in obstacles.items() if holds]
    if reasons and name == "flash_attention_2":
        raise ModelLoadError(
            f"--attn_implementation flash_attention_2 (--flash_attn) cannot be used: {'; '.join(reasons)}. "
            "Set --attn_implementation sdpa."
        )
    if reasons:
        return "eager" if capped else None
    return "flash_attention_2"


def adds_alibi_twice(config: PretrainedConfig | None) -> bool:
    """Whether eager attention is wrong: Falcon's mask has the alibi in it, and its eager layers add it once more."""
    return config is not None and config.model_type == "falcon" and bool(config.alibi)


def caps_scores(config: PretrainedConfig | None) -> bool:
    """Whether attention squeezes its scores between two bounds."""
    text = None if config is None else config.get_text_config()
    return getattr(text, "attn_logit_softcapping", None) is not None


def torch_has_flash(model_class: type | None, config: PretrainedConfig | None) -> bool:
    """Whether sdpa runs packed rows of this model by FlashAttention, as torch does from 2.11 on.

    It is the same kernel as flash-attn's, without waiting in each layer, and shares prompts; decoding keeps its slots.
    """
    flash = "window_size" in VARLEN_TAKES and getattr(model_class, "_supports_sdpa", False)
    return flash and not caps_scores(config)
