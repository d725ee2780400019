"""Whatever a dataloader yields → prompts and language-model batches; where in an episode to start."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightppo.algorithms.losses import IGNORE_INDEX
from lightppo.data.records import Prompt
from lightppo.models.packing import to_device

_END = object()


class EpisodePrompts:
    """The generation batches of one episode on this rank, from where it was left.

    Args:
        dataloader: its ``batch_sampler`` or ``sampler`` has ``set_epoch(epoch, consumed_samples)``; one with
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
        self._batches, self._convert, self.taken = iter(dataloader), convert, 0
        self._look_ahead()
        # else all were consumed; what was sampled may wait for training
        if self.exhausted and not consumed_prompts:
            raise ValueError(f"the prompts dataloader gave no batch in episode {episode + 1}")

    def _look_ahead(self) -> None:
        self._next = next(self._batches, _END)
        self.exhausted = self._next is _END

    def take(self) -> list[Prompt]:
        """The next generation batch; only while there is one."""
        prompts = self._convert(self._next)
        self._look_ahead()
        self.taken += len(prompts)
        return prompts


def as_lm_batch(batch: Any, device: torch.device) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels``, each (B, S), of a pretraining dataloader's batch.

    Args:
        batch: a mapping, perhaps without ``labels``; or in the seed's style a tuple whose second and third entries are
            ids and mask, (B, S) or (B, 1, S).
        device: where it goes.
    """
    if isinstance(batch, (tuple, list)):
        batch = {"input_ids": batch[1], "attention_mask": batch[2]}
    ids, mask = batch["input_ids"], batch["attention_mask"]
    ids, mask = ids.reshape(-1, ids.size(-1)), mask.reshape(-1, mask.size(-1))
    labels = batch.get("labels")
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX) if labels is None else labels
    found = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: to_device(tensor, device) for name, tensor in found.items()}


def endless(dataloader: Iterable) -> Iterator:
    """The batches again and again, reshuffled each time round where the sampler can."""
    if isinstance(dataloader, Iterator):
        yield from dataloader
        raise ValueError(
            "the iterator over the pretraining data came to its end: pass the dataloader itself"
        )
    sampler = getattr(dataloader, "sampler", None)
    for round_ in itertools.count():
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(round_)
        batch = None
        for batch in dataloader:
            yield batch
        if batch is None:
            raise ValueError(
                "the pretraining dataloader gave no batch: it has less data than one batch"
            )
