"""A model's linear layers by the faster matrix product of this machine's CPU (:mod:`lightppo.models.kernels.matmul`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightppo.models.kernels.matmul import (
    by_onednn,
    linear,
    linear_packed,
    onednn_is_faster,
    packed,
)
from lightppo.models.wrapper import is_plain_linear

PACKED_BYTES = 1 << 30
"""Larger models are not copied for decoding."""


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
