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
    """Raise ModelLoadError if bitsandbytes is not installed; import nothing."""
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
    for layer_name in fitting_layers(model, heads):
        try:
            quantised = _quantised(model.get_submodule(layer_name))
        except (RuntimeError, ImportError) as error:
            raise ModelLoadError(
                f"--load_in_4bit: bitsandbytes cannot pack {layer_name}: {error}"
            ) from error
        model.set_submodule(
            layer_name, quantised
        )  # frees the dense weight before the next is packed


def quantised_layers(model: nn.Module) -> dict[str, Linear4bit]:
    """Return a model's layers in 4 bits, by name."""
    return {
        layer_name: layer
        for layer_name, layer in model.named_modules()
        if hasattr(layer._parameters.get("weight"), "quant_state")
    }


def dense_weight(layer: Linear4bit, packed_weight: Tensor | None = None) -> Tensor:
    """Return the weight as in the checkpoint, (out, in) or GPT-2's (in, out); ``packed_weight``: a sharded layer's."""
    from bitsandbytes.functional import dequantize_4bit

    if packed_weight is None:
        packed_weight = layer.weight.data
    state = layer.weight.quant_state
    weight = dequantize_4bit(packed_weight.to(state.absmax.device), state).to(packed_weight.device)
    return weight.T.contiguous() if layer.transposed else weight


def _quantised(layer: nn.Linear | Conv1D) -> Linear4bit:
    from bitsandbytes.nn import Linear4bit, Params4bit

    transposed = isinstance(layer, Conv1D)
    weight = layer.weight.detach().T if transposed else layer.weight.detach()  # (out, in)
    quantised_layer = Linear4bit(
        *weight.T.shape, bias=False, compute_dtype=weight.dtype, quant_type="nf4", device="meta"
    )
    # A GPU is quicker at packing; the engine moves the model there later.
    packing_device = weight.device
    if torch.cuda.is_available():
        packing_device = torch.device("cuda", torch.cuda.current_device())
    packed = Params4bit(weight, blocksize=BLOCK, quant_type="nf4", module=quantised_layer)
    quantised_layer.weight = packed.to(packing_device).to(weight.device)
    quantised_layer.bias = layer.bias
    quantised_layer.transposed = transposed
    quantised_layer.support_avx512bf16_for_cpu = False
    quantised_layer.register_forward_pre_hook(_bring_scales)
    quantised_layer.register_state_dict_post_hook(_leave_scales_out)
    return quantised_layer


def _bring_scales(layer: Linear4bit, arguments: tuple[Any, ...]) -> None:
    """Move the scales to the input's device: ZeRO-3 moves the weight alone, because they are not a parameter."""
    layer.weight.quant_state.to(arguments[0].device)


def _leave_scales_out(
    layer: Linear4bit,
    state_dict: dict[str, Tensor],
    prefix: str,
    metadata: Any,
) -> None:
    """Keep state dicts to parameters and buffers, as under ZeRO-3; checkpoints never contain 4-bit weights."""
    for entry in [entry for entry in state_dict if entry.startswith(f"{prefix}weight.")]:
        del state_dict[entry]


def fitting_layers(model: PreTrainedModel, heads: set[str]) -> list[str]:
    """Return the names of layers that 4 bits can hold; raise if they have less than half of the body's weights."""
    fitting = {}
    for name, layer in replaceable_layers(model).items():
        is_plain = is_plain_linear(layer) or type(layer) is Conv1D
        if is_plain and name not in heads and _input_width(layer) % BLOCK == 0:
            fitting[f"{name}.weight"] = layer.weight.numel()
    modules = model.named_modules()
    embeddings = {name for name, module in modules if isinstance(module, nn.Embedding)}
    body = {
        name: weight.numel()
        for name, weight in model.named_parameters()
        if name.removesuffix(".weight") not in heads | embeddings
    }
    packed_share = sum(fitting.values()) / sum(body.values())
    if packed_share < 0.5:
        largest_weight = max((name for name in body if name not in fitting), key=body.get)
        raise ModelLoadError(
            f"--load_in_4bit: only {packed_share:.0%} of the weights in the layers of {type(model).__name__} are in plain "
            f"linear layers with an input width that is a multiple of {BLOCK} (the largest other one: {largest_weight}, "
            f"{tuple(model.get_parameter(largest_weight).shape)}): leave --load_in_4bit out"
        )
    return [name.removesuffix(".weight") for name in fitting]


def _input_width(layer: nn.Linear | Conv1D) -> int:
    return layer.weight.shape[0] if isinstance(layer, Conv1D) else layer.in_features


def replaceable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return linear layers (GPT-2's Conv1D too) by name, but routers and weights that are read past the call.

    Mamba's kernels take ``self.out_proj.weight`` while a model trains, and Jamba always takes ``self.dt_proj.weight``:
    an adapter there would do nothing, and numbers in 4 bits would be taken for weights.
    """
    linear_layers = {}
    for parent_name, parent in model.named_modules():
        for layer_name, layer in parent.named_children():
            is_linear = isinstance(layer, nn.Linear | Conv1D) and not _is_router(layer)
            if is_linear and not _reads_weight(type(parent), layer_name):
                linear_layers[f"{parent_name}.{layer_name}".lstrip(".")] = layer
    return linear_layers


def _is_router(layer: nn.Module) -> bool:
    """Tell whether a linear layer is a router (Llama 4, PhiMoE), which gives more than a product."""
    return "Router" in type(layer).__name__


def _reads_weight(parent_class: type, layer_name: str) -> bool:
    """Tell whether a class takes the weight of one of its layers into its own hands."""
    pattern = rf"\bself\.{re.escape(layer_name)}\.weight\b(?!\.(dtype|device|shape))"
    return re.search(pattern, _source(parent_class)) is not None


@cache
def _source(kind: type) -> str:
    """Return the code of a class; empty for a class that no file has."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
