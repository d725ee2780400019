"""Layers that are compiled, or run by Liger's kernels."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.loading import decoder_layers
from lightppo.models.wrapper import PretrainedWrapper, Role

POLICIES_AND_CRITIC: tuple[Role, ...] = ("actor", "critic", "reference", "teacher")


def prepare_liger(
    model: PretrainedWrapper,
    role: Role,
    config: Any,
    device: torch.device,
) -> None:
    """``--use_liger_kernel``."""
    if config.model.use_liger_kernel and role in POLICIES_AND_CRITIC:
        use_liger_kernels(model.hf_model)


def prepare_compiled(
    model: PretrainedWrapper,
    role: Role,
    config: Any,
    device: torch.device,
) -> None:
    """``--torch_compile``."""
    if config.model.torch_compile and role in POLICIES_AND_CRITIC:
        compile_layers(model.hf_model)


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """torch.compile for each layer, in place, for rows of any length; names and weights stay."""
    layers = decoder_layers(model)
    if not layers:
        raise ModelLoadError(
            f"--torch_compile: {type(model).__name__} does not say which of its modules are layers"
        )
    # one by one: compiles one block, and leaves out the head, which makes log probs by chunks
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Liger's kernels (arXiv:2410.10989), except its loss, for norms, rotary embeddings and MLPs, in place."""
    if not torch.cuda.is_available():
        raise ModelLoadError("--use_liger_kernel: there is no CUDA device: leave it out")
    if importlib.util.find_spec("liger_kernel") is None:
        raise ModelLoadError("--use_liger_kernel: pip install liger-kernel, or leave it out")
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})
