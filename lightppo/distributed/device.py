"""Devices and hosts of ranks: GPU or CPU, the types that it trains in, and a rank's share of cores and memory."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lightppo.errors import LaunchError
from lightppo.ranks import cores_of_rank

logger = logging.getLogger(__name__)


def on_cuda() -> bool:
    """Tell whether engines run on GPUs: there is one, and DS_ACCELERATOR (DeepSpeed's own switch) does not say cpu."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"


def name_accelerator() -> None:
    """Tell DeepSpeed what it runs on; otherwise it warns on every machine without a GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_cuda() else "cpu")


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed without its autotuner's mlflow, which would cost a second of each start where it is installed."""
    was_absent = sys.modules.setdefault("mlflow", None) is None
    try:
        import deepspeed
    finally:
        if was_absent:
            del sys.modules["mlflow"]
    return deepspeed


@contextmanager
def compiling_at_first_call() -> Iterator[None]:
    """Let ``torch.compile`` wait until a function is called.

    With every first engine of ZeRO DeepSpeed imports its Muon optimizer, whose functions are compiled: that loads
    Inductor, which takes a second, for an optimizer that nobody has chosen.
    """
    compile_now: Callable[..., Any] = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if isinstance(model, torch.nn.Module):
            return compile_now(model, **options)
        compiled: list[Any] = []

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not compiled:
                compiled.append(compile_now(model, **options))
            return compiled[0](*args, **kwargs)

        return call

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_now


def check_type(strategy: Any) -> None:
    """Raise LaunchError for a type that the device cannot train in, and warn of a slow one. Call it among the ranks."""
    dtype = getattr(strategy, "dtype", torch.float32)
    from deepspeed.accelerator import get_accelerator

    if dtype not in get_accelerator().supported_dtypes():
        flags = ["--fp16", "--bf16"]
        if strategy.bf16:
            flags.reverse()
        name = torch.cuda.get_device_name(strategy.device) if on_cuda() else "this CPU"
        raise LaunchError(
            f"{flags[0]}: DeepSpeed does not train in it on {name}: set {flags[1]}, or neither for fp32"
        )
    if dtype is torch.float32 and on_cuda() and strategy.is_rank_0():
        logger.warning(
            "fp32 on a GPU: no TF32, and attention in plain products, which takes about 10 times as long as --bf16 "
            "(or --fp16) and twice the memory. Set one of them, with --zero_stage 1 or more"
        )


# -- what a rank takes of its host -----------------------------------------------------------------------------------


def share_host() -> None:
    """Take this rank's share of the host's cores, and keep memory that tensors have freed. Collective."""
    share_cores(collectives_on_cpu=not on_cuda())
    if not on_cuda():
        keep_freed_memory()


def share_cores(collectives_on_cpu: bool) -> None:
    """Run this rank's operators on its share of the host's cores, unless OMP_NUM_THREADS says how many. Collective.

    On a GPU machine these are the optimizer steps of ``--adam_offload``.

    With ``collectives_on_cpu`` each of gloo's two threads takes one: the copies of its gathers would begin an OpenMP
    team beside the rank's own, and where a process has more of OpenMP's threads than cores, they sleep at the end of
    each operator instead of waiting for microseconds. A step takes 1.6 times as long then (docs/performance.md).
    """
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        threads = min(threads, cores_of_rank())
    if collectives_on_cpu:
        torch.set_num_threads(1)  # a thread keeps what it finds at its first large copy
        ranks = dist.get_world_size()
        # Four gathers, which last long enough to keep both cores busy.
        local_tensor = torch.zeros(max(1 << 16, (1 << 20) // ranks))
        copies = [list(local_tensor.new_empty(ranks, len(local_tensor))) for _ in range(4)]
        for gather in [
            dist.all_gather(of_ranks, local_tensor, async_op=True) for of_ranks in copies
        ]:
            gather.wait()
    torch.set_num_threads(threads)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Let glibc keep up to a GiB that tensors have freed; by default it goes back to the system from 64 MiB on.

    Each micro batch would get its pages from the system anew: 165,000 in a small model's step, 5% of its time.
    Variables of the user's own (MALLOC_…, GLIBC_TUNABLES) stand; other libraries for memory have no such function.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    ):
        return
    # 32 MiB: its highest value
    for parameter, size in ((_M_TRIM_THRESHOLD, 1 << 30), (_M_MMAP_THRESHOLD, 32 << 20)):
        mallopt(parameter, size)


def peak_of_process() -> int:
    """Return the most bytes that this process has been resident with."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):  # a sandbox; getrusage counts the process before, too
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report_memory(strategy: Any, prefix: str) -> dict[str, float]:
    """Print this process's memory in GiB on rank 0, and its peak: allocated on a GPU, resident on a CPU; return it."""
    if strategy.device.type == "cuda":
        sizes = {
            "allocated": torch.cuda.memory_allocated(strategy.device),
            "peak": torch.cuda.max_memory_allocated(strategy.device),
        }
    else:
        sizes = {"resident": psutil.Process().memory_info().rss, "peak": peak_of_process()}
    memory = {name: size / 2**30 for name, size in sizes.items()}
    text = ", ".join(f"{name} {value:.2f} GiB" for name, value in memory.items())
    strategy.print(f"{prefix}: {text}")
    return memory
