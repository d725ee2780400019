"""What trials of a model share: is it right in a row, in a batch, with other kernels?"""

from __future__ import annotations

import textwrap
import traceback
from pathlib import Path

import torch
from torch import Tensor

from lightppo.errors import UserError


def is_models_own(error: Exception) -> bool:
    """Whether an error is of the model's code, not of a lack of memory or of a lost rank."""
    others = (
        UserError,
        NotImplementedError,
        MemoryError,
        torch.OutOfMemoryError,
        torch.distributed.DistError,
    )
    return not isinstance(error, others) and "gloo/transport" not in str(error)


def one_line(error: Exception) -> str:
    """Its type and message, shortened; without a message the line of code that raised it."""
    text = str(error)
    if not text and (frames := traceback.extract_tb(error.__traceback__)):
        text = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line}"
    return textwrap.shorten(f"{type(error).__name__}: {text}", 200, placeholder=" …")


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether outputs are equal but for rounding; False where any is NaN."""
    difference = ((one.float() - other.float()).abs().mean() / other.float().abs().mean()).item()
    # Rounding alone gives 1e-6 in fp32 (1e-3 with TF32) and 1e-2 in bf16; a neighbour in sight gives 0.1 and more.
    return difference <= (3e-3 if one.dtype == torch.float32 else 1e-1)
