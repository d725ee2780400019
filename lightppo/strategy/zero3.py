"""What is special about sharded parameters: gathering them for generation, moving averages of shards, state dicts.

Uses private parts of DeepSpeed 0.19 (hooks of ``DeepSpeedZeRoOffload``, ``ds_tensor``), all of them in this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightppo.strategy.engines import find_engine, unwrap_model, zero_stage_of


def is_sharded(param: torch.Tensor) -> bool:
    """True for a parameter of which this rank holds a ZeRO-3 shard."""
    return hasattr(param, "ds_tensor")


def full_shape(param: torch.Tensor) -> torch.Size:
    """Shape of the whole parameter, sharded or not."""
    return torch.Size(param.ds_shape) if is_sharded(param) else param.shape


def forget_secondary_shard(param: torch.Tensor) -> None:
    """To be called after writing into ``ds_tensor``: forwards read hpZ's copy of it as long as there is one.

    DeepSpeed makes such copies in every ZeRO-3 engine of a process in which one engine asked for hpZ.
    """
    if getattr(param, "ds_secondary_tensor", None) is not None:
        param.ds_secondary_tensor = None


def parameter_count(model: nn.Module, trained_only: bool = False) -> int:
    """Parameters of a model, or those of them that train; whole also where they are sharded or held in 4 bits."""
    count = sum(full_shape(p).numel() for p in model.parameters() if p.requires_grad or not trained_only)
    return count if trained_only else count + sum(getattr(m, "packed_weights", 0) for m in model.modules())


@contextmanager
def gathered_parameters(model: Any) -> Iterator[nn.Module]:
    """Holds the whole model on every rank for the duration: gathered once, not per layer and token.

    ZeRO-3's hooks are removed meanwhile, so that ranks may run different numbers of forwards, as generation does.
    Sharding and hooks come back at the end, also when the body raises. No training step inside. Below stage 3, and
    nested in itself, it changes nothing.

    Args:
        model: a prepared model, or a plain module.

    Yields:
        The module without its engine, to call ``generate`` or ``forward`` on.
    """
    module = unwrap_model(model)
    engine = find_engine(model)
    if zero_stage_of(engine) != 3 or getattr(engine, "_lightppo_gathered", False):
        yield module
        return

    import deepspeed

    # With an optimizer the hooks belong to a member of it, without one they are all that is there.
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    offload.partition_all_parameters()  # waits for prefetches under way and forgets which layers are active
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        _remove_hooks(offload)
        engine._lightppo_gathered = True
        try:
            yield module
        finally:
            engine._lightppo_gathered = False
            _register_hooks(offload)


def _remove_hooks(offload: Any) -> None:
    for hook in (*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook):
        hook.remove()
    offload.forward_hooks.clear()
    offload.backward_hooks.clear()


def _register_hooks(offload: Any) -> None:
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    depth = len(FWD_MODULE_STACK)
    offload.setup_zero_stage3_hooks()
    del FWD_MODULE_STACK[depth:]  # its root was pushed when the engine was made


@torch.no_grad()
def moving_average(model: Any, ema_model: Any, beta: float, device: torch.device | str | None = None) -> None:
    """ema ← beta · ema + (1 − beta) · model, parameter by parameter, in the wider precision of the two.

    Two models sharded in the same way, and a whole model averaged into shards, need no communication; a sharded model
    averaged into a whole one is gathered, one parameter at a time. The weights are those that the model's forward
    uses: under bf16 not the optimizer's fp32 masters. Buffers that are part of a state dict are copied.

    Args:
        model: the model that trains.
        ema_model: its average, of the same architecture; keep it in fp32: at beta near 1 the steps vanish in bf16.
        beta: weight of the past, in [0, 1]; 0 makes an exact copy, rounded only where the average is less precise.
        device: where the arithmetic takes place; None is where the average lives.

    Raises:
        ValueError: beta out of range, or the two models differ in names or shapes.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"ema beta must lie in [0, 1], got {beta}")
    source, target = unwrap_model(model), unwrap_model(ema_model)
    source_params, target_params = dict(source.named_parameters()), dict(target.named_parameters())
    _check_same_architecture(source_params, target_params)
    whole = zero_stage_of(find_engine(model)) == 3 and not any(map(is_sharded, target_params.values()))
    for name, ema_param in target_params.items():
        param = source_params[name]
        if whole:
            with _gather(param):
                new = param.detach().clone()
        else:
            new = _matching_part(param, ema_param)
        old = ema_param.ds_tensor if is_sharded(ema_param) else ema_param.data
        old.copy_(_average(old, new, beta, device or old.device))
        forget_secondary_shard(ema_param)
    kept, buffers = target.state_dict(keep_vars=True).keys(), dict(source.named_buffers())
    for name, ema_buffer in target.named_buffers():
        if name in kept:  # the others are derived, some anew in every forward
            ema_buffer.copy_(buffers[name])


def _average(old: torch.Tensor, new: torch.Tensor, beta: float, place: torch.device | str) -> torch.Tensor:
    """beta · old + (1 − beta) · new. At beta 0 the old values play no part, not even when they are not finite."""
    if beta == 0.0:
        return new
    dtype = torch.promote_types(old.dtype, new.dtype)
    return torch.lerp(old.to(place, dtype), new.to(place, dtype), 1.0 - beta)


def _matching_part(param: torch.Tensor, ema_param: torch.Tensor) -> torch.Tensor:
    """The elements of ``param`` that this rank holds of ``ema_param``."""
    if is_sharded(param) == is_sharded(ema_param):
        if not is_sharded(param):
            return param.data
        if param.ds_tensor.numel() != ema_param.ds_tensor.numel():
            raise ValueError("the model and its EMA are sharded over different numbers of ranks; set the same --zpg")
        return param.ds_tensor
    # A whole parameter, and the average's shard of it: shards are equal slices of the flat parameter, zero-padded.
    size = ema_param.ds_tensor.numel()
    start = size * torch.distributed.get_rank(ema_param.ds_process_group)
    part = param.data.flatten()[start : start + size]
    return torch.nn.functional.pad(part, (0, size - part.numel()))


def _check_same_architecture(source: dict[str, nn.Parameter], target: dict[str, nn.Parameter]) -> None:
    if source.keys() != target.keys():
        odd = sorted(source.keys() ^ target.keys())
        raise ValueError(f"the model and its EMA differ in {len(odd)} parameters, first {odd[0]!r}")
    for name, param in source.items():
        if full_shape(param) != full_shape(target[name]):
            raise ValueError(
                f"the model and its EMA differ in the shape of {name!r}: "
                f"{tuple(full_shape(param))} and {tuple(full_shape(target[name]))}"
            )


@contextmanager
def _gather(param: nn.Parameter, modifier_rank: int | None = None) -> Iterator[None]:
    import deepspeed

    with deepspeed.zero.GatheredParameters([param], modifier_rank=modifier_rank):
        yield


def full_state_dict(model: Any, is_rank_0: bool) -> dict[str, torch.Tensor] | None:
    """Whole parameters and persistent buffers on the CPU, on rank 0; None elsewhere. Collective under ZeRO-3.

    Tied parameters stay one tensor under several names.
    """
    engine = find_engine(model)
    if zero_stage_of(engine) == 3:
        return engine._zero3_consolidated_16bit_state_dict()
    if not is_rank_0:
        return None
    copies: dict[int, torch.Tensor] = {}
    state_dict = {}
    for name, tensor in unwrap_model(model).state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().cpu().clone()
        state_dict[name] = copies[id(tensor)]
    return state_dict


@torch.no_grad()
def load_full_state_dict(model: Any, state_dict: dict[str, torch.Tensor], strict: bool, source: str) -> None:
    """Copies whole parameters into a model, sharded or not, and into the optimizer's fp32 masters. Collective.

    Args:
        model: prepared or plain.
        state_dict: names as in ``unwrap_model(model)``; the same on every rank. One name is enough for tied parameters.
        strict: every parameter and every entry must find its partner.
        source: where the state dict comes from, for messages.

    Raises:
        ValueError: names or shapes do not fit.
    """
    module, engine = unwrap_model(model), find_engine(model)
    names_of: dict[int, list[str]] = {}
    tensors = dict(module.state_dict(keep_vars=True))
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), []).append(name)
    missing = [names[0] for names in names_of.values() if not any(name in state_dict for name in names)]
    unexpected = sorted(state_dict.keys() - tensors.keys())
    if strict and (missing or unexpected):
        raise ValueError(
            f"{source} does not fit {type(module).__name__}: {len(missing)} weights missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}"
        )
    for names in names_of.values():
        name = next((name for name in names if name in state_dict), None)
        if name is None:
            continue
        tensor, new = tensors[name], state_dict[name]
        if full_shape(tensor) != new.shape:
            raise ValueError(f"{source}: {name!r} is {tuple(new.shape)}, the model's {tuple(full_shape(tensor))}")
        if is_sharded(tensor):
            with _gather(tensor, modifier_rank=0):
                tensor.data.copy_(new)
            forget_secondary_shard(tensor)
        else:
            tensor.data.copy_(new)
    # Without this the next step would overwrite the loaded weights with the masters of the old ones.
    if engine is not None and hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()
