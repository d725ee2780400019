"""A seeded sampler that shares a dataset out over ranks and can start in the middle of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

logger = logging.getLogger(__name__)


class RankSampler(Sampler[int]):
    """Indices of one rank: every ``num_replicas``-th of a seeded permutation of the dataset.

    All ranks get the same number, as collectives need it. Where the size does not divide, the epoch wraps around: up
    to ``num_replicas - 1`` samples come twice, and none is lost, unless ``drop_last``.

    Args:
        dataset: anything with a length.
        num_replicas: number of ranks.
        rank: this rank.
        shuffle: permute, differently every epoch; False keeps the order.
        seed: of the permutation; the same on all ranks.
        drop_last: leave the remainder out instead of wrapping around.
        consumed_samples: samples that all ranks together have already taken from the first epoch.

    Raises:
        ValueError: the dataset is empty, or smaller than the number of ranks with ``drop_last``.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        consumed_samples: int = 0,
    ) -> None:
        size = len(dataset)
        if size == 0:
            raise ValueError("the dataset is empty")
        if drop_last and size < num_replicas:
            raise ValueError(f"{size} samples on {num_replicas} ranks leave nothing with drop_last=True")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.samples_per_rank = size // num_replicas if drop_last else -(-size // num_replicas)
        if not drop_last and size % num_replicas:
            repeated = self.samples_per_rank * num_replicas - size
            logger.info("%d samples on %d ranks: %d come twice per epoch", size, num_replicas, repeated)
        self.epoch = 0
        self._skip = 0
        self.set_epoch(0, consumed_samples)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Chooses the permutation and where in it to start.

        Args:
            epoch: number of the epoch.
            consumed_samples: samples of this epoch that all ranks together have already taken.

        Raises:
            ValueError: more were taken than the epoch holds.
        """
        skip = consumed_samples // self.num_replicas
        if skip > self.samples_per_rank:
            total = self.samples_per_rank * self.num_replicas
            raise ValueError(f"consumed_samples={consumed_samples} is more than one epoch of {total} samples")
        self.epoch, self._skip = epoch, skip

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(size, generator=generator).tolist()
        else:
            order = list(range(size))
        total = self.samples_per_rank * self.num_replicas
        order = (order * -(-total // size))[:total]
        return iter(order[self.rank : total : self.num_replicas][self._skip :])

    def __len__(self) -> int:
        return self.samples_per_rank - self._skip
