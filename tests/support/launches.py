"""Counts the operators that a GPU's host would launch kernels for; kernels of norms, which only a GPU has."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

# they give memory, or another view of it, which their schemas do not say
WITHOUT_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "lift_fresh"),
}
OF_STEPS = ("lightppo/", "deepspeed/", "transformers/")


class Launches(TorchDispatchMode):
    """Inside, counts operators by phase, and by function and operator; one of many tensors is one."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.by_origin: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def count(self, phase: str, owner: Any, name: str) -> None:
        """Let a method's operators count in this phase, but for those of a method in it that has its own."""
        method = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return method(*args, **options)
            finally:
                self.phase = before

        setattr(owner, name, counted)

    def total(self, phase: str) -> int:
        return self.by_origin[phase].total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if self.phase and launches(func):
            self.by_origin[self.phase][f"{_origin()} {func.overloadpacket.__name__}"] += 1
        return func(*args, **(kwargs or {}))


def launches(operator: Any) -> bool:
    """Tell whether it writes to a tensor: views, new memory and questions about types do not."""
    schema = operator._schema
    if schema.is_mutable:
        return True
    tensors = [result for result in schema.returns if "Tensor" in str(result.type)]
    is_view = any(result.alias_info for result in tensors)
    return bool(tensors) and not is_view and operator.overloadpacket.__name__ not in WITHOUT_KERNEL


def _origin() -> str:
    """The innermost function that runs, of the packages that make up a step."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        for package in OF_STEPS:
            if f"/{package}" in path:
                return f"{package}{path.rpartition(f'/{package}')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def norm_kernels() -> Iterator[None]:
    """Each pass of a norm is one operator, as on a GPU."""
    if not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        pytest.skip("this torch has no kernels for norms")
    from torch._decomp.decompositions import _fused_rms_norm_backward

    def forward(hidden: Tensor, _: list[int], weight: None, eps: float) -> tuple[Tensor, Tensor]:
        scale = (hidden.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        return (hidden * scale).to(hidden.dtype), scale

    kernels = Library("aten", "IMPL")
    kernels.impl("_fused_rms_norm", forward, "CPU")
    kernels.impl("_fused_rms_norm_backward", _fused_rms_norm_backward, "CPU")
    try:
        with mock.patch("lightppo.models.kernels.layers.has_norm_kernels", return_value=True):
            yield
    finally:
        kernels._destroy()
