"""A device that is no GPU, but as far away: counts what would make the host wait for a GPU."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

# what a far tensor says of its place; its numbers are in a tensor on the CPU
FAR = torch.device("lazy")
SIZES_FROM_VALUES = (  # the result is as long as the values say
    *("nonzero", "masked_select", "masked_scatter_backward", "repeat_interleave"),
    *("unique_dim", "_unique2", "unique_consecutive"),
)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class FarTensor(Tensor):
    """A tensor on the far device."""

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        far = Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            dtype=near.dtype,
            device=FAR,
            requires_grad=near.requires_grad,
        )
        far.near = near.detach()
        return far

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise RuntimeError(f"{func} outside of a FarDevice")


class _Tensors(TorchFunctionMode):
    """torch.tensor copies to its device below all dispatch modes; a subclass has no tolist; pinning asks for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []

    def has_pinned(self, x: Tensor) -> bool:
        return not isinstance(x, FarTensor) and _place(x) in map(_place, self.pinned)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is Tensor.tolist and isinstance(args[0], FarTensor):
            return args[0].to("cpu").tolist()
        if func is Tensor.pin_memory:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if func is Tensor.is_pinned:
            return self.has_pinned(args[0])
        if func is Tensor.new_tensor and isinstance(args[0], FarTensor):
            return torch.tensor(args[1], **{"dtype": args[0].dtype, **(kwargs or {})}).to(FAR)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], FarTensor):
            # lists become tensors on the CPU below all modes
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (
                args[0],
                tuple(torch.tensor(x) if isinstance(x, list) else x for x in places),
                *args[2:],
            )
        makes = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor)
        if makes and torch.device((kwargs or {}).get("device") or "cpu") == FAR:
            return func(*args, **{**kwargs, "device": "cpu"}).to(FAR)
        return func(*args, **(kwargs or {}))


class FarDevice(TorchDispatchMode):
    """Inside, tensors can be on the far device. ``waits`` counts by operator; two devices in one operator fail."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.kept_aside = 1 << 16  # bytes that a driver copies aside
        self.tensors = _Tensors()

    def __enter__(self) -> FarDevice:
        # checkpointing asks for the device's random state
        torch.lazy = SimpleNamespace(_initialized=False)
        # transformers asks; torch 2.6 answers for its own devices only
        self.casts = casts = torch.is_autocast_enabled
        torch.is_autocast_enabled = lambda *kind: casts(*kind) if kind != (FAR.type,) else False
        self.tensors.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.tensors.__exit__(*error)
        del torch.lazy
        torch.is_autocast_enabled = self.casts

    def move(self, x: Any) -> Any:
        """A tensor, or a module in place, to the far device."""
        return x._apply(FarTensor) if isinstance(x, torch.nn.Module) else FarTensor(x)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        far = any(isinstance(x, FarTensor) for x in tensors)
        near = any(not isinstance(x, FarTensor) and x.dim() for x in tensors)
        to = kwargs.get("device")
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        stays = far if to is None else torch.device(to) == FAR
        if name in ("_to_copy", "copy_"):
            was_far, is_far = isinstance(args[name == "copy_"], FarTensor), stays
            if name == "copy_":
                is_far = isinstance(args[0], FarTensor)
            source = args[name == "copy_"]
            crosses = was_far != is_far and (was_far or near)
            if crosses and not (kwargs.get("non_blocking") or args[-1] is True):
                self.waits[name] += 1
            elif (
                crosses
                and not was_far
                and source.nbytes > self.kept_aside
                and not self.tensors.has_pinned(source)
            ):
                self.waits["copy from memory that is not pinned"] += 1
        elif far and near and name in _INDEXING and isinstance(args[0], FarTensor):
            self.waits[name] += 1  # places on the CPU are copied
        elif far and near:
            raise RuntimeError(f"{func} of tensors on two devices")
        elif (
            far
            and name == "cumsum"
            and tensors[0].is_floating_point()
            and torch.are_deterministic_algorithms_enabled()
        ):
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        elif far and (
            name in (*SIZES_FROM_VALUES, "_local_scalar_dense", "equal") or _by_mask(name, args)
        ):
            self.waits[name] += 1
        out = func(*tree_map(_near, args), **tree_map(_near, kwargs))
        if func._schema.is_mutable and not name.startswith("_"):
            return args[0]
        return (
            tree_map(lambda x: FarTensor(x) if isinstance(x, Tensor) else x, out) if stays else out
        )


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _near(x: Any) -> Any:
    return x.near if isinstance(x, FarTensor) else x


def _by_mask(name: str, args: tuple) -> bool:
    """Indexing with a mask looks for its places first."""
    return name in _INDEXING and any(
        i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    )
