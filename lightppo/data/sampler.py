"""The order of prompts: seeded, shared out over ranks, resumable to the prompt, each prompt once per episode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler


class RolloutBatchSampler(Sampler[list[int]]):
    """Batches of prompt positions for one rank.

    The order of an epoch and its cut into global batches depend on the seed, the epoch and the position only, never on
    the number of ranks. Rank r gets ``batch[r::world_size]`` of every global batch: all ranks yield equally many
    batches, and on the last, short one a rank's share may be an EMPTY list. No prompt is dropped or repeated, but for
    those that :meth:`leave_out` names.

    The position (``consumed_samples``) counts prompts over all ranks within the epoch, and moves on when a batch is
    yielded: it is exact for a ``DataLoader(batch_sampler=…, num_workers=0)``, which asks for a batch when it needs it.

    Args:
        num_samples: prompts in the dataset.
        batch_size: prompts per batch over all ranks (``gen_batch_size``).
        rank: this rank.
        world_size: number of ranks.
        shuffle: a new order each epoch; else the dataset's.
        seed: of the orders.

    Raises:
        ValueError: a number out of its range.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 42,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}: the dataset is empty")
        if batch_size < 1:
            raise ValueError(f"--rollout_batch_size is {batch_size}; at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.consumed_samples = 0
        self._start = 0
        self._left_out: frozenset[int] = frozenset()

    def leave_out(self, positions: Iterable[int]) -> None:
        """Leave these prompts out of all further passes, beside those left out before; the same on every rank.

        Raises:
            ValueError: no such prompt, or none would be left.
        """
        left_out = self._left_out | set(positions)
        if unknown := sorted(p for p in left_out if not 0 <= p < self.num_samples):
            raise ValueError(f"prompt {unknown[0]} of {self.num_samples} cannot be left out")
        if len(left_out) == self.num_samples:
            raise ValueError(f"all {self.num_samples} prompts would be left out")
        self._left_out = frozenset(left_out)

    @property
    def epoch_size(self) -> int:
        """Prompts of an epoch."""
        return self.num_samples - len(self._left_out)

    def order(self) -> list[int]:
        """Positions of all prompts in this epoch's order, the same on every rank."""
        return [position for position in self._whole_order() if position not in self._left_out]

    def _whole_order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator()
        # Not seed + epoch: epoch 1 of seed 42 would be epoch 0 of seed 43.
        generator.manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        order, start = self.order(), self._start
        self._start = 0  # a resumed position counts once; the next pass is a whole one
        self.consumed_samples = start
        for begin in range(start, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            self.consumed_samples = begin + len(batch)
            yield batch[self.rank :: self.world_size]

    def __len__(self) -> int:
        """Batches that the next pass yields (equal on all ranks); less than an epoch's after a resume."""
        return -(-(self.epoch_size - self._start) // self.batch_size)

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch."""
        return -(-self.epoch_size // self.batch_size)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the order of the next pass and where it starts.

        Args:
            epoch: number of the epoch.
            consumed_samples: prompts of this epoch already used, over all ranks. All of them: an empty pass.

        Raises:
            ValueError: more prompts than there are.
        """
        if not 0 <= consumed_samples <= self.epoch_size:
            raise ValueError(
                f"consumed_samples is {consumed_samples}, but an epoch has {self.epoch_size} prompts; "
                "it counts within the epoch"
            )
        self.epoch = epoch
        self.consumed_samples = self._start = consumed_samples

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position, and what must not change for the position to mean the same."""
        return {
            "epoch": self.epoch,
            "consumed_samples": self.consumed_samples,
            "num_samples": self.num_samples,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "left_out": sorted(self._left_out),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the prompts that the saved run had used; another world or batch size is fine.

        Raises:
            ValueError: other data, seed or shuffling than in the saved run: prompts would be skipped or repeated.
        """
        for name in ("num_samples", "shuffle", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint's sampler has {name} {state[name]}, this run has {getattr(self, name)}: its "
                    "position means nothing in this data; use the same data and --seed, or start anew"
                )
        self._left_out = frozenset(state.get("left_out", ()))
        self.set_epoch(state["epoch"], state["consumed_samples"])
