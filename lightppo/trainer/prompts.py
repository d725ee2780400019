"""The order of an episode's prompts, and its batches on each rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from lightppo.data.records import Prompt

_END = object()


class RolloutBatchSampler(Sampler[list[int]]):
    """Batches of prompt positions for one rank; ``batch_size`` is over all ranks.

    An epoch's order and its global batches depend only on seed, epoch and position, not on the number of ranks. Rank r
    gets ``batch[r::world_size]`` of every global batch: all ranks yield equally many batches, and a rank's share of the
    last one may be an EMPTY list.
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
        if num_samples < 1 or batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"num_samples {num_samples} and --rollout_batch_size {batch_size} must be at least 1, and rank {rank} "
                f"one of {world_size}"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = self._start = 0
        # positions that no further pass has; the same on every rank
        self.left_out: set[int] = set()

    @property
    def epoch_size(self) -> int:
        """Return prompts per epoch."""
        return self.num_samples - len(self.left_out)

    def order(self) -> list[int]:
        """Return positions of all prompts in this epoch's order, the same on every rank."""
        whole: Iterable[int] = range(self.num_samples)
        if self.shuffle:
            # Not seed + epoch: epoch 1 of seed 42 would be epoch 0 of seed 43.
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            whole = torch.randperm(self.num_samples, generator=generator).tolist()
        return [position for position in whole if position not in self.left_out]

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        start = self._start
        self._start = 0  # a resumed position counts once; the next pass is complete
        for begin in range(start, len(order), self.batch_size):
            yield order[begin : begin + self.batch_size][self.rank :: self.world_size]

    def __len__(self) -> int:
        """Return batches in the next pass (equal on all ranks); after a resume, fewer than in an epoch."""
        return -(-(self.epoch_size - self._start) // self.batch_size)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the next pass's order, and its start: how many prompts of this epoch all ranks have used."""
        if not 0 <= consumed_samples <= self.epoch_size:
            raise ValueError(
                f"consumed_samples is {consumed_samples}, but an epoch has {self.epoch_size} prompts"
            )
        self.epoch = epoch
        self._start = consumed_samples


class EpisodePrompts:
    """The generation batches of one episode on this rank, from where it was left.

    Args:
        dataloader: its ``batch_sampler`` or ``sampler`` has ``set_epoch(epoch, consumed_samples)``. One with
            ``set_epoch(epoch)`` cannot start inside an episode, one with none is taken as it comes.
        episode: its number, from 0; seeds the shuffling.
        consumed_prompts: prompts of this episode that were used before, over all ranks.
        convert: makes prompts of what the dataloader yields, which without it are prompts.

    Attributes:
        exhausted: no batch is left; the same on every rank.
        taken: prompts of this rank taken so far.
    """

    def __init__(
        self,
        dataloader: Iterable,
        episode: int,
        consumed_prompts: int,
        convert: Callable[[Any], list[Prompt]] = lambda batch: batch,
    ) -> None:
        self.go_to(dataloader, episode, consumed_prompts)
        self._batches = iter(dataloader)
        self._convert = convert
        self.taken = 0
        self._look_ahead()
        # else all were consumed; what was sampled may wait for training
        if self.exhausted and not consumed_prompts:
            raise ValueError(f"the prompts dataloader gave no batch in episode {episode + 1}")

    def go_to(self, dataloader: Any, episode: int, consumed_prompts: int) -> None:
        """Have the dataloader begin the episode where it was left."""
        samplers = (
            getattr(dataloader, "batch_sampler", None),
            getattr(dataloader, "sampler", None),
        )
        sampler = next((s for s in samplers if hasattr(s, "set_epoch")), None)
        if (
            sampler is not None
            and "consumed_samples" in inspect.signature(sampler.set_epoch).parameters
        ):
            sampler.set_epoch(episode, consumed_samples=consumed_prompts)
        elif consumed_prompts:
            raise ValueError(
                "cannot resume inside an episode: the prompts dataloader's sampler has no set_epoch(epoch, "
                "consumed_samples); make it with strategy.setup_dataloader"
            )
        elif sampler is not None:
            sampler.set_epoch(episode)

    def _look_ahead(self) -> None:
        self._next = next(self._batches, _END)
        self.exhausted = self._next is _END

    def take(self) -> list[Prompt]:
        """Return the next generation batch; only while there is one."""
        prompts = self._convert(self._next)
        self._look_ahead()
        self.taken += len(prompts)
        return prompts
