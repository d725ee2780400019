"""DistributedStrategy: being one rank among others, whatever shards the model."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from lightppo.strategy import collectives, launch
from lightppo.strategy.dataloader import RankSampler


class DistributedStrategy:
    """Process group, seeds, collectives, each rank's share of the data, and messages from rank 0.

    Args:
        seed: of Python, NumPy and torch on every rank, and of samplers.
        full_determinism: deterministic kernels only, slower; an operation that has none raises.
        timeout_minutes: a collective that takes longer ends the job.
    """

    def __init__(self, seed: int = 42, full_determinism: bool = False, timeout_minutes: float = 30) -> None:
        self.seed = seed
        self.full_determinism = full_determinism
        self.timeout_minutes = timeout_minutes
        self.device = torch.device("cpu")

    # -- processes -----------------------------------------------------------------------------------------------

    def setup_distributed(self, timeout: timedelta | None = None) -> None:
        """Seeds, joins the process group (gloo or nccl) and picks this rank's device. Collective.

        Args:
            timeout: longest wait for a collective; None is ``timeout_minutes``.
        """
        self.set_seed(self.seed)
        self.device = launch.init_process_group(timeout or timedelta(minutes=self.timeout_minutes))

    def set_seed(self, seed: int) -> None:
        """Seeds Python, NumPy and torch, alike on every rank."""
        import numpy

        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if self.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False

    @property
    def world_size(self) -> int:
        """Number of ranks; 1 before ``setup_distributed``."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def get_rank(self) -> int:
        """This rank; 0 before ``setup_distributed``."""
        return dist.get_rank() if dist.is_initialized() else 0

    def is_rank_0(self) -> bool:
        """True on the rank that prints, logs and writes."""
        return self.get_rank() == 0

    def setup_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        sampler: Sampler | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader:
        """A dataloader that gives this rank its share.

        Args:
            dataset: map-style.
            batch_size: samples per rank and batch.
            pin_memory: page-locked batches; without a GPU there is nothing to lock for.
            shuffle: seeded, differently every epoch (``dataloader.sampler.set_epoch``).
            collate_fn: list of samples → batch.
            drop_last: leave out what does not fill every rank's batch; else the last batch is smaller.
            sampler: in place of the built-in ``RankSampler``; then ``shuffle`` and ``consumed_samples`` are its own.
            consumed_samples: samples that all ranks together have taken already.
        """
        if sampler is None:
            sampler = RankSampler(
                dataset,
                self.world_size,
                self.get_rank(),
                shuffle=shuffle,
                seed=self.seed,
                drop_last=drop_last,
                consumed_samples=consumed_samples,
            )
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            generator=torch.Generator(),  # of its own: beginning an epoch draws no number of the global one
            pin_memory=pin_memory and launch.on_cuda(),
        )

    # -- communication -------------------------------------------------------------------------------------------

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Reduces tensors, numbers or dictionaries of them. Collective. See ``collectives.all_reduce``."""
        return collectives.all_reduce(data, op, self.device)

    def all_gather(self, data: Any) -> Any:
        """Concatenates tensors, numbers or dictionaries of them. Collective. See ``collectives.all_gather``."""
        return collectives.all_gather(data, self.device)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Any picklable object of every rank, in rank order. Collective."""
        return collectives.all_gather_object(obj)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s picklable object on every rank. Collective."""
        return collectives.broadcast_object(obj, src)

    def same_count(self, n: int) -> int:
        """The largest ``n`` of all ranks: how often everybody has to run a collective. Collective."""
        return self.all_reduce(int(n), op="max")

    def barrier(self) -> None:
        """Waits for all ranks. Collective."""
        dist.barrier()

    def print(self, *msg: Any) -> None:
        """Prints on rank 0."""
        if self.is_rank_0():
            print(*msg, flush=True)

    def report_memory(self, prefix: str) -> dict[str, float]:
        """Memory of this process in GiB, printed on rank 0: allocated and peak on a GPU, resident on a CPU.

        Args:
            prefix: what has just happened.
        """
        if self.device.type == "cuda":
            memory = {
                "allocated": torch.cuda.memory_allocated(self.device) / 2**30,
                "peak": torch.cuda.max_memory_allocated(self.device) / 2**30,
            }
        else:
            import psutil

            memory = {"resident": psutil.Process().memory_info().rss / 2**30}
        self.print(f"{prefix}: " + ", ".join(f"{name} {value:.2f} GiB" for name, value in memory.items()))
        return memory
