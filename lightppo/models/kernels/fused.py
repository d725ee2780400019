"""Norms and rotary embeddings of Llama-like models: the same, in fewer passes over memory.

Each has a backward pass of its own that keeps only its inputs: of a norm in bfloat16 2 bytes per number instead of 6.
Once differentiable. While torch compiles, the model's own code is compiled.
"""

from __future__ import annotations

from functools import cache
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.llama import modeling_llama as llama
from transformers.utils import deprecation

from lightppo.algorithms.masking import at_least_float32

ROTARY = "apply_rotary_pos_emb"  # where an attention looks for its rotary embedding
# As transformers has them: Liger puts others in their places.
_NORM = llama.LlamaRMSNorm.forward
_ROTATE = llama.apply_rotary_pos_emb
_ROTATE_HALF = llama.rotate_half

# -- the arithmetic ---------------------------------------------------------------------------------------------------


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang and Sennrich 2019 (arXiv:1910.07467): x / √(mean x² + ε), rounded to x's type, · weight; (..., H)."""
    return (
        _RMSNorm.apply(hidden, weight, eps)
        if torch.is_grad_enabled()
        else _normed(hidden, weight, eps)[0]
    )


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


# -- in a model -------------------------------------------------------------------------------------------------------


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
    return getattr(forward, "__wrapped__", forward) if is_wrapper else forward


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
