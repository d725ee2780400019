"""Matrix products of float32 on a CPU, by the faster of torch's two libraries.

MKL leaves AVX-512 unused on AMD processors; oneDNN is 2.3 times as fast on a Zen 5, at the same precision.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# oneDNN compiles a kernel of about 1 MB for every shape, and torch would keep 1024 of them twice: nearly every micro
# batch has another shape. These numbers are enough for one pass through a model.
_KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 32, "LRU_CACHE_CAPACITY": 1}
_PACKED_FOR_ROWS = 64
# row counts are rounded up to this: a batch that shrinks row by row would compile a kernel per size
_ROWS_STEP = 8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``: (..., K), (N, K), (N,) -> (..., N). Once differentiable."""
    if not by_onednn(x, weight):
        return functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias)
    return onednn_linear(x, weight, bias)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``: (M, K), (K, N) -> (M, N), of any layout, without a graph."""
    if not by_onednn(a, b):
        return a @ b
    # the left factor is copied: let it be the smaller one
    if not a.is_contiguous() and a.shape[0] > b.shape[1]:
        return onednn_linear(b.t(), a).t()
    return onednn_linear(a, b.t())


def packed(weight: Tensor) -> Tensor:
    """A copy of a weight (N, K) in oneDNN's own layout, for :func:`linear_packed`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)


def linear_packed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`linear` with a :func:`packed` weight, without a graph, for few rows. Needs :func:`by_onednn`."""
    rows = x.reshape(-1, x.shape[-1])
    if missing := -len(rows) % _ROWS_STEP:
        rows = functional.pad(rows, (0, 0, 0, missing))
    return onednn_linear(rows, weight, bias)[: len(rows) - missing].view(*x.shape[:-1], -1)


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies these two."""
    fits = x.dtype is weight.dtype is torch.float32 and x.is_cpu and weight.is_cpu
    return fits and x.numel() > 0 and weight.numel() > 0 and onednn_is_faster()


def onednn_is_faster() -> bool:
    """Whether to use oneDNN: never while compiling, nor if ``torch.backends.mkldnn`` is switched off."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_mkldnn_enabled()
        and onednn_suits_machine()
    )


@cache
def onednn_suits_machine() -> bool:
    """Judged by processor and build instead of by timing, because a resumed run must round as before."""
    cpuinfo = Path("/proc/cpuinfo")
    suits = (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        # torch's own compiler calls this operator, but it is not public.
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and cpuinfo.is_file()
        and "AuthenticAMD" in cpuinfo.read_text()
    )
    if suits:
        for variable, kernels in _KEPT_KERNELS.items():
            os.environ.setdefault(variable, str(kernels))  # torch reads them at the first product
    return suits


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The weight itself, no view of it: ZeRO-3 takes its storage away until the backward.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])  # (T, N)
        to_x = (
            product(rows, weight).view(*gradient.shape[:-1], -1)
            if ctx.needs_input_grad[0]
            else None
        )
        # Contiguous, as the weight is; otherwise every use of the gradient would transpose it.
        to_weight = (
            product(rows.t(), x.reshape(-1, x.shape[-1])).contiguous()
            if ctx.needs_input_grad[1]
            else None
        )
        return to_x, to_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


# -- in a model -------------------------------------------------------------------------------------------------------

PACKED_BYTES = 1 << 30
"""Larger models are not copied for decoding."""


def is_plain_linear(module: nn.Module) -> bool:
    """``nn.Linear``, or a class that says of itself that it computes the same."""
    kind = type(module)
    return (kind is nn.Linear or "is_plain_linear" in vars(kind)) and "forward" not in vars(module)


class CPULinear(nn.Linear):
    """``nn.Linear``, by :func:`lightppo.models.kernels.matmul.linear`."""

    is_plain_linear = True
    packed_weight: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.packed_weight is not None and by_onednn(input, self.weight):
            return linear_packed(input, self.packed_weight, self.bias)
        return linear(input, self.weight, self.bias)


def accelerate_on_cpu(model: nn.Module) -> None:
    """Plain linear layers become :class:`CPULinear` in place, if that is faster; weights and names stay."""
    if onednn_is_faster():
        for module in filter(is_plain_linear, model.modules()):
            module.__class__ = CPULinear


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Gives :class:`CPULinear` layers packed copies of their weights, for many small forwards without gradients."""
    layers = [module for module in model.modules() if type(module) is CPULinear]
    fitting = [layer for layer in layers if by_onednn(layer.weight, layer.weight)]
    if sum(layer.weight.nbytes for layer in fitting) > PACKED_BYTES or torch.is_grad_enabled():
        fitting = []
    for layer in fitting:
        layer.packed_weight = packed(layer.weight)
    try:
        yield
    finally:
        for layer in fitting:
            del layer.packed_weight
