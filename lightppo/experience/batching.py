"""Which samples are in which optimizer step and micro batch, and the totals that their losses divide by.

Ranks agree on the number of steps and of micro batches; a rank with fewer runs fully masked ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from lightppo.algorithms.masking import LossNormalizer, whiten
from lightppo.config.rules import MicroBatchSpec
from lightppo.experience.experience import Experience
from lightppo.models.batches import PADDED, PaddedLayout
from lightppo.ranks import Ranks, level


class ReplayBuffer:
    """A list of one-row experiences, on the CPU with ``cpu_offload``.

    It has the last ``limit`` rows, or all if that is 0. :meth:`sample` gives ``sample_batch_size`` of them, and
    :meth:`collate_fn` puts batches on ``device``, through page-locked memory with ``pin_memory``.
    """

    def __init__(
        self,
        sample_batch_size: int = 1,
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
        """Add all rows of several batches."""
        self.fill(experiences)

    def fill(self, experiences: Iterable[Experience], repeated: Sequence[int] = ()) -> None:
        """Add all rows of this rollout, then the rows at the positions ``repeated`` again."""
        for experience in experiences:
            self.append(experience)
        self.items += [replace(self.items[i]) for i in repeated]

    def clear(self) -> None:
        """Remove all rows."""
        self.items.clear()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Experience:
        return self.items[index]

    def sample(self) -> Experience:
        """Return ``sample_batch_size`` different rows as one batch."""
        if len(self) < self.sample_batch_size:
            raise ValueError(
                f"the replay buffer holds {len(self)} samples, fewer than {self.sample_batch_size}"
            )
        return self.collate_fn(random.sample(self.items, self.sample_batch_size))

    def collate_fn(self, items: Sequence[Experience]) -> Experience:
        """Join rows to one padded batch on the training device."""
        batch = Experience.collate(items)
        if self.pin_memory and self.cpu_offload:
            batch.pin_memory()
        return batch.to_device(self.device)

    def normalize(
        self, attribute: str, strategy: Ranks, divide_std: bool = True, **options: Any
    ) -> None:
        """Whiten the advantages, the only ``attribute``: the name of :meth:`whiten` in scripts. Collective."""
        if attribute != "advantages":
            raise ValueError(f"only 'advantages' can be normalised, not {attribute!r}")
        self.whiten(strategy, divide_std=divide_std, **options)

    def whiten(self, ranks: Ranks, **options: Any) -> None:
        """Whiten the advantages over the trained tokens of all ranks; ``options`` as of ``whiten``. Collective."""
        # A rank without samples takes part in the collectives.
        items = self.items or [Experience.placeholder()]
        values = torch.cat([cast(Tensor, item.advantages) for item in items], 1)  # (1, ΣA)
        mask = torch.cat([item.action_mask for item in items], 1)
        all_reduce_sum = partial(ranks.all_reduce, op="sum")
        whitened = whiten(values, mask, all_reduce_sum=all_reduce_sum, **options)
        rows_of_items = whitened.split([item.num_actions for item in items], dim=1)
        for item, row_advantages in zip(items, rows_of_items):
            item.advantages = row_advantages


def pass_generator(seed: int, step: int, epoch: int, rank: int) -> torch.Generator:
    """Return what shuffles one pass over the buffer: another order in each step, epoch and on each rank."""
    return torch.Generator().manual_seed(hash((seed, step, epoch, rank)) & 0x7FFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True)
class StepPart:
    """The part that a micro batch is of its optimizer step."""

    # trained tokens and sequences of the step, over all ranks and micro batches
    normalizer: LossNormalizer
    # A metric is a micro batch's share of the step. Times this factor, its mean over the micro batches with samples, of
    # all ranks, is the metric of the step.
    status_scale: float = 1.0
    loss_scale: float = 1.0  # factor of the loss beside the normalizer; 1 if the step was planned
    has_samples: bool = True  # False: a placeholder that only keeps the ranks' collectives level
    trains: bool = True  # False: its gradient is known to be 0, only its numbers are wanted


@dataclass
class Minibatch:
    """One optimizer step on this rank, in micro batches; their number is the same on every rank."""

    micro_batches: list[Experience]  # the actor's
    # the same samples; None: in the actor's micro batches
    critic_micro_batches: list[Experience] | None = None


def normalizer_of(
    micro_batches: Sequence[Experience], ranks: Ranks, scale: float
) -> LossNormalizer:
    return LossNormalizer.from_masks(
        [micro_batch.action_mask for micro_batch in micro_batches],
        all_reduce_sum=partial(ranks.all_reduce, op="sum"),
        dp_size=ranks.world_size,
        scale=scale,
    )


def plan_step(
    micro_batches: Sequence[Experience],
    ranks: Ranks,
    *,
    scale: float = 1.0,
    silent: Sequence[Experience] = (),
) -> list[Experience]:
    """Give this rank's micro batches the step's totals, and add placeholders up to the common count. Collective.

    The ``silent`` ones have no gradient: they come first and do not train, but count as the others do.
    """
    counted = [*silent, *micro_batches] or [Experience.placeholder(ranks.device)]
    normalizer = normalizer_of(counted, ranks, scale)
    total_count = ranks.all_reduce(len(silent) + len(micro_batches), "sum")
    step_part = StepPart(normalizer, status_scale=total_count / ranks.world_size)

    def leveled(batches: Sequence[Experience], part: StepPart) -> list[Experience]:
        def placeholder() -> Experience:
            empty_batch = Experience.placeholder(ranks.device)
            return replace(empty_batch, part=replace(part, has_samples=False))

        return level([replace(batch, part=part) for batch in batches], ranks, filler=placeholder)

    return leveled(silent, replace(step_part, trains=False)) + leveled(micro_batches, step_part)


def without_advantage(item: Experience) -> bool:
    """Tell whether the advantages of a row are 0 at all trained tokens: a loss that is linear in them has no gradient."""
    return not bool(cast(Tensor, item.advantages)[item.action_mask.bool()].any())


def minibatches(
    items: Sequence[Experience],
    ranks: Ranks,
    *,
    train_batch_size: int,
    actor: MicroBatchSpec,
    critic: MicroBatchSpec | None = None,
    layout: PaddedLayout = PADDED,
    share_prompts: bool = True,
    shuffle: Literal["samples", "groups"] = "samples",
    generator: torch.Generator,
    collate: Callable[[Sequence[Experience]], Experience],
    loss_scale: float = 1.0,
    is_silent: Callable[[Experience], bool] | None = None,
) -> Iterator[Minibatch]:
    """Split this rank's rows into optimizer steps, every row into exactly one.

    Args:
        train_batch_size: samples per optimizer step over all ranks; steps are smaller if it does not divide.
        actor, critic: what one pass takes; ``None``: the critic's passes take what the actor's take.
        layout, share_prompts: of the models that run the micro batches; whether prompts may be shared if it can.
        shuffle: draw single samples, or all samples of a prompt together; steps then split at most two prompts each.
        collate: rows → padded batch on the training device.
        loss_scale: constant of ``seq-mean-token-sum-norm``.
        is_silent: of rows without a gradient, which are in micro batches that do not train; each rank that has rows
            trains at least one, so that every parameter gets its gradient of 0.
    """
    steps = math.ceil(ranks.all_reduce(len(items), "sum") / train_batch_size)
    order = torch.randperm(len(items), generator=generator).tolist()
    shares_prompts = share_prompts and layout.shares_prompts
    prompts = [item.prompts()[0] for item in items] if shares_prompts or shuffle == "groups" else []
    if shuffle == "groups":  # all samples of a prompt come to its first one
        first_positions: dict[bytes, int] = {}
        for position, row in enumerate(order):
            first_positions.setdefault(prompts[row], position)
        order.sort(key=lambda row: first_positions[prompts[row]])
    lengths = [item.row_lengths()[0] for item in items]

    def batches_of(rows: Sequence[int], spec: MicroBatchSpec) -> list[Experience]:
        shared_prompts = [prompts[row] for row in rows if shares_prompts]
        row_lengths = [lengths[row] for row in rows]
        parts = layout.split(row_lengths, spec, ranks, shared_prompts)
        return [collate([items[rows[i]] for i in part]) for part in parts]

    def planned(rows: Sequence[int], spec: MicroBatchSpec) -> list[Experience]:
        """Return the micro batches of an optimizer step of these rows."""
        if is_silent is None:
            return plan_step(batches_of(rows, spec), ranks, scale=loss_scale)
        silent_rows = {row for row in rows if is_silent(items[row])}
        if len(silent_rows) == len(rows):
            silent_rows -= {*rows[:1]}
        silent = batches_of([row for row in rows if row in silent_rows], spec)
        trained = batches_of([row for row in rows if row not in silent_rows], spec)
        return plan_step(trained, ranks, scale=loss_scale, silent=silent)

    for rows in torch.tensor(order, dtype=torch.long).tensor_split(steps) if steps else ():
        step_rows = rows.tolist()
        minibatch = Minibatch(planned(step_rows, actor))
        if critic is not None and critic != actor:
            minibatch.critic_micro_batches = planned(step_rows, critic)
        yield minibatch
