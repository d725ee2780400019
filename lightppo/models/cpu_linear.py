"""A model's linear layers by the faster matrix product of this machine's CPU."""

from __future__ import annotations

from torch import Tensor, nn

from lightppo.algorithms.matmul import linear, onednn_is_faster


class CPULinear(nn.Linear):
    """``nn.Linear``, by :func:`lightppo.algorithms.matmul.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_cpu_linear(model: nn.Module) -> None:
    """Plain linear layers become :class:`CPULinear`, in place, where that is faster; weights and names stay."""
    if not onednn_is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.__class__ = CPULinear
