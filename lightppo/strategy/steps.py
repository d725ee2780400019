"""What DeepSpeed leaves out of an optimizer step: the non-finite check at stage 0, and a clean slate after a skip."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def clip_and_check(max_norm: float) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
    """A pre-step hook for a plain optimizer at stage 0: clips the averaged gradient, or takes a non-finite one away.

    ZeRO does this inside its own optimizers. At stage 0 the engine steps the plain one, and reads the two attributes
    set here to report the norm and to decide whether the scheduler moves on. The gradient is the same on all ranks,
    so is the decision.

    Args:
        max_norm: largest L2 norm of the gradient over all parameters; 0 does not clip.
    """

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        optimizer.overflow = not bool(torch.isfinite(norm))
        optimizer._global_grad_norm = math.inf if optimizer.overflow else float(norm)
        if optimizer.overflow:
            for param in params:
                param.grad = None  # AdamW passes over parameters without gradient
        elif max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)

    return hook


def forget_gradients(optimizer: Any) -> None:
    """Drops what DeepSpeed 0.19.8 keeps of a skipped step.

    At bf16, ZeRO-2 and offload it would add the next gradients to the old buffers: NaN for ever.
    """
    if getattr(optimizer, "cpu_offload", False):
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None
