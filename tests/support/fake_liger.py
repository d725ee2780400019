"""A stand-in for Liger's kernels, which need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

PACKAGE = (
    "liger_kernel",
    "liger_kernel.transformers",
    "liger_kernel.transformers.monkey_patch",
)
PLACES = {"llama": (modeling_llama, "Llama"), "qwen2": (modeling_qwen2, "Qwen2")}


class Scaled(torch.autograd.Function):
    """x, whose gradient is taken times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class FakeLiger:
    """Its kernels in torch; ``wrong`` scales what it names: "norm forward", "rotary gradient", and so on."""

    def __init__(self, wrong: dict[str, float], error: str = "") -> None:
        self.wrong = wrong
        self.error = error
        self.calls: list[str] = []

    def _spoilt(self, name: str, x: Tensor) -> Tensor:
        self.calls.append(name)
        if self.error:
            raise RuntimeError(self.error)
        if (factor := self.wrong.get(f"{name} {x.dtype}")) is not None:
            return x * factor
        x = Scaled.apply(x, self.wrong.get(f"{name} gradient", 1.0))
        return x * self.wrong.get(f"{name} forward", 1.0)

    def norm(self, module: nn.Module, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return self._spoilt("norm", module.weight * (wide * scale).to(hidden.dtype))

    def mlp(self, module: nn.Module, x: Tensor) -> Tensor:
        return module.down_proj(self._spoilt("mlp", silu(module.gate_proj(x)) * module.up_proj(x)))

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)

        return self._spoilt("rotary", turned(q)), turned(k)

    def patch(self, family: str) -> Callable[..., None]:
        """As Liger does: into transformers' modules, and into the modules that are there."""
        place, prefix = PLACES[family]

        def apply(
            rope: bool = True,
            fused_linear_cross_entropy: bool = True,
            model: PreTrainedModel | None = None,
        ) -> None:
            assert not fused_linear_cross_entropy
            place.apply_rotary_pos_emb = self.rotary
            setattr(place, f"{prefix}RMSNorm", None)
            setattr(place, f"{prefix}MLP", None)
            for layer in model.base_model.layers:
                layer.mlp.forward = MethodType(self.mlp_of, layer.mlp)
                for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                    norm.forward = MethodType(self.norm_of, norm)

        return apply

    @property
    def mlp_of(self) -> Callable[..., Tensor]:
        return lambda module, x: self.mlp(module, x)

    @property
    def norm_of(self) -> Callable[..., Tensor]:
        return lambda module, x: self.norm(module, x)

    def modules(self) -> dict[str, ModuleType]:
        """What stands for the package in ``sys.modules``."""
        modules = {name: ModuleType(name) for name in PACKAGE}
        for name, module in modules.items():
            module.__spec__ = ModuleSpec(name, None)
        modules[PACKAGE[-1]].MODEL_TYPE_TO_APPLY_LIGER_FN = {
            family: self.patch(family) for family in PLACES
        }
        return modules
