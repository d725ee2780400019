"""The tensors of a checkpoint, in whichever files they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from lightppo import tensor_file


def checkpoint_files(path: str) -> dict[str, str]:
    """Which file of a local folder or a hub id holds which tensor, {name: file}."""
    find = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
    for filename in ("model.safetensors", "pytorch_model.bin"):
        if (index := find(f"{filename}.index.json")) is not None:
            return json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        if (whole := find(filename)) is not None:
            return dict.fromkeys(open_tensors(whole)[0], filename)
    return {}


def open_tensors(file: str) -> tuple[Iterable[str], Callable[[str], Tensor]]:
    """Names of a checkpoint file's tensors, and a function that reads one by name, on the CPU."""
    if file.endswith(".safetensors"):
        opened = safe_open(file, framework="pt")
        return opened.keys(), opened.get_tensor
    weights = tensor_file.read(file, mapped=True)
    return weights.keys(), weights.__getitem__
