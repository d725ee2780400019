"""Layers that torch compiles."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from lightppo.errors import ModelLoadError
from lightppo.models.packing.last_layer import decoder_layers
from lightppo.models.wrapper import PretrainedWrapper, Role

POLICIES_AND_CRITIC: tuple[Role, ...] = ("actor", "critic", "reference", "teacher")


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
    # One by one: that compiles a single block, and leaves out the head, which makes log probs by chunks.
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
