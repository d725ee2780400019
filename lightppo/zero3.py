"""Models in their engines: finding the module inside, gathering shards, whole state dicts.

A class with ``engine_attribute = "model"`` (the Actor) stays outermost and keeps its engine under that attribute; any
other module sits inside its engine. Uses private parts of DeepSpeed 0.19 (``ds_tensor``, ``DeepSpeedZeRoOffload``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

# -- lightppo model → DeepSpeed engine → module → Hugging Face model ---------------------------------------------------


def _engine_or_module(model: Any) -> Any:
    """Return the engine that a class of model keeps under its ``engine_attribute``; else the model itself."""
    attribute = getattr(type(model), "engine_attribute", None)
    return getattr(model, attribute) if attribute else model


def is_engine(model: Any) -> bool:
    """Tell whether this is a DeepSpeed engine, without importing DeepSpeed."""
    return any(cls.__name__ == "DeepSpeedEngine" for cls in type(model).__mro__)


def find_engine(model: Any) -> Any | None:
    """Return the DeepSpeed engine of a prepared model, None for a plain module."""
    inner = _engine_or_module(model)
    return inner if is_engine(inner) else None


AWAY: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()
"""Engines whose optimizer states somebody has put elsewhere for a time → what brings them back."""


def get_engine(model: Any, what_for: str) -> Any:
    """Return the engine of a prepared model, with its optimizer states; for a plain one, the error says what needed it."""
    engine = find_engine(model)
    if engine is None:
        raise ValueError(
            f"{what_for} needs a model that went through strategy.prepare(), got {type(model).__name__}"
        )
    if engine in AWAY:
        AWAY[engine]()
    return engine


def has_optimizer(engine: Any) -> bool:
    """Tell whether the engine trains; engines of frozen models have a stand-in or nothing."""
    optimizer = getattr(engine, "optimizer", None)
    # At bf16 a replicated model's stand-in also has parameter groups, but says that it is a stand-in.
    return hasattr(optimizer, "param_groups") and getattr(optimizer, "using_real_optimizer", True)


def zero_stage_of(engine: Any | None) -> int:
    """Return the ZeRO stage of an engine, 0 for None."""
    if engine is None:
        return 0
    return int(engine.zero_optimization_stage())


def unwrap_model(model: Any) -> nn.Module:
    """Return the module without its engine; for a class with ``engine_attribute``, the module under that attribute."""
    inner = _engine_or_module(model)
    return inner.module if is_engine(inner) else inner


def _hf_models(module: nn.Module) -> dict[str, nn.Module]:
    """Return the Hugging Face models by name: a module itself, as "", or those that it directly holds."""
    children = {"": module, **dict(module.named_children())}
    models = {
        name: child
        for name, child in children.items()
        if hasattr(child, "save_pretrained") and hasattr(child, "config")
    }
    return {"": module} if "" in models else models


def find_hf_model(model: Any) -> tuple[nn.Module, str]:
    """Return the Hugging Face model inside a wrapper, and the prefix of its parameters in ``unwrap_model(model)``."""
    module = unwrap_model(model)
    models = _hf_models(module)
    if len(models) != 1:
        names = ", ".join(models) or "none"
        raise ValueError(
            f"{type(module).__name__} must hold one Hugging Face model to be saved or loaded, not: {names}"
        )
    ((name, hf_model),) = models.items()
    return hf_model, f"{name}." if name else ""


def own_part(param: nn.Parameter) -> torch.Tensor:
    """Return this rank's part, without the padding of the last shard, which is never written."""
    if not is_sharded(param):
        return param.detach()
    size = param.ds_tensor.numel()
    remaining = param.ds_numel - size * dist.get_rank(param.ds_process_group)
    return param.ds_tensor[: max(0, min(size, remaining))]


def find_adapters(model: Any) -> Any | None:
    """Return the ``LoraExport`` of the Hugging Face model inside, or None; ValueError for 4-bit weights without adapters."""
    module = unwrap_model(model)
    models = list(_hf_models(module).values())
    adapters = getattr(models[0], "lora", None) if len(models) == 1 else None
    if adapters is None and any(hasattr(param, "quant_state") for param in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} has weights in 4 bits and no adapters, so it cannot be saved or sent: call "
            "add_adapters, or load it without load_in_4bit"
        )
    return adapters


def find_whole(model: Any) -> Any | None:
    """Return the checkpoint with towers that the Hugging Face model inside is a part of, or None.

    It is a :class:`lightppo.models.multimodal.whole_checkpoint.Whole`.
    """
    models = list(_hf_models(unwrap_model(model)).values())
    if len(models) == 1:
        return getattr(models[0], "whole", None)
    return None


# -- shards ------------------------------------------------------------------------------------------------------------


def is_sharded(param: torch.Tensor) -> bool:
    """Tell whether this rank holds a ZeRO-3 shard of the parameter."""
    return hasattr(param, "ds_tensor")


def full_shape(param: torch.Tensor) -> torch.Size:
    """Return the shape of the whole parameter, sharded or not."""
    if is_sharded(param):
        return torch.Size(param.ds_shape)
    return param.shape


def forget_secondary_shard(param: torch.Tensor) -> None:
    """Forget it after writing into ``ds_tensor``: forwards prefer hpZ's copy if there is one."""
    # DeepSpeed makes these copies in every ZeRO-3 engine of a process as soon as one engine asks for hpZ.
    if getattr(param, "ds_secondary_tensor", None) is not None:
        param.ds_secondary_tensor = None


def shard_of(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the flat ``whole``, cut as the sharded parameter is: equal slices, zero-padded."""
    size = param.ds_tensor.numel()
    start = size * torch.distributed.get_rank(param.ds_process_group)
    part = whole[start : start + size]
    return torch.nn.functional.pad(part, (0, size - part.numel()))


def parameter_count(model: nn.Module, trained_only: bool = False) -> int:
    """Return the number of (trained) parameters of a model, counted in full even if sharded or held in 4 bits."""
    count = 0
    for parameter in model.parameters():
        if hasattr(parameter, "quant_state"):
            shape = parameter.quant_state.shape
        else:
            shape = full_shape(parameter)
        if parameter.requires_grad or not trained_only:
            count += shape.numel()
    return count


def gathered_parameters(model: Any) -> AbstractContextManager[nn.Module]:
    """Hold the whole model on every rank, gathered once instead of per layer and token; gives it without its engine.

    ZeRO-3's hooks are off meanwhile, so ranks may run different numbers of forwards, as in generation, but no training
    step. They come back at the end, even after an error. Changes nothing below stage 3 or inside itself.
    """
    module = unwrap_model(model)
    engine = find_engine(model)
    if zero_stage_of(engine) != 3 or getattr(engine, "_lightppo_gathered", False):
        return nullcontext(module)
    return _gathered(engine, module)


@contextmanager
def _gathered(engine: Any, module: nn.Module) -> Iterator[nn.Module]:
    import deepspeed
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    # The hooks' owner is a member of the optimizer, or stands in its place if there is none.
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    # waits for running prefetches and forgets which layers are active
    offload.partition_all_parameters()
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        for hook in (*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook):
            hook.remove()
        offload.forward_hooks.clear()
        offload.backward_hooks.clear()
        engine._lightppo_gathered = True
        try:
            yield module
        finally:
            engine._lightppo_gathered = False
            depth = len(FWD_MODULE_STACK)
            offload.setup_zero_stage3_hooks()
            del FWD_MODULE_STACK[depth:]  # its root was pushed when the engine was made


def full_state_dict(model: Any, is_rank_0: bool) -> dict[str, torch.Tensor] | None:
    """Return whole parameters and buffers on rank 0's CPU; tied parameters stay one tensor. Collective under ZeRO-3."""
    engine = find_engine(model)
    if zero_stage_of(engine) == 3:
        return engine._zero3_consolidated_16bit_state_dict()
    if not is_rank_0:
        return None
    tensors = unwrap_model(model).state_dict(keep_vars=True)
    copies = {tensor: tensor.detach().to("cpu", copy=True) for tensor in set(tensors.values())}
    return {name: copies[tensor] for name, tensor in tensors.items()}
