"""The actor's weights as its Hugging Face checkpoint has them, for engines that keep a copy of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightppo.models.lora import layer_of
from lightppo.strategy.zero3 import find_adapters, find_engine, find_hf_model, full_shape, zero_stage_of

BUCKET_NUMEL = 1 << 26
"""Parameters that are gathered together under ZeRO-3; one module's are never parted."""


@torch.no_grad()
def full_weights(actor: Any, strategy: Any = None, bucket_numel: int = BUCKET_NUMEL) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of the actor's checkpoint, in the order of its modules. Collective.

    All ranks must iterate together and to the end: under ZeRO-3 every bucket is gathered by all of them. Tied weights
    come under each of their names. Below ZeRO-3 the tensors are the actor's own, not copies: they change with the next
    optimizer step. LoRA adapters are merged into new tensors; the frozen weights stay as they are.

    Args:
        actor: prepared or plain.
        strategy: that of the actor; weights and their sharding are found through the actor itself.
        bucket_numel: elements gathered at once under ZeRO-3; what of them is held beyond that is the caller's.

    Yields:
        (name, tensor): as ``save_pretrained`` would name and shape them, in the trainer's type, on its device.
    """
    model, _ = find_hf_model(actor)
    sharded = zero_stage_of(find_engine(actor)) == 3
    convert, adapters = _checkpoint_names(model), find_adapters(model)
    for bucket in _buckets(model, bucket_numel):
        whole = _gathered_copies(bucket) if sharded else {name: tensor.detach() for name, tensor in bucket.items()}
        yield from convert(whole if adapters is None else adapters.merged(whole)).items()


def _buckets(model: nn.Module, bucket_numel: int) -> Iterator[dict[str, Tensor]]:
    """Parameters and saved buffers of whole modules, up to ``bucket_numel`` elements, one module at least."""
    saved = model.state_dict(keep_vars=True)  # every name of a tied weight, and only buffers that are saved
    bucket: dict[str, Tensor] = {}
    numel, last_module = 0, None
    for name, tensor in saved.items():
        module = layer_of(name)
        if bucket and module != last_module and numel + full_shape(tensor).numel() > bucket_numel:
            yield bucket
            bucket, numel = {}, 0
        bucket[name] = tensor
        numel, last_module = numel + full_shape(tensor).numel(), module
    if bucket:
        yield bucket


def _gathered_copies(bucket: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of whole tensors: what ZeRO-3 gathers is gone at the end of the context."""
    import deepspeed

    params = [tensor for tensor in bucket.values() if isinstance(tensor, nn.Parameter)]
    with deepspeed.zero.GatheredParameters(list({id(p): p for p in params}.values())):
        copies = {id(tensor): tensor.detach().clone() for tensor in bucket.values()}
    return {name: copies[id(tensor)] for name, tensor in bucket.items()}


def _checkpoint_names(model: nn.Module) -> Any:
    """The step from names and shapes in memory to those of checkpoints (transformers fuses experts, for example)."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4: the same in memory as on disk
        return lambda tensors: tensors
    return lambda tensors: revert_weight_conversion(model, tensors)
