"""Adapters inside vLLM's workers: those that the trainer pushed, from which vLLM fills its slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.platforms import current_platform

from lightppo.rollout.vllm.adapter_push import NO_EXPERTS

_PEFT_PREFIX = "base_model.model."  # before the names in an adapter's file


class AdapterShelf:
    """Adapters in CPU memory, by name, where vLLM would look for files.

    vLLM may take an adapter out of its slots while a request waits that needs it, and asks for it again.
    """

    def __init__(self, worker: Any) -> None:
        self._loader = worker.model_runner.lora_manager
        self._held: dict[str, LoRAModel] = {}
        self._loader._load_adapter = self._again
        for products in self._loader._adapter_manager.punica_wrapper_mapping.values():
            if isinstance(products, PunicaWrapperCPU):
                products.__class__ = ProductsBySlot

    def hold(
        self, name: str, tensors: Iterable[tuple[str, Tensor]], config: dict[str, Any]
    ) -> None:
        """Keeps copies of an adapter's matrices; ``config`` is its ``adapter_config.json``. A ValueError where vLLM
        does not know such adapters."""
        loader = self._loader
        described = PEFTHelper.from_dict(config)
        described.validate_legal(loader.lora_config)
        self._held[name] = LoRAModel.from_lora_tensors(
            1,  # the one of the request, later
            {_PEFT_PREFIX + key: tensor.to("cpu", copy=True) for key, tensor in tensors},
            described,
            device="cpu",
            dtype=loader.lora_config.lora_dtype,
            model_vocab_size=loader.vocab_size,
            weights_mapper=_names_within(loader),
        )

    def forget(self, names: Iterable[str]) -> None:
        """Frees adapters that nobody will ask for."""
        for name in names:
            self._held.pop(name, None)

    def names(self) -> list[str]:
        """Of those that are held."""
        return list(self._held)

    def _again(self, request: Any) -> LoRAModel:
        """In place of vLLM's ``_load_adapter``."""
        return self._held[request.lora_name].clone(request.lora_int_id)


class ProductsBySlot(PunicaWrapperCPU):
    """B A x on a CPU, one product for all tokens of an adapter. vLLM's own copies both matrices for every token."""

    _rows: list[tuple[int, Tensor | None]] | None = None

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._rows = None

    def _rows_of_slots(self) -> list[tuple[int, Tensor | None]]:
        """Slots in use, each with the rows of its tokens; None: all rows."""
        if self._rows is None:
            slots = self.token_lora_indices  # (T,), -1: none
            used = slots.unique().tolist()
            self._rows = [
                (slot, None if len(used) == 1 else (slots == slot).nonzero().squeeze(1))
                for slot in used
                if slot >= 0
            ]
        return self._rows

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Adds to y (T, out), for x (T, in), by matrices (slots, 1, r, in) and (slots, 1, out, r) of fused layers."""
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for slot, rows in self._rows_of_slots():
            inputs = (x if rows is None else x[rows]).float()
            start = 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices):
                low = scale * (inputs @ a[slot, 0].float().T)  # (T, r)
                added = low.to(y.dtype) @ b[slot, 0].to(y.dtype).T
                if rows is None:
                    y[:, start : start + size] += added
                else:
                    y[rows, start : start + size] += added
                start += size


def shelf_of(worker: Any) -> AdapterShelf:
    """The one of a worker, which is made at the first call."""
    if not hasattr(worker, "lightppo_shelf"):
        worker.lightppo_shelf = AdapterShelf(worker)
    return worker.lightppo_shelf


def obstacle(worker: Any, names: Iterable[str], rank: int) -> str | None:
    """Why a worker cannot take adapters with matrices of these names and this rank; None: it can."""
    config = worker.model_runner.lora_config
    if not config:
        return "vLLM was started without LoRA"
    if rank > config.max_lora_rank:
        return f"vLLM was started for adapters of rank {config.max_lora_rank} at most"
    loader = worker.model_runner.lora_manager
    manager = loader._adapter_manager
    if current_platform.is_cpu() and any(
        isinstance(one, MoERunner) for one in manager.model.modules()
    ):
        return NO_EXPERTS
    within = set(manager.modules)
    for fused, parts in manager.packed_modules.items():
        if fused in within:
            within |= set(parts)
    for name in _layers(names, _names_within(loader)):
        if name not in within:
            return f"vLLM has no adapters for {name}"
    return None


def _layers(names: Iterable[str], mapper: Any) -> Iterator[str]:
    """vLLM's names of the layers that matrices are of."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    for name in names:
        yield parse_fine_tuned_lora_name(_PEFT_PREFIX + name, mapper)[0]


def _names_within(loader: Any) -> Any | None:
    """From names in an adapter's file to vLLM's, where they differ."""
    mapper = getattr(loader._adapter_manager.model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


# -- in process --------------------------------------------------------------------------------------------------------


def hold(
    worker: Any, name: str, tensors: Iterable[tuple[str, Tensor]], config: dict[str, Any]
) -> None:
    """:meth:`AdapterShelf.hold` of a worker."""
    shelf_of(worker).hold(name, tensors, config)


def forget(worker: Any, names: Iterable[str]) -> None:
    """:meth:`AdapterShelf.forget` of a worker."""
    shelf_of(worker).forget(names)


# -- for comparisons ---------------------------------------------------------------------------------------------------


def added_outputs(worker: Any, model: Any, probes: Any) -> dict[str, Tensor]:
    """What the newest adapter adds to the outputs of a model's layers for inputs ``probes(width, device)``, by name."""
    if not worker.model_runner.lora_config:
        return {}
    manager = worker.model_runner.lora_manager._adapter_manager
    numbers = [number or 0 for number in manager.lora_index_to_id]
    if not any(numbers):
        return {}
    slot = numbers.index(max(numbers))
    added = {}
    for name, layer in model.named_modules():
        a, b = getattr(layer, "lora_a_stacked", None), getattr(layer, "lora_b_stacked", None)
        if a is None or b is None:
            continue
        if isinstance(a, Tensor):
            a, b = (a,), (b,)  # of the head, or of an embedding, which gets no adapter here
        if a[0].dim() != 4:
            continue
        # A (slots, 1, r, in), B (slots, 1, out, r): one of each for every layer that is fused.
        parts = [
            two[slot, 0].float() @ (one[slot, 0].float() @ probes(one.shape[-1], one.device))
            for one, two in zip(a, b)
        ]
        whose = name.replace("logits_processor", "lm_head")
        added[whose] = torch.cat(parts)
    return added
