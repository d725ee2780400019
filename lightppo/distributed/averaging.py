"""Moving averages of a model's weights, sharded or not: ``strategy.moving_average``."""

from __future__ import annotations

from typing import Any

import torch

from lightppo.distributed.device import on_cuda
from lightppo.zero3 import (
    find_engine,
    forget_secondary_shard,
    full_shape,
    is_sharded,
    shard_of,
    unwrap_model,
    zero_stage_of,
)


def moving_average(
    strategy: Any,
    model: Any,
    ema_model: Any,
    beta: float = 0.992,
    device: torch.device | str | None = None,
) -> None:
    """Set ema ← beta · ema + (1 − beta) · model; beta 0 copies. See ``average_into``.

    Does nothing between an optimizer step's micro batches. Collective if a sharded model goes into a whole average.
    Where engines run on the CPU, so does this, also for ``device="cuda"``.
    """
    if device is not None and torch.device(device).type == "cuda" and not on_cuda():
        device = None
    engine = find_engine(model)
    if engine is None or not strategy._accumulation.get(engine, (0,))[0]:
        average_into(model, ema_model, beta, device)


@torch.no_grad()
def average_into(
    model: Any, ema_model: Any, beta: float, device: torch.device | str | None = None
) -> None:
    """Set ema ← beta · ema + (1 − beta) · model, parameter by parameter, on ``device``; beta 0 copies.

    Only a sharded model averaged into a whole one is gathered, one parameter at a time. The weights are the forward's:
    under bf16 not the optimizer's fp32 masters. Keep the average in fp32: at beta near 1 the steps vanish in bf16.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"ema beta must lie in [0, 1], got {beta}")
    import deepspeed

    source = unwrap_model(model)
    target = unwrap_model(ema_model)
    source_params = dict(source.named_parameters())
    target_params = dict(target.named_parameters())
    shapes = [
        {name: full_shape(p) for name, p in params.items()}
        for params in (source_params, target_params)
    ]
    if odd := sorted(
        name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name)
    ):
        raise ValueError(f"the model and its EMA differ in {len(odd)} parameters, first {odd[0]!r}")
    whole = zero_stage_of(find_engine(model)) == 3 and not any(
        map(is_sharded, target_params.values())
    )
    for name, ema_param in target_params.items():
        param = source_params[name]
        if whole:
            with deepspeed.zero.GatheredParameters([param]):
                new = param.detach().clone()
        else:
            new = _matching_part(param, ema_param)
        old = ema_param.ds_tensor if is_sharded(ema_param) else ema_param.data
        if beta != 0.0:  # at 0 the old values do not count, even if they are not finite
            place = device or old.device
            dtype = torch.promote_types(old.dtype, new.dtype)
            new = torch.lerp(old.to(place, dtype), new.to(place, dtype), 1.0 - beta)
        old.copy_(new)
        forget_secondary_shard(ema_param)
    saved = target.state_dict(keep_vars=True).keys()
    buffers = dict(source.named_buffers())
    for name, ema_buffer in target.named_buffers():
        if name in saved:  # the others are derived, some in every forward
            ema_buffer.copy_(buffers[name])


def _matching_part(param: torch.Tensor, ema_param: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``param`` that belong to this rank's part of ``ema_param``."""
    if is_sharded(param) == is_sharded(ema_param):
        if not is_sharded(param):
            return param.data
        if param.ds_tensor.numel() != ema_param.ds_tensor.numel():
            raise ValueError(
                "the model and its EMA are sharded over different numbers of ranks; set the same --zpg"
            )
        return param.ds_tensor
    return shard_of(ema_param, param.data.flatten())
