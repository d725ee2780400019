"""Layers of a model that are replaced in place: linear ones, norms, MLPs, rotary embeddings. Weights and names stay.

Matrix products of float32 on a CPU go to the faster of torch's two libraries: MKL leaves AVX-512 unused on AMD
processors; oneDNN is 2.3 times as fast on a Zen 5, at the same precision.

Norms, MLPs and rotary embeddings of Llama-like models: the same, in fewer passes over memory. Each has a backward pass of
its own that keeps only its inputs: of a norm in bfloat16 2 bytes per number instead of 6. Once differentiable. While
torch compiles, the model's own code is compiled.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
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
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.utils import deprecation

from lightppo.algorithms.masking import at_least_float32

# oneDNN compiles a kernel of about 1 MB for every shape, and torch would keep 1024 of them twice: nearly every micro
# batch has another shape. These numbers are enough for one pass through a model.
_KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 32, "LRU_CACHE_CAPACITY": 1}
_PACKED_FOR_ROWS = 64
# For a product of fewer multiplications such a kernel takes longer to compile than it saves.
_COMPILED_PRODUCTS = 1 << 23
# a larger result is not in the processor's cache, and takes longer to transpose than a factor
_TRANSPOSED_BYTES = 2 << 20
# row counts are rounded up to this: a batch that shrinks row by row would compile a kernel per size
_ROWS_STEP = 8


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as ``torch.nn.functional.linear``: (..., K), (N, K), (N,) -> (..., N). Once differentiable."""
    if not (by_onednn(hidden, weight) and _is_worth_a_kernel(hidden, weight)):
        return functional.linear(hidden, weight, bias)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _Linear.apply(hidden, weight, bias)
    return onednn_linear(hidden, weight, bias)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply ``left @ right``: (M, K), (K, N) -> (M, N), of any layout, without a graph."""
    if not (by_onednn(left, right) and _is_worth_a_kernel(left, right)):
        return left @ right
    # the left factor is copied: let it be the smaller one
    if not left.is_contiguous() and left.shape[0] > right.shape[1]:
        return onednn_linear(right.t(), left).t()
    return onednn_linear(left, right.t())


def weight_product(rows: Tensor, hidden_rows: Tensor) -> Tensor:
    """Multiply ``rows.t() @ hidden_rows``: (T, N), (T, K) -> (N, K), the gradient of a weight, without a graph.

    Contiguous, as the weight is; otherwise every use of the gradient would transpose it.
    """
    result_bytes = rows.shape[1] * hidden_rows.shape[1] * rows.element_size()
    if result_bytes <= _TRANSPOSED_BYTES or not by_onednn(rows, hidden_rows):
        return product(rows.t(), hidden_rows).contiguous()
    return onednn_linear(rows.t(), hidden_rows.t())


def packed(weight: Tensor) -> Tensor:
    """Copy a weight (N, K) into oneDNN's own layout, for :func:`linear_packed`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)


def linear_packed(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as :func:`linear` by a :func:`packed` weight, without a graph, for few rows. Needs :func:`by_onednn`."""
    flat_rows = hidden.reshape(-1, hidden.shape[-1])
    if missing_rows := -len(flat_rows) % _ROWS_STEP:
        flat_rows = functional.pad(flat_rows, (0, 0, 0, missing_rows))
    output = onednn_linear(flat_rows, weight, bias)[: len(flat_rows) - missing_rows]
    return output.view(*hidden.shape[:-1], -1)


def by_onednn(hidden: Tensor, weight: Tensor) -> bool:
    """Tell whether oneDNN multiplies these two."""
    has_type = hidden.dtype is weight.dtype is torch.float32
    is_filled = hidden.numel() > 0 and weight.numel() > 0
    return has_type and hidden.is_cpu and weight.is_cpu and is_filled and onednn_is_faster()


def _is_worth_a_kernel(left: Tensor, right: Tensor) -> bool:
    """Tell whether (M, K) times K·N numbers are so many multiplications that compiling for their shape pays."""
    return left.numel() // left.shape[-1] * right.numel() >= _COMPILED_PRODUCTS


def onednn_is_faster() -> bool:
    """Tell whether to use oneDNN: never while compiling, nor if ``torch.backends.mkldnn`` is switched off."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_mkldnn_enabled()
        and onednn_suits_machine()
    )


@cache
def onednn_suits_machine() -> bool:
    """Judge by processor and build instead of by timing, because a resumed run must round as before."""
    cpuinfo = Path("/proc/cpuinfo")
    suits_machine = (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        # torch's own compiler calls this operator, but it is not public.
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and cpuinfo.is_file()
        and "AuthenticAMD" in cpuinfo.read_text()
    )
    if suits_machine:
        for variable, kernels in _KEPT_KERNELS.items():
            os.environ.setdefault(variable, str(kernels))  # torch reads them at the first product
    return suits_machine


def onednn_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The weight itself, no view of it: ZeRO-3 takes its storage away until the backward.
        context.save_for_backward(hidden if context.needs_input_grad[1] else None, weight)
        output = onednn_linear(hidden, weight, bias)
        # oneDNN gives a view of rows, which autograd does not let a model change in place (Gemma 3n).
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    @once_differentiable
    def backward(
        context: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden, weight = context.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])  # (T, N)
        hidden_gradient = weight_gradient = bias_gradient = None
        if context.needs_input_grad[0]:
            hidden_gradient = product(rows, weight).view(*gradient.shape[:-1], -1)
        if context.needs_input_grad[1]:
            weight_gradient = weight_product(rows, hidden.reshape(-1, hidden.shape[-1]))
        if context.needs_input_grad[2]:
            bias_gradient = rows.sum(0)
        return hidden_gradient, weight_gradient, bias_gradient


# -- linear layers in a model -----------------------------------------------------------------------------------------

PACKED_BYTES = 1 << 30
"""Larger models are not copied for decoding."""
# Around smaller copies the process keeps its memory, because to get it anew takes longer than decoding gains.
_GIVEN_BACK_BYTES = 1 << 28


def is_plain_linear(module: nn.Module) -> bool:
    """Tell whether it is ``nn.Linear`` or :class:`CPULinear`, with the forward of its class."""
    return type(module) in (nn.Linear, CPULinear) and "forward" not in vars(module)


def is_mixer(module: nn.Module) -> bool:
    """Tell whether its forward has a causal convolution, as transformers' recurrent layers have."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return (
        code is not None
        and "causal_conv1d_fn" in code.co_names
        and "forward" not in vars(module)
        and not forward.__closure__
    )


class CPULinear(nn.Linear):
    """``nn.Linear``, by :func:`lightppo.models.kernels.layers.linear`."""

    packed_weight: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.packed_weight is not None and by_onednn(input, self.weight):
            return linear_packed(input, self.packed_weight, self.bias)
        return linear(input, self.weight, self.bias)


def accelerate_on_cpu(model: nn.Module) -> None:
    """Turn plain linear layers into :class:`CPULinear` in place, if that is faster; weights and names stay."""
    if onednn_is_faster():
        for module in filter(is_plain_linear, model.modules()):
            module.__class__ = CPULinear


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Give :class:`CPULinear` layers packed copies of their weights, for many small forwards without gradients."""
    cpu_layers = [module for module in model.modules() if type(module) is CPULinear]
    packed_layers = [layer for layer in cpu_layers if by_onednn(layer.weight, layer.weight)]
    copied_bytes = sum(layer.weight.nbytes for layer in packed_layers)
    if copied_bytes > PACKED_BYTES or torch.is_grad_enabled():
        packed_layers = []
    gives_back = bool(packed_layers) and copied_bytes > _GIVEN_BACK_BYTES
    if gives_back:  # what the last training has freed
        give_back_memory()
    for layer in packed_layers:
        layer.packed_weight = packed(layer.weight)
    try:
        yield
    finally:
        for layer in packed_layers:
            del layer.packed_weight
        if gives_back:
            give_back_memory()


def give_back_memory() -> None:
    """Let the system have what was freed: glibc keeps blocks below 32 MiB, too few of which fit the next phase."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


ROTARY = "apply_rotary_pos_emb"  # where an attention looks for its rotary embedding
# As transformers has them: Liger puts others in their places.
_NORM = llama.LlamaRMSNorm.forward
_MLP = llama.LlamaMLP.forward
_ROTATE = llama.apply_rotary_pos_emb
_ROTATE_HALF = llama.rotate_half

# -- the arithmetic of norms, MLPs and rotary embeddings --------------------------------------------------------------


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise (Zhang and Sennrich 2019, arXiv:1910.07467): x / √(mean x² + ε), rounded, · weight; (..., H)."""
    if torch.is_grad_enabled():
        return _RMSNorm.apply(hidden, weight, eps)
    return _normed(hidden, weight, eps)[0]


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate as transformers' ``apply_rotary_pos_emb``: (B, H, S, D) twice, by angles with cos and sin (B, S, D)."""
    if arguments or options or not q.dtype == k.dtype == cos.dtype:
        return _ROTATE(q, k, cos, sin, *arguments, **options)
    rotate = _Rotary.apply if torch.is_grad_enabled() else _turned
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply SiLU(gate) · up (Shazeer 2020, arXiv:2002.05202); the backward pass makes SiLU(gate) again. (..., I)."""
    if torch.is_grad_enabled():
        return _GatedSiLU.apply(gate, up)
    return functional.silu(gate).mul_(up)


def has_norm_kernels(hidden: Tensor) -> bool:
    """Tell whether torch has one kernel for each pass of a norm: since 2.9 on NVIDIA's GPUs."""
    if not hidden.is_cuda or torch.version.hip is not None:
        return False
    return hasattr(torch.ops.aten, "_fused_rms_norm_backward")


def _normed(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return it normalised, and 1 / √(mean x² + ε), (..., 1), at least float32."""
    if has_norm_kernels(hidden):
        # without the weight, by which the model's own code and vLLM's multiply what is already rounded
        normed, scale = torch.ops.aten._fused_rms_norm(hidden, weight.shape, None, eps)
        return normed.mul_(weight), scale
    wide_type = torch.promote_types(hidden.dtype, torch.float32)
    norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=wide_type)
    scale = norm.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
    return (hidden * scale).to(hidden.dtype).mul_(weight), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _normed(hidden, weight, eps)
        # The weight itself, no view of it: ZeRO-3 takes its storage away until the backward.
        context.save_for_backward(hidden, weight, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, scale = context.saved_tensors
        if has_norm_kernels(hidden):
            tensors = gradient, hidden, weight.shape, scale, weight
            needed = context.needs_input_grad[:2]
            return (*torch.ops.aten._fused_rms_norm_backward(*tensors, needed), None)
        rows, gradients, factors = (
            at_least_float32(tensor.reshape(-1, tensor.shape[-1]))
            for tensor in (hidden, gradient, scale)
        )
        products = gradients * rows  # (T, H)
        weight_gradient = None
        if context.needs_input_grad[1]:
            weight_gradient = (factors.T @ products)[0].to(weight.dtype)
        if not context.needs_input_grad[0]:
            return None, weight_gradient, None
        # r·w·g - x · r³ · mean(w·g·x), with the factor r and the gradient g
        wide_weight = at_least_float32(weight)
        means = (products @ wide_weight)[:, None].mul_(factors**3).div_(hidden.shape[-1])  # (T, 1)
        to_hidden = torch.mul(gradients, wide_weight, out=products).mul_(factors)
        to_hidden.addcmul_(rows, means, value=-1)
        return to_hidden.to(hidden.dtype).view(hidden.shape), weight_gradient, None


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = states * cos
    (first_half, second_half), (first_states, second_states), (first_sin, second_sin) = (
        tensor.chunk(2, -1) for tensor in (rotated, states, sin)
    )
    first_half.addcmul_(second_states, first_sin, value=-1)
    second_half.addcmul_(first_states, second_sin)
    return rotated


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        context.save_for_backward(cos, sin)
        return _turned(states, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = context.saved_tensors
        state_gradient = gradient * cos
        (first_half, second_half), (first_gradient, second_gradient), (first_sin, second_sin) = (
            tensor.chunk(2, -1) for tensor in (state_gradient, gradient, sin)
        )
        first_half.addcmul_(second_gradient, second_sin)
        second_half.addcmul_(first_gradient, first_sin, value=-1)
        return state_gradient, None, None


class _GatedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor) -> Tensor:
        context.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = context.saved_tensors
        to_up = functional.silu(gate).mul_(gradient)
        return torch.ops.aten.silu_backward(gradient * up, gate), to_up


class _GatedProjection(torch.autograd.Function):
    """silu(gate) · up, times a weight: of three tensors as large as the MLP is wide two are kept."""

    @staticmethod
    def forward(
        context: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        context.save_for_backward(gate, up, weight)
        output = linear(functional.silu(gate).mul_(up), weight, bias)
        return torch.ops.aten._unsafe_view(output, output.shape)  # see _Linear

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = context.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])  # (T, H)
        gated = functional.silu(gate)
        weight_gradient = weight_product(rows, (gated * up).view(-1, up.shape[-1]))
        bias_gradient = rows.sum(0) if context.needs_input_grad[3] else None
        to_gated_up = product(rows, weight).view(up.shape)
        to_up = gated.mul_(to_gated_up)
        to_gate = torch.ops.aten.silu_backward(to_gated_up.mul_(up), gate)
        return to_gate, to_up, weight_gradient, bias_gradient


# -- norms, MLPs and rotary embeddings in a model ---------------------------------------------------------------------


def fuse(model: nn.Module) -> None:
    """Replace the code of modules that is Llama's, as in 130 families, in place; weights and names stay."""
    for module in model.modules():
        if "forward" not in vars(module):  # else Liger's, or somebody's own
            mixin = _mixin_for(module)
            if mixin is not None:
                module.__class__ = _derived(mixin, type(module))


def _mixin_for(module: nn.Module) -> type | None:
    forward = type(module).forward
    if same_code(forward, _NORM):
        return _FusedRMSNorm
    if same_code(forward, _MLP) and isinstance(module.act_fn, SiLUActivation | nn.SiLU):
        return _FusedMLP
    inner_forward = own_code(forward)
    rotates = isinstance(inner_forward, FunctionType) and ROTARY in inner_forward.__code__.co_names
    if rotates and not inner_forward.__closure__ and inner_forward.__kwdefaults__ is None:
        names = inner_forward.__globals__
        rotates_alike = same_code(names.get(ROTARY), _ROTATE)
        if rotates_alike and same_code(names.get("rotate_half"), _ROTATE_HALF):
            return _with_rotary(forward)
    return None


def own_code(forward: Any) -> Any:
    """Return the function, without the wrapper by which transformers takes an argument's old name, too."""
    if getattr(forward, "__globals__", {}).get("__name__") == deprecation.__name__:
        return getattr(forward, "__wrapped__", forward)
    return forward


@cache
def rotating_by(function: Any, forward: FunctionType) -> FunctionType:
    """Return the forward of an attention that finds ``function`` where it looks for its own rotary embedding."""
    inner_forward = own_code(forward)
    rotating_forward = with_globals(inner_forward, inner_forward.__closure__, **{ROTARY: function})
    if inner_forward is forward:
        return rotating_forward
    closure_cells = (
        CellType(rotating_forward) if cell.cell_contents is inner_forward else cell
        for cell in forward.__closure__
    )
    return with_globals(forward, tuple(closure_cells))


def with_globals(function: FunctionType, closure: Any, **names: Any) -> FunctionType:
    """Return a copy of a function that finds other things by these names."""
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
    """Tell whether two functions differ only in their names, annotations and docstrings."""

    def code(compared: FunctionType) -> tuple[Any, ...]:
        code = compared.__code__
        constants = [constant for constant in code.co_consts if constant != compared.__doc__]
        return code.co_code, code.co_names, constants

    are_functions = isinstance(function, FunctionType) and isinstance(other, FunctionType)
    return are_functions and not function.__closure__ and code(function) == code(other)


@cache
def _derived(mixin: type, module_class: type) -> type:
    """Return a subclass with the name of the class, by which transformers and DeepSpeed know it."""
    names = {"__module__": module_class.__module__}
    return type(module_class.__name__, (mixin, module_class), names)


class _FusedRMSNorm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class _FusedMLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if torch.is_grad_enabled() and _is_bare(self.down_proj, gate):
            return _GatedProjection.apply(gate, up, self.down_proj.weight, self.down_proj.bias)
        return self.down_proj(gated_silu(gate, up))


def _is_bare(layer: nn.Module, hidden: Tensor) -> bool:
    """Tell whether a linear layer's call is its product with a trained weight: no adapter, no hook (of ZeRO-3)."""
    hooks = layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks
    if not is_plain_linear(layer) or any((*hooks, layer._backward_hooks)):
        return False
    return layer.weight.requires_grad and layer.weight.dtype is hidden.dtype


@cache
def _with_rotary(forward: FunctionType) -> type:
    """Return the forward of an attention that finds :func:`rotary` where it looks for its own function."""
    rotating_forward = rotating_by(rotary, forward)

    class _FusedRotary(nn.Module):
        def forward(self, *arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(self, *arguments, **options)
            return rotating_forward(self, *arguments, **options)

    return _FusedRotary
