"""Fewer kernels in a step of ZeRO 1 and 2: one call for the gradients of many parameters.

DeepSpeed 0.19 loops over the parameters, and launches up to 20 kernels for each. A GPU that is faster than its host waits
for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

# gradients that are copied side by side to be added at once: 128 MiB in 16 bits
_COPIED_ELEMENTS = 1 << 26
# float32 squares that a CPU adds one after the other: of 2²⁶ the norm would be 0.5% too small
_ADDED_ELEMENTS = 1 << 16

# of DeepSpeed's optimizers, what is replaced and what that reads
_NEEDED = {
    "BF16_Optimizer": "update_hp_grads get_grads_for_norm bf16_groups fp32_groups_gradients fp32_groups_gradients_flat",
    "DeepSpeedZeroOptimizer": "_add_to_grad_partition_buffer get_grad_norm_direct has_overflow cpu_offload "
    "reduce_independent_p_g_buckets_and_remove_grads dp_process_group partition_gradients get_param_id "
    "_use_compact_grad_partition_buffer _get_compact_grad_partition_slice",
}


def fuse_gradient_calls(optimizer: Any) -> None:
    """Replace the loops of this optimizer of DeepSpeed's; if it lacks what they need, warn and leave it as it is."""
    kind = type(optimizer).__name__
    needed = _NEEDED.get(kind, "").split()
    if missing := [name for name in needed if not hasattr(optimizer, name)]:
        text = "DeepSpeed's %s has no %s: a step launches more kernels than with deepspeed 0.19.8"
        logger.warning(text, kind, ", ".join(missing))
    elif kind == "BF16_Optimizer":  # ZeRO 1 in bf16: each rank has the fp32 sums of all gradients
        optimizer.update_hp_grads = partial(_add_all, optimizer)
        optimizer.get_grads_for_norm = partial(_for_norm, optimizer)
    elif kind == "DeepSpeedZeroOptimizer" and not optimizer.cpu_offload:
        optimizer._add_to_grad_partition_buffer = _add_cast
        optimizer.get_grad_norm_direct = partial(_norm_over_ranks, optimizer)
        optimizer.has_overflow = _left_to_the_norm
        is_alone = dist.get_world_size(optimizer.dp_process_group) == 1
        if is_alone and optimizer.partition_gradients:  # ZeRO 2
            add_alone = partial(_add_alone, optimizer)
            optimizer.reduce_independent_p_g_buckets_and_remove_grads = add_alone


def collects_nothing(stage: int, world_size: int, sums_in_fp32: bool, offload: bool) -> bool:
    """Tell whether an optimizer adds each gradient to its sum at once, and so has no use for DeepSpeed's bucket."""
    return stage == 2 and world_size == 1 and sums_in_fp32 and not offload


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all, float64; on a CPU in pieces, which is faster than in float64."""
    whole = list(gradients)
    if not whole:
        return torch.zeros((), dtype=torch.double)
    if whole[0].is_cpu:
        dtype = torch.promote_types(whole[0].dtype, torch.float32)
        pieces = [piece for tensor in whole for piece in tensor.reshape(-1).split(_ADDED_ELEMENTS)]
        norms = torch._foreach_norm(pieces, 2, dtype)
    else:
        norms = torch._foreach_norm(whole, 2, torch.double)
    return torch.linalg.vector_norm(torch.stack(norms), dtype=torch.double)


# -- ZeRO 1 in bf16 ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def _add_all(optimizer: Any, clear_lp_grads: bool = False) -> None:
    """Add the parameters' gradients to the fp32 sums, and drop them: the next pass need not add to them."""
    for group, parameters in enumerate(optimizer.bf16_groups):
        for parameter, gradient_sum in zip(parameters, optimizer.fp32_groups_gradients[group]):
            if parameter.grad is not None:
                parameter._hp_grad = gradient_sum  # where deepspeed.utils.safe_get_full_grad looks
        for start, gradients in _side_by_side(parameters):
            joined = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
            optimizer.fp32_groups_gradients_flat[group][start : start + len(joined)].add_(joined)


def _side_by_side(parameters: Iterable[Any]) -> Iterator[tuple[int, list[Tensor]]]:
    """Take flat gradients of neighbours off their parameters; yield the place of the first, and them."""
    place = size = 0
    gradients: list[Tensor] = []
    for parameter in parameters:
        elements = parameter.numel()
        if gradients and (parameter.grad is None or size + elements > _COPIED_ELEMENTS):
            yield place - size, gradients
            size, gradients = 0, []
        if parameter.grad is not None:
            gradients.append(parameter.grad.reshape(-1))
            parameter.grad = None
            size += elements
        place += elements
    if gradients:
        yield place - size, gradients


def _for_norm(optimizer: Any, for_clipping: bool = False) -> Any:
    """Return what DeepSpeed clips, the sums, or what it takes the norm of: their norm, which is its own norm."""
    if for_clipping:
        return optimizer.fp32_groups_gradients_flat
    return [total_norm(chain.from_iterable(optimizer.fp32_groups_gradients))], {}


# -- ZeRO 1 and 2, each rank with its shard of the sums ----------------------------------------------------------------


def _add_cast(gradient_sum: Tensor | None, gradient: Tensor) -> None:
    """Add to a sum of another type, without a copy in between; None: the sum is another rank's."""
    if gradient_sum is not None:
        gradient_sum.add_(gradient)


def _add_alone(optimizer: Any, parameter: Any, group: int) -> None:
    """Add a parameter's gradient to its sum as soon as it is there: one rank need not collect it for others."""
    if not optimizer._use_compact_grad_partition_buffer(group):  # in float32
        type(optimizer).reduce_independent_p_g_buckets_and_remove_grads(optimizer, parameter, group)
        return
    place = group, 0, optimizer.get_param_id(parameter), parameter.numel()
    optimizer._get_compact_grad_partition_slice(*place).add_(parameter.grad.view(-1))
    parameter.grad = None


def _norm_over_ranks(
    optimizer: Any, gradients: Iterable[Tensor], parameters: Any, norm_type: float = 2
) -> Tensor:
    """Return the L2 norm of a group of parameters, of all shards; what fills a shard up is 0."""
    square = total_norm(gradients).square().float()
    dist.all_reduce(square, group=optimizer.dp_process_group)
    return square.sqrt()


def _left_to_the_norm(partition_gradients: bool = True) -> bool:
    """Return False: DeepSpeed also skips a step if the norm, which it takes next, is not finite."""
    return False
