"""Names and tensors of a Hugging Face checkpoint, read without building the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_SAFETENSORS, _TORCH = "model.safetensors", "pytorch_model.bin"


def checkpoint_files(path: str) -> dict[str, str]:
    """Which file holds which tensor, {name: file}, for a local folder or a hub id.

    Raises:
        FileNotFoundError: neither safetensors nor pytorch_model.bin weights are there.
    """
    for filename in (_SAFETENSORS, _TORCH):
        index = _find(path, f"{filename}.index.json")
        if index is not None:
            with open(index, encoding="utf-8") as handle:
                weight_map: Mapping[str, str] = json.load(handle)["weight_map"]
            shards = {shard: _find(path, shard) for shard in set(weight_map.values())}
            missing = sorted(shard for shard, file in shards.items() if file is None)
            if missing:
                raise FileNotFoundError(f"{path}: the index names {', '.join(missing)}, which is not there")
            return {name: str(shards[shard]) for name, shard in weight_map.items()}
        file = _find(path, filename)
        if file is not None:
            return dict.fromkeys(_names(file), file)
    raise FileNotFoundError(f"{path} has neither {_SAFETENSORS} nor {_TORCH} (nor their .index.json)")


def read_tensor(file: str, name: str) -> Tensor:
    """One tensor of one checkpoint file, on CPU."""
    if file.endswith(".safetensors"):
        from safetensors import safe_open

        with safe_open(file, framework="pt") as handle:
            return handle.get_tensor(name)
    return _torch_weights(file)[name]


def _find(path: str, filename: str) -> str | None:
    from transformers.utils import cached_file

    return cached_file(path, filename, _raise_exceptions_for_missing_entries=False)


def _names(file: str) -> list[str]:
    if file.endswith(".safetensors"):
        from safetensors import safe_open

        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    return list(_torch_weights(file))


def _torch_weights(file: str) -> dict[str, Any]:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
