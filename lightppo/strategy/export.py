"""Models in Hugging Face format: written whole or not at all, read into prepared and plain models."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightppo.strategy.checkpoint import on_rank_0
from lightppo.strategy.engines import find_adapters, find_hf_model, unwrap_model
from lightppo.strategy.zero3 import full_state_dict, load_full_state_dict

logger = logging.getLogger(__name__)

ADAPTER = "adapter"  # folder inside an export, of a model with adapters
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_MODEL_CARD = """---
library_name: transformers
tags:
- lightppo
---

# {name}

A `{architecture}` saved by lightppo.

```python
from transformers import {auto_class}

model = {auto_class}.from_pretrained("{name}")
```
"""


def save_model(model: Any, tokenizer: Any | None, output_dir: str | os.PathLike[str]) -> None:
    """Writes a model that ``from_pretrained`` loads. Collective. See ``DeepspeedStrategy.save_model``."""
    hf_model, prefix = find_hf_model(model)
    state_dict = full_state_dict(model, dist.get_rank() == 0)
    on_rank_0(lambda: _write(hf_model, prefix, state_dict, tokenizer, Path(output_dir)), f"save {output_dir}")


def _write(hf_model: Any, prefix: str, state_dict: Any, tokenizer: Any | None, output_dir: Path) -> None:
    state_dict = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
    adapters = find_adapters(hf_model)
    whole = state_dict if adapters is None else adapters.merged(state_dict)
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file, not a directory")
    inside = output_dir.is_dir() and any(output_dir.iterdir())
    # A folder that holds other things (checkpoints, say) is filled file by file; any other appears as a whole.
    staging = output_dir / ".saving" if inside else output_dir.with_name(f".{output_dir.name}.saving")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        with _savable_generation_config(hf_model), _no_progress_bar():
            hf_model.save_pretrained(str(staging), state_dict=whole)
        if adapters is not None:
            adapters.write(state_dict, staging / ADAPTER)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(staging))
        causal = hf_model.can_generate()
        (staging / "README.md").write_text(
            _MODEL_CARD.format(
                name=output_dir.name,
                architecture=type(hf_model).__name__,
                auto_class="AutoModelForCausalLM" if causal else "AutoModelForSequenceClassification",
            )
        )
        if inside:
            _move_files(staging, output_dir)
        else:
            os.replace(staging, output_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _savable_generation_config(hf_model: Any) -> Iterator[None]:
    """Some hub models carry sampling settings without ``do_sample``, which transformers reads but refuses to write."""
    original = getattr(hf_model, "generation_config", None)
    if original is None:
        yield
        return
    try:
        original.validate(strict=True)
    except ValueError as error:
        logger.warning("saving the generation config with do_sample=True, since it has sampling settings: %s", error)
        hf_model.generation_config = copy.deepcopy(original)
        hf_model.generation_config.do_sample = True
    try:
        yield
    finally:
        hf_model.generation_config = original


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers shows one per save, also where nobody looks."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _move_files(staging: Path, output_dir: Path) -> None:
    new = {path.name for path in staging.iterdir()}
    for path in staging.iterdir():
        target = output_dir / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
    for pattern in _WEIGHT_FILES:  # shards of an earlier, larger save would be taken for part of this model
        for path in output_dir.glob(pattern):
            if path.name not in new:
                path.unlink()


def load_model(model: Any, path: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Loads weights into a model. Collective once prepared. See ``DeepspeedStrategy.load_model``."""
    state_dict = read_weights(path)
    hf_prefix = ""
    names = unwrap_model(model).state_dict().keys()
    if state_dict.keys().isdisjoint(names):
        _, hf_prefix = find_hf_model(model)
    load_full_state_dict(model, {f"{hf_prefix}{name}": t for name, t in state_dict.items()}, strict, str(path))


def read_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """All weights of a Hugging Face folder, or of one ``.safetensors``, ``.bin`` or ``.pt`` file, on the CPU.

    Raises:
        FileNotFoundError: no such path, or no weights in it.
    """
    from safetensors.torch import load_file

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
        if not files:
            raise FileNotFoundError(f"{path} holds no *.safetensors and no pytorch_model*.bin")
    state_dict: dict[str, torch.Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            state_dict |= load_file(file)
        else:
            state_dict |= torch.load(file, map_location="cpu", weights_only=True)
    return state_dict
