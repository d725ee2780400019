"""Matrix products of float32 on a CPU, by the faster of the two libraries that torch has for them.

torch multiplies float32 matrices by its BLAS. Where that is Intel's MKL and the processor is AMD's, MKL leaves AVX-512
unused; oneDNN, which torch uses for convolutions and bfloat16, has kernels for it, and on a Zen 5 they are 2.3 times as
fast. The precision is the same, float32 all the way; sums are rounded in another order.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``: (..., K), (N, K), (N,) -> (..., N). Once differentiable."""
    if not by_onednn(x, weight, bias):
        return functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias)
    return _onednn(x, weight, bias)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``: (M, K), (K, N) -> (M, N), without a graph."""
    return _onednn(a, b.t()) if by_onednn(a, b) else a @ b


def by_onednn(*operands: Tensor | None) -> bool:
    """Whether these are multiplied by oneDNN."""
    return onednn_is_faster() and all(
        x is None or (x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0) for x in operands
    )


def onednn_is_faster() -> bool:
    """On this machine; never while compiling, and not where ``torch.backends.mkldnn`` is switched off."""
    return not torch.compiler.is_compiling() and torch._C._get_mkldnn_enabled() and _onednn_suits_machine()


@cache
def _onednn_suits_machine() -> bool:
    """By processor and build, not by measuring: a run that is resumed must round as before."""
    cpuinfo = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # torch's own compiler calls it, but it is not public
        and cpuinfo.is_file()
        and "AuthenticAMD" in cpuinfo.read_text()
    )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """See :func:`linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The weight itself, no view of it: ZeRO-3 takes its storage away until the backward.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])  # (T, N)
        to_x = product(rows, weight).view(*gradient.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        to_weight = product(rows.t(), x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        return to_x, to_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
