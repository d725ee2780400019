"""Which layers can be replaced, by one with an adapter or by one in 4 bits: linear layers that the model calls."""

from __future__ import annotations

import inspect
import re
from functools import cache

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


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


def goes_to_experts(model: PreTrainedModel, name: str) -> bool:
    """Whether peft would put the adapter of a layer of this name on experts that are held together instead.

    It does so since transformers 5 in families like DeepSeek-V3, so that shared experts and dense layers would have
    none, and the experts one that no merge here knows.
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # of a peft that does not
        return False
    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:  # it asks for the other parts of the experts
        return True
    return name not in config.target_modules
