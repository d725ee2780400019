"""What makes a loaded model faster or smaller and leaves what it computes: compiling, liger kernels, offloading."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's repeated blocks, which transformers names for it.

    Raises:
        ModelLoadError: it names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelLoadError(f"--torch_compile: {type(model).__name__} does not say which of its modules are layers")
    return layers


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """torch.compile for each layer, in place, for rows of any length; names and weights stay as they are.

    Layer by layer, since that compiles one block instead of the whole model, and leaves the head, where log probs are
    made chunk by chunk, alone.

    Args:
        model: loaded, not sharded.
        backend: of torch.compile.
    """
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend=backend)


@contextmanager
def not_compiled() -> Iterator[None]:
    """Meanwhile compiled layers run as they were: decoding would compile again for every kind of cache."""
    with torch.compiler.set_stance("force_eager"):
        yield


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Liger's kernels (Hsu et al. 2024, arXiv:2410.10989) for norms, rotary embeddings and MLPs, in place.

    The loss kernels stay out: log probs are made without logits here anyway.

    Raises:
        ModelLoadError: liger-kernel is not installed, or there is no GPU.
    """
    missing = []
    if importlib.util.find_spec("liger_kernel") is None:
        missing.append("liger-kernel is not installed (pip install liger-kernel)")
    if not torch.cuda.is_available():
        missing.append("there is no CUDA device")
    if missing:
        raise ModelLoadError(f"--use_liger_kernel: {'; '.join(missing)}. Leave it out, or mend that.")
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})


def check_activation_offload(device: torch.device) -> None:
    """Raises ModelLoadError where activations are in CPU memory anyway."""
    if device.type == "cpu":
        raise ModelLoadError(
            "--activation_offload moves activations from a GPU to CPU memory; here is none: leave it out"
        )


def activations_on_cpu(on: bool) -> AbstractContextManager:
    """What a forward pass keeps for its backward pass waits in CPU memory, page-locked where there is a GPU."""
    if not on or not torch.is_grad_enabled():
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
