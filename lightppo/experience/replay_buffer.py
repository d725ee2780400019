"""The samples of the current rollout, one by one and without padding, from which micro batches are made."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightppo.algorithms.masking import whiten
from lightppo.experience.experience import Experience
from lightppo.ranks import Ranks


class ReplayBuffer:
    """A list of one-row experiences.

    Args:
        sample_batch_size: rows that :meth:`sample` returns.
        limit: most rows kept, oldest out first; 0 keeps all.
        cpu_offload: keep every tensor on the CPU.
        device: where :meth:`sample` and :meth:`collate_fn` put their batches.
        pin_memory: batches go to a GPU through page-locked memory.
    """

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        cpu_offload: bool = True,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> None:
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self.cpu_offload = cpu_offload
        self.device = torch.device(device)
        self.pin_memory = pin_memory and self.device.type == "cuda"
        self.items: list[Experience] = []

    def append(self, experience: Experience) -> None:
        """Add all rows of a batch."""
        if self.cpu_offload:
            experience = experience.to_device("cpu")
        self.items += experience.split()
        if self.limit > 0:
            self.items = self.items[-self.limit :]

    def extend(self, experiences: Iterable[Experience]) -> None:
        """Add several batches."""
        for experience in experiences:
            self.append(experience)

    def clear(self) -> None:
        """Forget all rows."""
        self.items.clear()

    def sample(self) -> Experience:
        """``sample_batch_size`` different rows as one batch.

        Raises:
            ValueError: if the buffer holds fewer.
        """
        if len(self) < self.sample_batch_size:
            raise ValueError(f"the replay buffer holds {len(self)} samples, fewer than {self.sample_batch_size}")
        return self.collate_fn(random.sample(self.items, self.sample_batch_size))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Experience:
        return self.items[index]

    def collate_fn(self, items: Sequence[Experience]) -> Experience:
        """Rows → one padded batch on the training device."""
        batch = Experience.collate(items)
        return (batch.pin_memory() if self.pin_memory and self.cpu_offload else batch).to_device(self.device)

    def normalize(self, attribute: str, strategy: Ranks, divide_std: bool = True, **options: Any) -> None:
        """Whiten a per-action tensor over the trained tokens of all rows on all ranks.

        Args:
            attribute: only ``"advantages"``.
            strategy: its ``all_reduce`` sums over ranks.
            divide_std: ``False`` only subtracts the mean.
            options: further ones of :func:`lightppo.algorithms.masking.whiten`.

        Raises:
            ValueError: on another attribute.
        """
        if attribute != "advantages":
            raise ValueError(f"only 'advantages' can be normalised, not {attribute!r}")
        # A rank without samples still takes part in the reduction, with nothing.
        lengths = [item.num_actions for item in self.items]
        values = torch.cat([item.advantages[0] for item in self.items]) if lengths else torch.zeros(0)  # (ΣA,)
        mask = torch.cat([item.action_mask[0] for item in self.items]) if lengths else torch.zeros(0, dtype=torch.bool)
        whitened = whiten(
            values[None],
            mask[None],
            all_reduce_sum=lambda x: strategy.all_reduce(x, "sum"),
            divide_std=divide_std,
            **options,
        )  # (1, ΣA)
        for item, row in zip(self.items, whitened.split(lengths, dim=1)):
            item.advantages = row
