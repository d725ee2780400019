"""Which models can be packed, and what attends in their packed rows."""

from __future__ import annotations

import inspect

from torch import nn
from transformers import PreTrainedModel

from lightppo.errors import PackingNotSupportedError
from lightppo.models.attention.alibi import PACKED_ALIBI, attends_with_alibi, makes_positions
from lightppo.models.attention.chunks import PACKED_CHUNKS, attends_in_chunks, why_no_chunks
from lightppo.models.attention.eager import PACKED_EAGER, attends_by_own_code
from lightppo.models.attention.recurrent import why_not_by_segment
from lightppo.models.attention.row_attention import PACKED_SDPA

# attentions of packed rows that are code of a family's own, each with whether it stands in for a model's attention
_OF_FAMILIES = {
    PACKED_ALIBI: attends_with_alibi,
    PACKED_CHUNKS: attends_in_chunks,
    PACKED_EAGER: attends_by_own_code,
}


def takes_segments(model: PreTrainedModel) -> bool:
    """Return whether :func:`segments_as_mask` may replace the mask of a packed row."""
    return model.config._attn_implementation in (PACKED_SDPA, *_OF_FAMILIES)


def attention_for_rows(model: PreTrainedModel) -> str | None:
    """Return the attention that does the same as the model's, and takes :func:`segments_as_mask`; None: there is none."""
    usual = PACKED_SDPA if model.config._attn_implementation == "sdpa" else None
    return next((name for name, stands_in in _OF_FAMILIES.items() if stands_in(model)), usual)


def attend_by(model: PreTrainedModel, name: str) -> None:
    """Set a model's attention, also where its modules are not transformers' and run in rows by code of their own."""
    ours = name in _OF_FAMILIES or takes_segments(model)
    if ours and not model._can_set_attn_implementation():
        model.config._attn_implementation = name
    else:
        model.set_attn_implementation(name)


def check_packing_layers(model: nn.Module) -> None:
    """Refuse families that cannot be packed, judging by the model's class and config alone."""
    base = model.base_model
    takes_positions = "position_ids" in inspect.signature(base.forward).parameters
    if not takes_positions and not makes_positions(model):
        raise packing_error(model, f"{type(base).__name__}.forward takes no position_ids")
    # DeepSeek-like configs have no layer_types; then all layers are of one kind, and a first forward tells.
    for kind in sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ())):
        if reason := why_not_packed(model, kind):
            raise packing_error(model, f"it has layers of type {kind}: {reason}")


def why_not_packed(model: nn.Module, kind: str) -> str | None:
    """Return why layers of this type in ``layer_types`` cannot be packed, or None."""
    if kind in ("full_attention", "sliding_attention", "mlp", "moe"):
        return None
    if kind == "chunked_attention":
        return why_no_chunks(model)
    if kind in ("linear_attention", "conv", "hybrid"):
        return why_not_by_segment(model)
    return "it is not known"


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
