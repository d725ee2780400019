"""Collectives over plain Python values, tensors on any device, and dictionaries of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

REDUCE_OPS = ("mean", "sum", "max", "min")


def all_reduce(data: Any, op: str, device: torch.device) -> Any:
    """Reduces over all ranks; every rank gets the result.

    Args:
        data: a tensor of one shape on all ranks, a float, an int or bool, or a dictionary of these with the same keys
            on all ranks. Scalars of a dictionary travel together, as float64.
        op: "mean", "sum", "max" or "min".
        device: where this rank's process group communicates.

    Returns:
        The same structure. A tensor keeps shape, device and dtype, except that the mean of integers is float32 and
        booleans count as int64. A float stays a float; an int stays one except under "mean".

    Raises:
        ValueError: unknown op.
        TypeError: a value that cannot be reduced.
    """
    if op not in REDUCE_OPS:
        raise ValueError(f"op must be one of {', '.join(REDUCE_OPS)}, got {op!r}")
    if isinstance(data, dict):
        # Sorted, so that ranks that filled their dictionaries in another order still agree.
        scalars = sorted(key for key, value in data.items() if not isinstance(value, torch.Tensor | dict))
        others = {key: all_reduce(data[key], op, device) for key in sorted(data.keys() - set(scalars))}
        reduced = dict(zip(scalars, _reduce_scalars([data[key] for key in scalars], op, device)))
        return {key: others[key] if key in others else reduced[key] for key in data}
    if isinstance(data, torch.Tensor):
        return _reduce_tensor(data, op, device)
    return _reduce_scalars([data], op, device)[0]


def _reduce_scalars(values: list[Any], op: str, device: torch.device) -> list[float | int]:
    for value in values:
        if not isinstance(value, bool | int | float):
            raise TypeError(f"all_reduce takes tensors, numbers and dictionaries of them, got {type(value).__name__}")
    if not values:
        return []
    reduced = _reduce_tensor(torch.tensor([float(value) for value in values], dtype=torch.float64), op, device)
    keep_int = op != "mean"
    return [
        int(new) if keep_int and isinstance(old, int) else new
        for old, new in zip(values, reduced.tolist(), strict=True)
    ]


def _reduce_tensor(tensor: torch.Tensor, op: str, device: torch.device) -> torch.Tensor:
    buffer = tensor.detach().to(device).clone()
    if buffer.dtype == torch.bool:
        buffer = buffer.to(torch.int64)
    if op == "mean":
        if not buffer.is_floating_point():
            buffer = buffer.float()
        buffer /= dist.get_world_size()
    dist.all_reduce(buffer, op={"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM))
    return buffer.to(tensor.device)


def all_gather(data: Any, device: torch.device) -> Any:
    """Gathers from all ranks; every rank gets the result.

    Args:
        data: a tensor, a number, or a dictionary of these with the same keys on all ranks. Tensors may differ in
            their first dimension, which may be 0.
        device: where this rank's process group communicates.

    Returns:
        Tensors concatenated along their first dimension in rank order, in their dtype; a number or 0-d tensor becomes
        (world size,), a float in float64.
    """
    if isinstance(data, dict):
        gathered = {key: all_gather(data[key], device) for key in sorted(data)}
        return {key: gathered[key] for key in data}
    precise = torch.float64 if isinstance(data, float) else None
    tensor = data.detach() if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=precise)
    local = tensor.to(device)
    local = local.reshape(1) if local.dim() == 0 else local
    sizes = [int(size) for size in all_gather_object(local.shape[0])]
    padded = local.new_zeros((max(sizes), *local.shape[1:]))
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(tensor.device)


def all_gather_object(obj: Any) -> list[Any]:
    """Any picklable object of every rank, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, obj)
    return gathered


def broadcast_object(obj: Any, src: int = 0) -> Any:
    """Rank ``src``'s picklable object, on every rank."""
    holder = [obj]
    dist.broadcast_object_list(holder, src=src)
    return holder[0]
