"""Weights out of files into models, which scripts ask for: ``strategy.load_model``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from lightppo import tensor_file
from lightppo.zero3 import (
    find_engine,
    find_hf_model,
    forget_secondary_shard,
    full_shape,
    is_sharded,
    unwrap_model,
)


def load_model(
    strategy: Any, model: Any, path: str | os.PathLike[str], strict: bool = True
) -> None:
    """Load a weight file or Hugging Face folder into a model and its fp32 masters. Collective if prepared."""
    state_dict = _read_weights(Path(path))
    if state_dict.keys().isdisjoint(unwrap_model(model).state_dict().keys()):
        _, prefix = find_hf_model(model)
        state_dict = {f"{prefix}{name}": tensor for name, tensor in state_dict.items()}
    load_full_state_dict(model, state_dict, strict, str(path))


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return all weights of a Hugging Face folder or a weight file, on the CPU."""
    from safetensors.torch import load_file

    if not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not files:
        raise FileNotFoundError(f"{path} holds no *.safetensors and no pytorch_model*.bin")
    state_dict: dict[str, torch.Tensor] = {}
    for file in files:
        state_dict |= load_file(file) if file.suffix == ".safetensors" else tensor_file.read(file)
    return state_dict


@torch.no_grad()
def load_full_state_dict(
    model: Any, state_dict: dict[str, torch.Tensor], strict: bool, source: str
) -> None:
    """Copy whole parameters into a model, sharded or not, and into the optimizer's fp32 masters. Collective.

    Names are as in ``unwrap_model(model)``; tied parameters need one of theirs. ``source`` is for messages.
    """
    import deepspeed

    module = unwrap_model(model)
    engine = find_engine(model)
    tensors = module.state_dict(keep_vars=True)
    # Of tied names, the first counts.
    given = {tensors[name]: name for name in reversed(tensors) if name in state_dict}
    missing = [name for name, tensor in tensors.items() if tensor not in given]
    unexpected = sorted(state_dict.keys() - tensors.keys())
    if strict and (missing or unexpected):
        raise ValueError(
            f"{source} does not fit {type(module).__name__}: {len(missing)} weights missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}"
        )
    for tensor, name in reversed(given.items()):
        new = state_dict[name]
        if full_shape(tensor) != new.shape:
            raise ValueError(
                f"{source}: {name!r} is {tuple(new.shape)}, the model's {tuple(full_shape(tensor))}"
            )
        if is_sharded(tensor):
            with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                tensor.data.copy_(new)
            forget_secondary_shard(tensor)
        else:
            tensor.data.copy_(new)
    # Without this the next step would overwrite the loaded weights with the masters of the old ones.
    if engine is not None and hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()
