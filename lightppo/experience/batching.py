"""From the replay buffer to optimizer steps: which samples, in which micro batches, divided by which totals.

All ranks agree on two counts here and nowhere else: optimizer steps per epoch and micro batches per optimizer step. A
rank with fewer micro batches runs fully masked ones, so that ZeRO-3's collectives always meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightppo.algorithms.masking import LossNormalizer
from lightppo.config.micro_batches import MicroBatchSpec
from lightppo.experience.experience import Experience
from lightppo.models.micro_batches import micro_batches
from lightppo.ranks import Ranks


@dataclass
class Minibatch:
    """One optimizer step as this rank sees it.

    Attributes:
        micro_batches: forward and backward passes of the actor on this rank; as many on every rank.
        normalizer: trained tokens and sequences of the step, over all ranks and micro batches.
        rows: the one-row experiences that each micro batch was made of, where they came from the buffer.
        critic_micro_batches: the same samples for the critic; ``None``: in the actor's micro batches.
    """

    micro_batches: list[Experience]
    normalizer: LossNormalizer
    rows: Sequence[Sequence[Experience]] = ()
    critic_micro_batches: list[Experience] | None = None

    @property
    def of_critic(self) -> list[Experience]:
        """Forward and backward passes of the critic on this rank; as many on every rank."""
        return self.micro_batches if self.critic_micro_batches is None else self.critic_micro_batches

    def note_log_probs(self, i: int) -> None:
        """Hand the log probs of micro batch ``i`` to rows that have none yet: those the training pass has set."""
        for row, log_probs in zip(self.rows[i] if i < len(self.rows) else (), self.micro_batches[i].action_log_probs):
            if row.action_log_probs is None:
                row.action_log_probs = log_probs[None, : row.num_actions].to(row.sequences.device)


def plan_minibatch(
    micro_batches: list[Experience],
    collectives: Ranks,
    *,
    loss_scale: float = 1.0,
    device: torch.device,
) -> Minibatch:
    """Complete this rank's micro batches to the common count and total the loss masks over all ranks."""
    micro_batches = _completed(micro_batches, collectives, device)
    normalizer = LossNormalizer.from_masks(
        [m.action_mask for m in micro_batches],
        all_reduce_sum=lambda x: collectives.all_reduce(x, "sum"),
        dp_size=collectives.world_size,
        scale=loss_scale,
    )
    return Minibatch(micro_batches, normalizer)


def _completed(micro_batches: list[Experience], collectives: Ranks, device: torch.device) -> list[Experience]:
    missing = collectives.same_count(len(micro_batches)) - len(micro_batches)
    return micro_batches + [Experience.placeholder(device) for _ in range(missing)]


@dataclass(frozen=True)
class MicroBatching:
    """How rows become micro batches, on all ranks alike.

    Attributes:
        collectives: reductions over ranks.
        packed: rows go through the models without padding.
        share_prompts: packed, a prompt goes through them once for all its rows in a micro batch.
    """

    collectives: Ranks
    packed: bool = False
    share_prompts: bool = False

    def split(
        self, lengths: Sequence[tuple[int, int]], spec: MicroBatchSpec, prompts: Sequence[bytes]
    ) -> list[list[int]]:
        """Row numbers of each micro batch, see :func:`lightppo.models.micro_batches.micro_batches`. Collective.

        Ranks that can cut their rows into as many parts as the rank with most of them do so.
        """
        options = {"packed": self.packed, "prompts": prompts if self.share_prompts else None}
        parts = micro_batches(lengths, spec, **options)
        return micro_batches(lengths, spec, at_least=self.collectives.same_count(len(parts)), **options)

    def split_rows(self, rows: Sequence[Experience], spec: MicroBatchSpec) -> list[list[Experience]]:
        """The same of one-row experiences. Collective."""
        prompts = [row.prompts()[0] for row in rows] if self.share_prompts else ()
        numbers = self.split([row.row_lengths()[0] for row in rows], spec, prompts)
        return [[rows[i] for i in part] for part in numbers]


def minibatches(
    items: Sequence[Experience],
    collectives: Ranks,
    *,
    train_batch_size: int,
    actor: MicroBatchSpec,
    critic: MicroBatchSpec | None = None,
    packed: bool = False,
    share_prompts: bool = False,
    shuffle: Literal["samples", "groups"] = "samples",
    generator: torch.Generator,
    collate: Callable[[Sequence[Experience]], Experience],
    device: torch.device,
    loss_scale: float = 1.0,
) -> Iterator[Minibatch]:
    """Split this rank's samples into optimizer steps, every sample in exactly one.

    Args:
        items: one-row experiences of this rank.
        collectives: reductions over ranks.
        train_batch_size: samples per optimizer step over all ranks; where it does not divide, steps are smaller.
        actor: what one forward and backward pass of the actor holds on this rank.
        critic: the same of the critic; ``None``: as the actor.
        packed: the passes run without padding.
        share_prompts: packed, actor and critic run a prompt once for all its samples of a micro batch.
        shuffle: what is drawn: single samples, or all samples of a prompt one after the other, so that only a prompt
            at the border of two steps is in both.
        generator: shuffles the samples; as seeded on this rank.
        collate: rows → padded batch on the training device.
        device: the training device.
        loss_scale: constant of ``seq-mean-token-sum-norm``.

    Raises:
        ValueError: ``train_batch_size`` is smaller than the number of ranks: some steps would have no sample.
    """
    if train_batch_size < collectives.world_size:
        raise ValueError(
            f"--train_batch_size {train_batch_size} is less than one sample for each of the "
            f"{collectives.world_size} ranks: set it to a multiple of them"
        )
    count = torch.tensor([float(len(items))], device=device)
    total = int(collectives.all_reduce(count, "sum").item())
    steps = math.ceil(total / train_batch_size)
    order = torch.randperm(len(items), generator=generator)
    if shuffle == "groups":
        order = _groups_together(order, [item.prompts()[0] for item in items])
    batching = MicroBatching(collectives, packed, share_prompts)
    for part in order.tensor_split(steps) if steps else ():
        step = [items[i] for i in part.tolist()]
        rows = batching.split_rows(step, actor)
        minibatch = plan_minibatch([collate(r) for r in rows], collectives, loss_scale=loss_scale, device=device)
        minibatch.rows = rows
        if critic not in (None, actor):
            of_critic = [collate(r) for r in batching.split_rows(step, critic)]
            minibatch.critic_micro_batches = _completed(of_critic, collectives, device)
        yield minibatch


def _groups_together(order: Tensor, prompts: Sequence[bytes]) -> Tensor:
    """The same samples, those of one prompt where the first of them was."""
    place: dict[bytes, int] = {}
    for i in order.tolist():
        place.setdefault(prompts[i], len(place))
    return torch.tensor(sorted(order.tolist(), key=lambda i: place[prompts[i]]), dtype=torch.long)
