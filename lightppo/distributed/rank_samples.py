"""Each rank's share of a data set: ``strategy.setup_dataloader``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sized
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightppo.distributed.device import on_cuda

logger = logging.getLogger(__name__)


class RankSampler(DistributedSampler):
    """torch's sampler of one rank's share of a seeded permutation, which can also start in the middle of an epoch.

    All ranks get equally many samples, as collectives require: up to ``num_replicas - 1`` samples come twice per epoch,
    or are left out with ``drop_last``. Without ``num_replicas`` and ``rank`` they are those of the process group.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        consumed_samples: int = 0,
    ) -> None:
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        size = len(dataset)
        if size < (num_replicas if drop_last else 1):
            raise ValueError(
                f"{size} samples on {num_replicas} ranks leave nothing with drop_last={drop_last}"
            )
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        if self.total_size > size:
            twice = self.total_size - size
            logger.info(
                "%d samples on %d ranks: %d come twice per epoch", size, num_replicas, twice
            )
        self.set_epoch(0, consumed_samples)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the permutation, and its start: ``consumed_samples`` counts what all ranks have taken of it."""
        self._skip = consumed_samples // self.num_replicas
        if self._skip > self.num_samples:
            raise ValueError(
                f"consumed_samples={consumed_samples} is more than one epoch of {self.total_size} samples"
            )
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self._skip, None)

    def __len__(self) -> int:
        return self.num_samples - self._skip


def setup_dataloader(
    strategy: Any,
    dataset: Any,
    batch_size: int,
    pin_memory: bool = False,
    shuffle: bool = True,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    sampler: Sampler | None = None,
    consumed_samples: int = 0,
) -> DataLoader:
    """Make a dataloader for this rank's share of a map-style dataset; ``batch_size`` is per rank.

    The order is seeded and differs every epoch (``dataloader.sampler.set_epoch``). ``consumed_samples`` counts the
    samples that all ranks have already taken. ``sampler`` replaces ``RankSampler``; ``collate_fn`` defaults to the
    dataset's own.
    """
    if sampler is None:
        sampler = RankSampler(
            dataset,
            strategy.world_size,
            strategy.get_rank(),
            shuffle=shuffle,
            seed=strategy.seed,
            drop_last=drop_last,
            consumed_samples=consumed_samples,
        )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        collate_fn=collate_fn or getattr(dataset, "collate_fn", None),
        # A generator of its own, so that starting an epoch does not draw from the global one.
        generator=torch.Generator(),
        pin_memory=pin_memory and on_cuda(),
    )
