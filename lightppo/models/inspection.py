"""What a module is and takes, judged by its class, its code and transformers' names."""

from __future__ import annotations

import inspect
import re
from functools import cache

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def is_plain_linear(module: nn.Module) -> bool:
    """``nn.Linear``, or a class that says of itself that it computes the same."""
    kind = type(module)
    return (kind is nn.Linear or "is_plain_linear" in vars(kind)) and "forward" not in vars(module)


def takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward has a parameter of this name."""
    return name in inspect.signature(module.forward).parameters


def recomputes(module: nn.Module) -> bool:
    """Whether layers run again in the backward pass: gradient checkpointing, a word that transformers has renamed."""
    return any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def cache_argument(module: nn.Module) -> str | None:
    """What the module's forward, and its output, call the cache: transformers renamed it in 5.24. None: it takes none."""
    return next((name for name in ("past_key_values", "cache") if takes(module, name)), None)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's repeated blocks, by transformers' names for them; empty if it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def replaceable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers (GPT-2's Conv1D too) by name, without routers and without weights that are read past the call.

    Mamba's kernels take ``self.out_proj.weight`` while a model trains, and Jamba always takes ``self.dt_proj.weight``:
    an adapter there would do nothing, and numbers in 4 bits would be taken for weights.
    """
    found = {}
    for owner_name, owner in model.named_modules():
        for name, layer in owner.named_children():
            is_linear = isinstance(layer, nn.Linear | Conv1D) and not _is_router(layer)
            if is_linear and not _reads_weight(type(owner), name):
                found[f"{owner_name}.{name}".lstrip(".")] = layer
    return found


def _is_router(layer: nn.Module) -> bool:
    """Some families make it of a linear layer (Llama 4, PhiMoE), and it gives more than a product."""
    return "Router" in type(layer).__name__


def _reads_weight(owner: type, name: str) -> bool:
    """Whether a class takes the weight of one of its layers into its own hands."""
    weight = rf"\bself\.{re.escape(name)}\.weight\b(?!\.(dtype|device|shape))"
    return re.search(weight, _source(owner)) is not None


@cache
def _source(kind: type) -> str:
    """Empty for a class that no file has."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
