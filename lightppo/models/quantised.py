"""Frozen linear layers whose weights are held in 4 bits (QLoRA, arXiv:2305.14314), for models that train adapters.

bitsandbytes packs and unpacks; layer and gradient are of our own. Its ``Linear4bit`` packs a weight anew at the first
forward without gradient on a CPU with AVX512-BF16 and computes in bf16 from then on, so that old log probs, new ones
and exported weights come from different numbers. Its unpacking on CPUs is wrong where a row is no whole number of
blocks; such layers stay as they are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightppo.algorithms.matmul import linear, product
from lightppo.errors import ModelLoadError
from lightppo.models.cpu import CPULinear

BLOCK = 64  # weights of a row that share a scale
_SCALES_BLOCK = 256  # scales that share a scale
PIECES = ("weight_nf4", "weight_scales", "weight_scale_bits")
"""Names of the buffers that together hold a weight."""


def check_bitsandbytes() -> None:
    """Raises ModelLoadError where bitsandbytes is not installed; imports nothing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelLoadError("--load_in_4bit needs bitsandbytes: pip install 'lightppo[qlora]', or bitsandbytes alone")


@dataclass(frozen=True)
class Packing:
    """How a weight was packed: NF4 in blocks of 64, whose scales are held in 8 bits (double quantisation).

    Attributes:
        shape: (out, in) of the weight.
        dtype: in which the layer computes: that of the weight before.
        transposed: the model's checkpoint has the weight as (in, out) (GPT-2's Conv1D).
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    transposed: bool = False

    @staticmethod
    def pack(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three pieces of a weight (out, in) whose rows are whole blocks; see :class:`QuantisedLinear`."""
        from bitsandbytes import functional

        packed, state = functional.quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        outer = torch.cat([state.state2.absmax.flatten(), state.offset.reshape(1)]).float()
        return packed.flatten(), state.absmax.flatten(), outer.view(torch.int32)

    def unpack(self, packed: Tensor, scales: Tensor, scale_bits: Tensor) -> Tensor:
        """The weight (out, in) in ``dtype``, a new tensor; the same numbers at each call."""
        from bitsandbytes import functional

        outer = scale_bits.view(torch.float32)
        of_scales = functional.QuantState(
            outer[:-1], code=_scales_table(scales.device), blocksize=_SCALES_BLOCK, dtype=torch.float32
        )
        state = functional.QuantState(
            scales,
            shape=torch.Size(self.shape),
            dtype=self.dtype,
            blocksize=BLOCK,
            quant_type="nf4",
            offset=outer[-1],
            state2=of_scales,
        )
        return functional.dequantize_4bit(packed, state)

    def of_checkpoint(self, pieces: Mapping[str, Tensor]) -> Tensor:
        """The weight as the model's checkpoint has it, from its pieces by name."""
        weight = self.unpack(*(pieces[name] for name in PIECES))
        return weight.T.contiguous() if self.transposed else weight


class QuantisedLinear(nn.Linear):
    """A frozen linear layer with its weight in 4 bits. A bias stays a parameter as it was.

    Its three buffers are integers, so that no cast of the model changes them and ZeRO, which sees to parameters,
    leaves them whole on every rank: ``weight_nf4`` (out · in / 2,) two weights a byte; ``weight_scales``
    (out · in / 64,) one byte a block; ``weight_scale_bits`` (about out · in / 16384,) the bits of float32 scales of
    those, their offset last. That is 4.13 bits a weight.

    Args:
        layer: what it takes the place of; GPT-2's Conv1D too.

    Attributes:
        packing: what the buffers mean.
        packed_weights: number of weights in them.
        frozen_buffers: their names, for checkpoints that leave out what does not train.
    """

    frozen_buffers = PIECES

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        nn.Module.__init__(self)  # not nn.Linear's: there is no weight of this shape to make
        transposed = isinstance(layer, Conv1D)
        weight = layer.weight.detach().T if transposed else layer.weight.detach()
        self.out_features, self.in_features = weight.shape
        self.packing = Packing(tuple(weight.shape), weight.dtype, transposed)
        # A GPU is quicker at it; the engine moves the model there later.
        place = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else weight.device
        for name, piece in zip(PIECES, Packing.pack(weight.to(place))):
            self.register_buffer(name, piece.to(weight.device))
        self.register_parameter("bias", layer.bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(out, in), unpacked anew."""
        return self.packing.unpack(*(getattr(self, name) for name in PIECES))

    @property
    def packed_weights(self) -> int:
        return self.in_features * self.out_features

    def forward(self, input: Tensor) -> Tensor:
        return _FrozenLinear.apply(input, self.bias, self)


class _FrozenLinear(torch.autograd.Function):
    """x Wᵀ + b. The weight is unpacked in the backward pass once more, so that none is kept in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows = gradient.reshape(-1, gradient.shape[-1])  # (T, out)
        to_x = product(rows, ctx.layer.weight).view(*gradient.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return to_x, rows.sum(0) if ctx.needs_input_grad[1] else None, None


def quantise(model: PreTrainedModel, heads: set[str]) -> None:
    """Hold the weights of the body's linear layers in 4 bits, in place, and freeze the model.

    Heads, embeddings, norms, biases and layers whose rows are no whole number of blocks stay as they are. To be called
    before adapters are added, on a model that is not sharded: every rank holds all of the 4-bit weights, whatever the
    ZeRO stage.

    Args:
        model: loaded.
        heads: names of its output head's modules.

    Raises:
        ModelLoadError: bitsandbytes is not installed or does not work on this device; the model is sharded, or less
            than half of the weights of its body are in such layers (fused experts, narrow layers).
    """
    check_bitsandbytes()
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ModelLoadError("--load_in_4bit: the model is sharded already; load it with load_in_4bit=True")
    layers = _fitting_layers(model, heads)
    model.requires_grad_(False)
    for name in layers:
        try:
            quantised = QuantisedLinear(model.get_submodule(name))
        except (RuntimeError, ImportError) as error:
            raise ModelLoadError(f"--load_in_4bit: bitsandbytes cannot pack {name}: {error}") from error
        model.set_submodule(name, quantised)  # the dense weight goes before the next is packed


def packings(model: nn.Module) -> dict[str, Packing]:
    """The layers of a model that are held in 4 bits, by name."""
    return {name: module.packing for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def _fitting_layers(model: PreTrainedModel, heads: set[str]) -> list[str]:
    """Names of the layers that can be held in 4 bits.

    Raises:
        ModelLoadError: they are less than half of the body.
    """
    modules = dict(model.named_modules())
    plain = {name: module for name, module in modules.items() if type(module) in (nn.Linear, CPULinear, Conv1D)}
    fitting = [name for name, module in plain.items() if name not in heads and _in_features(module) % BLOCK == 0]
    outside = {f"{n}.weight" for n, m in modules.items() if n in heads or isinstance(m, nn.Embedding)}
    body = {name: p.numel() for name, p in model.named_parameters() if name not in outside}
    held = {f"{name}.weight": modules[name].weight.numel() for name in fitting}
    if 2 * sum(held.values()) < sum(body.values()):
        share = sum(held.values()) / sum(body.values())
        largest = max(body.keys() - held.keys(), key=body.get)
        shape = tuple(model.get_parameter(largest).shape)
        raise ModelLoadError(
            f"--load_in_4bit: only {share:.0%} of the weights in the layers of {type(model).__name__} are in plain "
            f"linear layers with an input width that is a multiple of {BLOCK} (the largest that is not: {largest}, "
            f"{shape}), so little would be gained: leave --load_in_4bit out"
        )
    return fitting


def _in_features(layer: nn.Linear | Conv1D) -> int:
    return layer.weight.shape[0] if isinstance(layer, Conv1D) else layer.in_features


_TABLES: dict[str, Tensor] = {}  # not functools.cache, which torch.compile would look through


def _scales_table(device: torch.device) -> Tensor:
    """(256,): what the bytes of scales stand for."""
    if str(device) not in _TABLES:
        from bitsandbytes import functional

        _TABLES[str(device)] = functional.create_dynamic_map().to(device)
    return _TABLES[str(device)]
