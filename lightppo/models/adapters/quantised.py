"""Frozen linear layers with their weights in 4 bits (QLoRA, arXiv:2305.14314), for models that train adapters.

They are bitsandbytes' ``Linear4bit`` without its AVX512-BF16 path, which repacks weights at the first forward without
gradient: later gradients are wrong. On CPUs it unpacks rows wrongly that are not whole blocks: such layers stay dense.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightppo.errors import ModelLoadError
from lightppo.models.kernels.layers import is_plain_linear

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit

BLOCK = 64  # weights of a row that share a scale


def check_bitsandbytes() -> None:
    """ModelLoadError if bitsandbytes is not installed; imports nothing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelLoadError(
            "--load_in_4bit needs bitsandbytes: pip install 'lightppo[qlora]', or bitsandbytes alone"
        )


def quantise(model: PreTrainedModel, heads: set[str]) -> None:
    """Hold the weights of the body's linear layers in 4 bits, in place, and freeze the model; before adapters.

    NF4 in blocks of 64 with 8-bit scales (double quantisation): 4.13 bits a weight. ``heads`` (module names),
    embeddings, norms, biases and layers whose rows are not whole blocks stay dense.
    """
    check_bitsandbytes()
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ModelLoadError(
            "--load_in_4bit: the model is sharded already; load it with load_in_4bit=True"
        )
    model.requires_grad_(False)
    for name in fitting_layers(model, heads):
        try:
            quantised = _quantised(model.get_submodule(name))
        except (RuntimeError, ImportError) as error:
            raise ModelLoadError(
                f"--load_in_4bit: bitsandbytes cannot pack {name}: {error}"
            ) from error
        model.set_submodule(name, quantised)  # frees the dense weight before the next is packed


def quantised_layers(model: nn.Module) -> dict[str, Linear4bit]:
    """A model's layers in 4 bits, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if hasattr(layer._parameters.get("weight"), "quant_state")
    }


def dense_weight(layer: Linear4bit, packed: Tensor | None = None) -> Tensor:
    """The weight as in the checkpoint, (out, in) or GPT-2's (in, out); ``packed``: a sharded layer's whole weight."""
    from bitsandbytes.functional import dequantize_4bit

    packed = layer.weight.data if packed is None else packed
    state = layer.weight.quant_state
    weight = dequantize_4bit(packed.to(state.absmax.device), state).to(packed.device)
    return weight.T.contiguous() if layer.transposed else weight


def _quantised(layer: nn.Linear | Conv1D) -> Linear4bit:
    from bitsandbytes.nn import Linear4bit, Params4bit

    transposed = isinstance(layer, Conv1D)
    weight = layer.weight.detach().T if transposed else layer.weight.detach()  # (out, in)
    result = Linear4bit(
        *weight.T.shape, bias=False, compute_dtype=weight.dtype, quant_type="nf4", device="meta"
    )
    # A GPU is quicker at packing; the engine moves the model there later.
    if torch.cuda.is_available():
        place = torch.device("cuda", torch.cuda.current_device())
    else:
        place = weight.device
    result.weight = (
        Params4bit(weight, blocksize=BLOCK, quant_type="nf4", module=result)
        .to(place)
        .to(weight.device)
    )
    result.bias = layer.bias
    result.transposed = transposed
    result.support_avx512bf16_for_cpu = False
    result.register_forward_pre_hook(_bring_scales)
    result.register_state_dict_post_hook(_leave_scales_out)
    return result


def _bring_scales(layer: Linear4bit, args: tuple[Any, ...]) -> None:
    """ZeRO-3 moves the weight to the device but not the scales, because they are not a parameter."""
    layer.weight.quant_state.to(args[0].device)


def _leave_scales_out(
    layer: Linear4bit,
    state_dict: dict[str, Tensor],
    prefix: str,
    metadata: Any,
) -> None:
    """Keeps state dicts to parameters and buffers, as under ZeRO-3; checkpoints never contain 4-bit weights."""
    for name in [name for name in state_dict if name.startswith(f"{prefix}weight.")]:
        del state_dict[name]


def fitting_layers(model: PreTrainedModel, heads: set[str]) -> list[str]:
    """Names of the layers that can be held in 4 bits; an error if they have less than half of the body's weights."""
    modules = dict(model.named_modules())
    plain = {
        name: module
        for name, module in replaceable_layers(model).items()
        if is_plain_linear(module) or type(module) is Conv1D
    }
    widths = {
        name: layer.weight.shape[0] if isinstance(layer, Conv1D) else layer.in_features
        for name, layer in plain.items()
    }
    fitting = [name for name in plain if name not in heads and widths[name] % BLOCK == 0]
    outside = {
        f"{module_name}.weight"
        for module_name, layer in modules.items()
        if module_name in heads or isinstance(layer, nn.Embedding)
    }
    body = {
        name: weight.numel() for name, weight in model.named_parameters() if name not in outside
    }
    held = {f"{name}.weight": modules[name].weight.numel() for name in fitting}
    share = sum(held.values()) / sum(body.values())
    if share < 0.5:
        largest = max(body.keys() - held.keys(), key=body.get)
        raise ModelLoadError(
            f"--load_in_4bit: only {share:.0%} of the weights in the layers of {type(model).__name__} are in plain "
            f"linear layers with an input width that is a multiple of {BLOCK} (the largest other one: {largest}, "
            f"{tuple(model.get_parameter(largest).shape)}): leave --load_in_4bit out"
        )
    return fitting


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
