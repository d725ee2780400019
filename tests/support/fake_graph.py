"""CUDA graphs on a CPU: operations are recorded with their tensors, and nothing else of the step is there later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightppo.rollout.decoding_runners import CUDAGraphs
from support.far_device import SIZES_FROM_VALUES

_WAITS = {*SIZES_FROM_VALUES, "_local_scalar_dense", "equal"}


class Recording(TorchDispatchMode):
    """The operations inside; a wait for the device fails, as it does while a CUDA graph is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []
        # what was there when it was first written to
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        # the latter: of torch.tensor
        if name in _WAITS or (name == "lift_fresh" and args[0].dim()):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if func._schema.is_mutable:
            for x in tensors((args, kwargs)):
                self.before.setdefault(place(x), (x, x.untyped_storage().clone()))
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def undo(self) -> None:
        """A capture runs nothing: what was there is as before, and nobody knows what is in new memory."""
        for x, old in self.before.values():
            x.untyped_storage().copy_(old)
        for _, args, _, out in self.operations:
            for x in tensors(out):
                if (
                    place(x) not in {*map(place, tensors(args)), *self.before}
                    and x.is_floating_point()
                ):
                    x.fill_(torch.nan)

    def replay(self) -> None:
        """The same operations, with the same tensors."""
        for func, args, kwargs, out in self.operations:
            given = {*map(place, tensors((args, kwargs)))}
            if func._schema.is_mutable:
                func(*args, **kwargs)
            elif not {*map(place, tensors(out))} <= given:  # else a view
                for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                    old.copy_(new)


def tensors(x: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor))


def place(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout is torch.strided else id(x)


class FakeGraphs(CUDAGraphs):
    """``CUDAGraphs`` on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0

    def warm_up(self, step: Callable[[], None]) -> None:
        with Recording():
            step()

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        with Recording() as recorded:
            step()
        recorded.undo()

        def replay() -> None:
            self.replays += 1
            recorded.replay()

        return replay
