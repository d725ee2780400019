"""What DeepSpeed leaves out of an optimizer step: the non-finite check at stage 0, and a clean slate for the next."""

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


def drop_gradients(engine: Any) -> None:
    """Leaves no trace of the backward passes since the last step: the next one starts from gradients of zero.

    Communicates nothing. DeepSpeed 0.19.8 itself leaves traces, also after a step that it takes: ZeRO-3 and the
    offloaded ZeRO-2 and ZeRO-1 keep the gradient of a parameter until the first backward pass of the next step
    overwrites it. A parameter that gets its gradient only from a later pass would have it added to the old one, and
    one that gets none would be stepped on with the old one.

    Raises:
        TypeError: an optimizer of DeepSpeed that this version of lightppo does not know.
    """
    optimizer = engine.optimizer
    engine.zero_grad()
    engine._unmanaged_backward_count = 0  # by which the next step would count samples
    if isinstance(optimizer, torch.optim.Optimizer):  # stage 0: all there is are the gradients of the parameters
        return
    kind = type(optimizer).__name__
    if kind not in _DROP:
        raise TypeError(f"no way known to drop the gradients of DeepSpeed's {kind}: use deepspeed 0.19")
    _DROP[kind](optimizer)


def _drop_bf16(optimizer: Any) -> None:
    """bf16 at stage 1: fp32 gradients of the whole model."""
    optimizer.zero_grad()


def _drop_zero12(optimizer: Any) -> None:
    """Stages 1 and 2: sums of shards, on the device or, offloaded, in main memory."""
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    optimizer.zero_grad()
    for sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in sums:  # not cleared: views of the gradients hold on to the dictionary and look for its keys
            sums[group] = None
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    if not optimizer.cpu_offload:
        return
    optimizer.reset_cpu_buffers()
    optimizer._offload_accumulated_param_ids.clear()
    for gradient in optimizer.accumulated_grads_in_cpu.values():
        gradient.zero_()
    for shard in optimizer.single_partition_of_fp32_groups:
        shard.grad.zero_()


def _drop_zero3(optimizer: Any) -> None:
    """Stage 3: sums of shards in one flat buffer, of which a step, offloaded, takes a copy in fp32."""
    optimizer.zero_grad()
    optimizer.averaged_gradients = {}
    optimizer._offload_boundary_param_ids.clear()
    optimizer.grad_partitions_flat_buffer.zero_()
    if not optimizer.offload_optimizer:
        return
    optimizer.reset_cpu_buffers()
    for shard in optimizer.fp32_partitioned_groups_flat:
        shard.grad.zero_()


_DROP = {
    "BF16_Optimizer": _drop_bf16,
    "DeepSpeedZeroOptimizer": _drop_zero12,
    "DeepSpeedZeroOptimizer_Stage3": _drop_zero3,
}
