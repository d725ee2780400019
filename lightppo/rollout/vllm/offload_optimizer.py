"""Room for vLLM: optimizer states and fp32 masters leave the GPU while vLLM samples (``--offload_during_rollout``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightppo.callbacks import Callback
from lightppo.distributed.device import on_cuda
from lightppo.zero3 import AWAY

# Where DeepSpeed's optimizers keep fp32 masters and flat gradients: ZeRO 3, ZeRO 1 and 2, bf16 at stage 1.
_FLAT = (
    "fp32_partitioned_groups_flat",
    "grad_partitions_flat_buffer",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
)


class Room:
    """Move what trained engines hold for their optimizer steps to CPU memory and back.

    Storages are emptied, not tensors replaced: DeepSpeed keeps views of them. Whatever needs an engine's states before
    :meth:`come_back` brings them back: see :data:`lightppo.zero3.AWAY`.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self._away: list[tuple[UntypedStorage, Tensor]] = []  # each emptied storage, and its bytes
        self._memory: dict[int, Tensor] = {}  # page-locked, by storage; locking takes long

    def leave(self) -> int:
        """Free the memory; returns how many bytes. Those that are away already stay there."""
        if self._away:
            return 0
        earlier_memory = self._memory
        self._memory = {}
        for key, storage in self.storages().items():
            memory = earlier_memory.get(key)
            if memory is None or memory.numel() != storage.nbytes():
                memory = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_cuda())
            self._memory[key] = memory
            self._away.append((storage, memory.copy_(_bytes_of(storage), non_blocking=True)))
        if on_cuda():
            torch.cuda.synchronize()
        for storage, _ in self._away:
            storage.resize_(0)
        if on_cuda():
            torch.cuda.empty_cache()  # what is free must be free for vLLM, too
        AWAY.update(dict.fromkeys(self.strategy.trained_engines, self.come_back))
        return sum(memory.numel() for _, memory in self._away)

    def come_back(self) -> None:
        """Put everything back where it was."""
        for engine in self.strategy.trained_engines:
            AWAY.pop(engine, None)
        for storage, memory in self._away:
            storage.resize_(memory.numel())
            _bytes_of(storage).copy_(memory, non_blocking=True)
        self._away = []

    def storages(self) -> dict[int, UntypedStorage]:
        """Return, by address, those of optimizer states, masters and flat gradients on the device, not the model's own."""
        by_address = {}
        for engine in self.strategy.trained_engines:
            parameters = list(engine.module.parameters())
            parameter_shards = [
                parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")
            ]
            of_model = {
                tensor.untyped_storage()._cdata for tensor in (*parameters, *parameter_shards)
            }
            for tensor in _held_for_steps(engine.optimizer):
                storage = tensor.untyped_storage()
                is_here = tensor.device.type == self.strategy.device.type and storage.resizable()
                if is_here and storage.nbytes() and storage._cdata not in of_model:
                    by_address[storage._cdata] = storage
        return by_address


def _held_for_steps(optimizer: Any) -> Iterator[Tensor]:
    """Yield every tensor with a dimension that an optimizer of DeepSpeed, and the one within, keeps between steps."""
    inner_optimizer = getattr(optimizer, "optimizer", optimizer)
    values = [value for state in inner_optimizer.state.values() for value in state.values()]
    values += [parameter for group in inner_optimizer.param_groups for parameter in group["params"]]
    for name in _FLAT:
        flat_tensors = getattr(optimizer, name, ())
        values += [flat_tensors] if isinstance(flat_tensors, Tensor) else list(flat_tensors or ())
    yield from (value.detach() for value in values if isinstance(value, Tensor) and value.dim())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class SleepAfterEvaluation(Callback):
    """Put the engine to sleep after evaluations, as after training rollouts, where the trainer needs its memory back."""

    def on_evaluation(self, run: Any, step: int, result: Mapping[str, float]) -> None:
        run.rollout_engine.sleep()
