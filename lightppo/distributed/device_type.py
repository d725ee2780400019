"""The device can train in the type of the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightppo.distributed.distributed import on_cuda
from lightppo.errors import LaunchError

logger = logging.getLogger(__name__)


@contextmanager
def trainable_type(strategy: Any) -> Iterator[None]:
    """LaunchError, once the ranks have met, for a type that the device lacks; a warning for a slow one."""
    yield
    dtype = getattr(strategy, "dtype", torch.float32)
    from deepspeed.accelerator import get_accelerator

    if dtype not in get_accelerator().supported_dtypes():
        name = torch.cuda.get_device_name(strategy.device) if on_cuda() else "this CPU"
        flag, other = ("--bf16", "--fp16") if strategy.bf16 else ("--fp16", "--bf16")
        raise LaunchError(
            f"{flag}: DeepSpeed does not train in it on {name}: set {other}, or neither for fp32"
        )
    if dtype is torch.float32 and on_cuda() and strategy.is_rank_0():
        logger.warning(
            "fp32 on a GPU: no TF32, and attention in plain products, which takes about 10 times as long as --bf16 "
            "(or --fp16) and twice the memory. Set one of them, with --zero_stage 1 or more"
        )
