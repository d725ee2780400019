"""Adapters that do something: B starts at 0, so a test gives it other numbers."""

from __future__ import annotations

import torch
from torch import nn


def randomize_b(model: nn.Module, scale: float = 0.3) -> None:
    """Random numbers, the same at each call, in every B of a model with LoRA adapters."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
