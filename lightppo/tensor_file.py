"""Files that ``torch.save`` wrote, read without running what is in them: the only place that calls ``torch.load``.

A pickle may name any function and call it. Here a file holds tensors, plain values, and classes that the caller lists.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightppo.errors import CheckpointError

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FORCE_NOT = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_NAMED = re.compile(r"GLOBAL (\S+)")  # in torch's message


def read(path: str | os.PathLike[str], classes: Iterable[type] = (), mapped: bool = False) -> Any:
    """Return what a file holds, on the CPU.

    Args:
        classes: that it may hold beside tensors and plain values.
        mapped: tensors come from the disk when they are used.

    Raises:
        CheckpointError: the file names something else, or cannot be read.
    """
    import torch

    path = Path(path)
    # Files that old versions of torch wrote are no zip archives, and cannot be mapped.
    mapped = mapped and zipfile.is_zipfile(path)
    try:
        with _allowed(classes):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # each damage has its own in torch and in pickle
        raise CheckpointError(explained(path, error)) from error


def deepspeed_classes() -> list[type]:
    """Return what files of DeepSpeed hold beside tensors and plain values."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def read_deepspeed(path: str | os.PathLike[str]) -> Any:
    """Return what a file of a checkpoint holds; its tensors come from the disk when they are used."""
    return read(path, deepspeed_classes(), mapped=True)


def explained(path: str | os.PathLike[str], error: Exception) -> str:
    """Say why a file was not loaded, in one line, out of the error of a ``torch.load`` with ``weights_only``."""
    text = str(error).rpartition("WeightsUnpickler error: ")[2]
    if isinstance(error, pickle.UnpicklingError) and (match := _NAMED.search(text)):
        return (
            f"{path} is not loaded: it names {match[1]}, which is no tensor and no plain value, and loading it could "
            "run code. lightppo did not write this file like that: use a copy that you trust"
        )
    reason = next(filter(None, text.splitlines()), "no reason given")
    return f"{path} cannot be read ({type(error).__name__}: {reason}): it is damaged, or another kind of file"


@contextmanager
def _allowed(classes: Iterable[type]) -> Iterator[None]:
    """Allow classes as torch's ``safe_globals`` does, whose end takes away what was allowed before it, too."""
    from torch.serialization import get_safe_globals, safe_globals

    with safe_globals(list(set(classes) - set(get_safe_globals()))):
        yield


@contextmanager
def others_read_safely(classes: Iterable[type] = ()) -> Iterator[None]:
    """Keep a library's own ``torch.load`` inside from running code either, whatever it asks for."""
    previous_values = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    try:
        with _allowed(classes):
            yield
    finally:
        del os.environ[_FORCE]
        os.environ.update(
            {name: value for name, value in previous_values.items() if value is not None}
        )
