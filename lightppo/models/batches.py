"""Batches for a model: how sequences lie in a forward, micro batches, copies that do not wait for a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightppo.config.rules import MicroBatchSpec
from lightppo.errors import ConfigError
from lightppo.ranks import Ranks


@dataclass(frozen=True)
class Batch:
    """Padded sequences for one forward, and which of their positions are read; by default all are."""

    ids: Tensor  # (B, S)
    mask: Tensor  # (B, S)
    columns: slice = field(default_factory=lambda: slice(None))  # the A positions that are read
    # (B, A) bool, K of them True: what is read and not padding
    real: Tensor | None = None
    # (K,), their places in the flat (B·A,): a mask as an index would wait for the GPU
    kept: Tensor | None = None

    @property
    def places(self) -> Tensor:
        """(A,), the positions that are read."""
        return torch.arange(self.ids.shape[1], device=self.ids.device)[self.columns]

    def inputs(self, module: nn.Module, reads_mask: bool = False) -> dict[str, Any]:
        """Keyword arguments for a Hugging Face forward without a cache.

        ``reads_mask``: the model's forward itself reads the mask, as the load-balancing loss does.
        """
        inputs = {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": False}
        if takes(module, "position_ids"):
            inputs["position_ids"] = position_ids_from_mask(self.mask)
        return inputs

    def reading(self) -> AbstractContextManager:
        """What is around a forward of which only ``places`` are read."""
        return nullcontext()

    def at_places(self, values: Tensor) -> Tensor:
        """(B, S, ·) -> (B, A, ·)."""
        return values[:, self.columns]

    def of_real(self, at_places: Tensor) -> Tensor:
        """(B, A, ·) -> (K, ·)."""
        return at_places.flatten(0, 1).index_select(0, self.kept)

    def returned(self, at_places: Tensor) -> Tensor:
        """What a caller gets of (B, A, ·)."""
        return at_places

    def scatter(self, values: Tensor) -> Tensor:
        """(K,) -> (B, A), 0 elsewhere."""
        return (
            values.new_zeros(self.real.numel()).index_copy(0, self.kept, values).view_as(self.real)
        )


class PaddedLayout:
    """How the sequences of a batch lie in a model's forward: padded, one below the other."""

    packs = False  # its rows have no padding
    shares_prompts = False  # a prompt runs once for all its sequences in a batch

    def batch(
        self,
        sequences: Tensor,
        attention_mask: Tensor,
        columns: slice,
        real: Tensor,
        num_actions: int | None,
    ) -> Batch:
        """A forward of which ``columns`` are read where ``real`` (B, A), on the CPU.

        ``num_actions``: prompts, which may be shared, end before as many last columns; None: none is shared.
        """
        device = sequences.device
        kept = to_device(real.flatten().nonzero()[:, 0], device)
        return Batch(sequences, attention_mask, columns, to_device(real, device), kept)

    def split(
        self,
        lengths: Sequence[tuple[int, int]],
        spec: MicroBatchSpec,
        ranks: Ranks,
        prompts: Sequence[Hashable] = (),
    ) -> list[list[int]]:
        """Row numbers of each micro batch, see :func:`micro_batches`; ``prompts`` may be shared. Collective."""
        return micro_batches(lengths, spec)


PADDED = PaddedLayout()


def layout_of_all(models: Iterable[Any]) -> PaddedLayout:
    """The layout of micro batches that all of these models run; what has none, as None, runs any."""
    layouts = [model.layout for model in models if hasattr(model, "layout")]
    return min(layouts, key=attrgetter("packs", "shares_prompts"), default=PADDED)


def micro_batches(lengths: Sequence[tuple[int, int]], spec: MicroBatchSpec) -> list[list[int]]:
    """Split rows with ``lengths`` (prompt, response) into micro batches: lists of row numbers, each row in one.

    Rows of similar length are together, longest first, so that a lack of memory shows at once. By tokens, rows ×
    (longest prompt + longest response) stays within the budget; a row above the budget is alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: -sum(lengths[i]))
    if spec.unit == "samples":
        return [order[i : i + spec.size] for i in range(0, len(order), spec.size)]
    parts: list[list[int]] = []
    width = (0, 0)
    for i in order:
        wider = (max(width[0], lengths[i][0]), max(width[1], lengths[i][1]))
        if parts and (len(parts[-1]) + 1) * sum(wider) <= spec.size:
            parts[-1].append(i)
            width = wider
        else:
            parts.append([i])
            width = lengths[i]
    return parts


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Position of each real token among the real tokens of its row, (B, S) -> (B, S); left padding gets 0."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def check_num_actions(num_actions: int, sequence_length: int) -> None:
    """ValueError unless every action has a position before it to predict it."""
    if not isinstance(num_actions, int) or not 0 < num_actions < sequence_length:
        raise ValueError(
            f"num_actions = {num_actions} must be between 1 and {sequence_length - 1} (S - 1)"
        )


def refuse_ring(ring_attn_group: Any) -> None:
    """Raise ConfigError for a script that splits sequences over ranks."""
    if ring_attn_group is not None:
        raise ConfigError("ring_attn_group: sequences are not split over ranks here; leave it out")


def real_actions(attention_mask: Tensor, num_actions: int) -> Tensor:
    """(B, S) -> (B, A) bool: the action token and the token that predicts it are both real."""
    real = attention_mask.bool()
    return real[:, -num_actions:] & real[:, -num_actions - 1 : -1]


# bytes: the driver of a GPU puts so many aside before it copies, and need not wait
_KEPT_ASIDE = 1 << 16


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy from the CPU without waiting for what the GPU is doing; :func:`on_cpu` gives ``x`` again."""
    moved = _pinned(tensor, device).to(device, non_blocking=True)
    if moved is not tensor:
        moved.source = tensor, tensor._version + moved._version
    return moved


def _pinned(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor from which the driver can copy to the device at its leisure; small ones it keeps aside by itself."""
    travels = tensor.device.type == "cpu" and torch.device(device).type not in ("cpu", "meta")
    return (
        tensor.pin_memory()
        if travels and tensor.nbytes > _KEPT_ASIDE and not tensor.is_pinned()
        else tensor
    )


def on_cpu(tensor: Tensor) -> Tensor:
    """On the CPU, without a wait for a GPU if it came by :func:`to_device` and nothing was written to it since."""
    source, version = getattr(tensor, "source", (None, 0))
    return (
        tensor.cpu() if source is None or source._version + tensor._version != version else source
    )


# -- what a forward takes, and what a model is made of ----------------------------------------------------------------


def takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward has a parameter of this name."""
    return name in inspect.signature(module.forward).parameters


def recomputes(module: nn.Module) -> bool:
    """Whether layers run again in the backward pass: gradient checkpointing, a word that transformers has renamed."""
    return any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def cache_argument(module: nn.Module) -> str | None:
    """What the module's forward, and its output, call the cache: transformers renamed it in 5.24. None: it takes none."""
    return next((name for name in ("past_key_values", "cache") if takes(module, name)), None)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's repeated blocks, by transformers' names for them; empty if it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
