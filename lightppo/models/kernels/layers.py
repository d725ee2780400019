"""Layers of a model that are replaced in place: linear ones, norms and rotary embeddings. Weights and names stay.

Matrix products of float32 on a CPU go to the faster of torch's two libraries: MKL leaves AVX-512 unused on AMD
processors; oneDNN is 2.3 times as fast on a Zen 5, at the same precision.

Norms and rotary embeddings of Llama-like models: the same, in fewer passes over memory. Each has a backward pass of its
own that keeps only its inputs: of a norm in bfloat16 2 bytes per number instead of 6. Once differentiable. While torch
compiles, the model's own code is compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.models.llama import modeling_llama as llama
from transformers.utils import deprecation

from lightppo.algorithms.masking import at_least_float32

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
        if ctx.needs_input_grad[0]:
            to_x = product(rows, weight).view(*gradient.shape[:-1], -1)
        else:
            to_x = None
        # Contiguous, as the weight is; otherwise every use of the gradient would transpose it.
        if ctx.needs_input_grad[1]:
            to_weight = product(rows.t(), x.reshape(-1, x.shape[-1])).contiguous()
        else:
            to_weight = None
        return to_x, to_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


# -- linear layers in a model -----------------------------------------------------------------------------------------

PACKED_BYTES = 1 << 30
"""Larger models are not copied for decoding."""


def is_plain_linear(module: nn.Module) -> bool:
    """Whether it is ``nn.Linear`` or :class:`CPULinear`, with the forward of its class."""
    return type(module) in (nn.Linear, CPULinear) and "forward" not in vars(module)


class CPULinear(nn.Linear):
    """``nn.Linear``, by :func:`lightppo.models.kernels.layers.linear`."""

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


ROTARY = "apply_rotary_pos_emb"  # where an attention looks for its rotary embedding
# As transformers has them: Liger puts others in their places.
_NORM = llama.LlamaRMSNorm.forward
_ROTATE = llama.apply_rotary_pos_emb
_ROTATE_HALF = llama.rotate_half

# -- the arithmetic of norms and rotary embeddings --------------------------------------------------------------------


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang and Sennrich 2019 (arXiv:1910.07467): x / √(mean x² + ε), rounded to x's type, · weight; (..., H)."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(hidden, weight, eps)
    return _normed(hidden, weight, eps)[0]


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """transformers' ``apply_rotary_pos_emb``: (B, H, S, D) twice, by angles with cos and sin (B, S, D)."""
    if args or kwargs or not q.dtype == k.dtype == cos.dtype:
        return _ROTATE(q, k, cos, sin, *args, **kwargs)
    turn = _Rotary.apply if torch.is_grad_enabled() else _turned
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    return turn(q, cos, sin), turn(k, cos, sin)


def _normed(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """And 1 / √(mean x² + ε), (..., 1), at least float32."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=wide)
    scale = norm.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
    return (hidden * scale).to(hidden.dtype).mul_(weight), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _normed(hidden, weight, eps)
        # The weight itself, no view of it: ZeRO-3 takes its storage away until the backward.
        ctx.save_for_backward(hidden, weight, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, scale = ctx.saved_tensors
        rows, to_y, factor = (
            at_least_float32(tensor.reshape(-1, tensor.shape[-1]))
            for tensor in (hidden, gradient, scale)
        )
        by_row = to_y * rows  # (T, H)
        to_weight = (factor.T @ by_row)[0].to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, to_weight, None
        # r·w·g - x · r³ · mean(w·g·x), with the factor r and the gradient g
        wide = at_least_float32(weight)
        along = (by_row @ wide)[:, None].mul_(factor**3).div_(hidden.shape[-1])  # (T, 1)
        to_x = torch.mul(to_y, wide, out=by_row).mul_(factor).addcmul_(rows, along, value=-1)
        return to_x.to(hidden.dtype).view(hidden.shape), to_weight, None


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = states * cos
    (first, second), (x1, x2), (sin1, sin2) = (
        tensor.chunk(2, -1) for tensor in (turned, states, sin)
    )
    first.addcmul_(x2, sin1, value=-1)
    second.addcmul_(x1, sin2)
    return turned


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(states, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        back = gradient * cos
        (first, second), (g1, g2), (sin1, sin2) = (
            tensor.chunk(2, -1) for tensor in (back, gradient, sin)
        )
        first.addcmul_(g2, sin2)
        second.addcmul_(g1, sin1, value=-1)
        return back, None, None


# -- norms and rotary embeddings in a model ---------------------------------------------------------------------------


def fuse(model: nn.Module) -> None:
    """Modules whose code is Llama's, as in 130 families, get these functions in place; weights and names stay."""
    for module in model.modules():
        if "forward" not in vars(module):  # else Liger's, or somebody's own
            mixin = _mixin_for(type(module).forward)
            if mixin is not None:
                module.__class__ = _derived(mixin, type(module))


def _mixin_for(forward: Any) -> type | None:
    if same_code(forward, _NORM):
        return _FusedRMSNorm
    inner = own_code(forward)
    rotates = isinstance(inner, FunctionType) and ROTARY in inner.__code__.co_names
    if rotates and not inner.__closure__ and inner.__kwdefaults__ is None:
        parts = {ROTARY: _ROTATE, "rotate_half": _ROTATE_HALF}
        if all(same_code(inner.__globals__.get(name), part) for name, part in parts.items()):
            return _with_rotary(forward)
    return None


def own_code(forward: Any) -> Any:
    """The function, without the wrapper by which transformers takes an argument's old name, too."""
    is_wrapper = getattr(forward, "__globals__", {}).get("__name__") == deprecation.__name__
    if is_wrapper:
        return getattr(forward, "__wrapped__", forward)
    return forward


@cache
def rotating_by(function: Any, forward: FunctionType) -> FunctionType:
    """The forward of an attention that finds ``function`` where it looks for its own rotary embedding."""
    inner = own_code(forward)
    turning = _copy(inner, inner.__closure__, **{ROTARY: function})
    if inner is forward:
        return turning
    cells = (
        CellType(turning) if cell.cell_contents is inner else cell for cell in forward.__closure__
    )
    return _copy(forward, tuple(cells))


def _copy(function: FunctionType, closure: Any, **names: Any) -> FunctionType:
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        closure,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def same_code(function: Any, other: Any) -> bool:
    """Whether two functions differ only in their names, annotations and docstrings."""
    if (
        not (isinstance(function, FunctionType) and isinstance(other, FunctionType))
        or function.__closure__
    ):
        return False
    code, other_code = (
        (
            one.__code__.co_code,
            one.__code__.co_names,
            [constant for constant in one.__code__.co_consts if constant != one.__doc__],
        )
        for one in (function, other)
    )
    return code == other_code


@cache
def _derived(mixin: type, kind: type) -> type:
    """A subclass with the name of ``kind``, by which transformers and DeepSpeed know it."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


class _FusedRMSNorm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


@cache
def _with_rotary(forward: FunctionType) -> type:
    """The forward of an attention that finds :func:`rotary` where it looks for its own function."""
    turning = rotating_by(rotary, forward)

    class _FusedRotary(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return (forward if torch.compiler.is_compiling() else turning)(self, *args, **kwargs)

    return _FusedRotary
