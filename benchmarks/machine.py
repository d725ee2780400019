"""What the numbers were measured on: ``python benchmarks/machine.py`` prints it as JSON, with the matrix peak."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path


def cpu_name() -> str:
    """As the kernel calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def matrix_peak(seconds: float = 5.0, size: int = 2048) -> float:
    """Operations per second of the fastest square matrix product: float32 on a CPU, bfloat16 on a GPU.

    On a CPU by torch's BLAS and by what lightppo takes instead, whichever is faster.
    """
    import torch

    from lightppo.models.kernels.layers import product

    gpu = torch.cuda.is_available()
    size = 8192 if gpu else size
    a, b = (torch.randn(size, size, device="cuda" if gpu else "cpu", dtype=torch.bfloat16 if gpu else None)
            for _ in range(2))  # fmt: skip
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for multiply in (torch.matmul, product):
            start = time.perf_counter()
            multiply(a, b)
            if gpu:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def describe() -> dict[str, object]:
    """Processor, cores, memory, accelerator, versions, peak."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peak_flops": matrix_peak(),
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
