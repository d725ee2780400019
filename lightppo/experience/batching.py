"""Which samples are on which rank, in which optimizer step and micro batch, and the totals that their losses divide by.

Ranks agree on the number of steps and of micro batches; a rank with fewer runs fully masked ones.
"""

from __future__ import annotations

import math
import random
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightppo import tensor_file
from lightppo.algorithms.entries import load
from lightppo.algorithms.losses import PolicyLoss, SelectionFn
from lightppo.algorithms.masking import LossNormalizer, whiten
from lightppo.config.rules import MicroBatchSpec
from lightppo.data.records import Rollout
from lightppo.experience.experience import Experience
from lightppo.models.wrapper import PADDED, PaddedLayout, on_cpu
from lightppo.ranks import Ranks, level

TOLERANCE = 0.02  # of the mean: a smaller difference is not worth another exchange


class Group(NamedTuple):
    """The samples of one prompt on one rank."""

    tokens: int
    samples: int  # their number
    index: int  # the prompt's


def balance_ranks(
    rollouts: Sequence[Rollout], strategy: Ranks, *, prompt_once: bool = False
) -> list[Rollout]:
    """Swaps whole groups between ranks until all hold about the same number of tokens. Collective.

    Only groups of equally many samples are swapped, so every rank keeps its number of samples. With ``prompt_once`` a
    prompt counts once for all its samples, as it goes through the models once.
    """
    tokens: Counter[int] = Counter()
    samples: Counter[int] = Counter()
    for rollout in rollouts:
        index = rollout.prompt.index
        tokens[index] += len(rollout.response_ids)
        if not prompt_once or samples[index] == 0:
            tokens[index] += len(rollout.prompt.token_ids)
        samples[index] += 1
    before: list[list[Group]] = strategy.all_gather_object(
        [Group(tokens[index], samples[index], index) for index in samples]
    )
    after = swapped(before)
    if after == before:
        return list(rollouts)
    rank_of = {group.index: rank for rank, groups in enumerate(after) for group in groups}
    staying: list[Rollout] = []
    leaving: dict[int, list[Rollout]] = defaultdict(list)  # by the rank that they go to
    kept = {group.index for group in after[strategy.get_rank()]}
    for rollout in rollouts:
        index = rollout.prompt.index
        if index in kept:
            staying.append(rollout)
        else:
            leaving[rank_of[index]].append(rollout)
    for arrived in strategy.exchange_objects(leaving):  # only to the ranks that train on them
        staying += arrived
    return staying


def swapped(ranks: Sequence[Sequence[Group]], tolerance: float = TOLERANCE) -> list[list[Group]]:
    """The groups of each rank after swaps, which end when the heaviest rank is at most ``tolerance`` above the mean.

    A group whose prompt is on several ranks stays: on one rank the two would become one group.
    """
    result = [list(groups) for groups in ranks]
    holders = Counter(group.index for groups in ranks for group in groups)
    shared = {index for index, count in holders.items() if count > 1}
    loads = [sum(group.tokens for group in groups) for groups in result]
    mean = sum(loads) / len(loads)
    while max(loads) > mean * (1 + tolerance):
        heavy, light = loads.index(max(loads)), loads.index(min(loads))
        pair = _best_swap(result[heavy], result[light], loads[heavy] - loads[light], shared)
        if pair is None:
            break
        given, taken = pair
        result[heavy][result[heavy].index(given)] = taken
        result[light][result[light].index(taken)] = given
        loads[heavy] -= given.tokens - taken.tokens
        loads[light] += given.tokens - taken.tokens
    return result


def _best_swap(
    heavy: list[Group], light: list[Group], gap: int, shared: set[int]
) -> tuple[Group, Group] | None:
    """The pair of groups whose swap narrows the gap most; ``None`` if no swap narrows it."""
    best: tuple[float, Group, Group] | None = None
    partners: dict[int, list[Group]] = defaultdict(list)
    for group in sorted(light):
        if group.index not in shared:
            partners[group.samples].append(group)
    for given in sorted(heavy):
        candidates = partners.get(given.samples, []) if given.index not in shared else []
        place = bisect_left(candidates, given.tokens - gap / 2, key=lambda group: group.tokens)
        for taken in candidates[max(place - 1, 0) : place + 1]:
            left = abs(gap - 2 * (given.tokens - taken.tokens))
            if left < (gap if best is None else best[0]):
                best = (left, given, taken)
    return None if best is None else best[1:]


def selection_of(loss: Any) -> SelectionFn | None:
    """The function that selects tokens for this policy loss; ``None`` if the loss treats all tokens alike."""
    entry = getattr(loss, "entry", None)  # a loss of a script has none
    return None if entry is None or entry.selection is None else load(entry.selection)


def select_tokens(items: Sequence[Experience], loss: PolicyLoss, ranks: Ranks, seed: int) -> None:
    """Sets ``selected`` of all rows if the loss selects tokens; then collective.

    A token's random number depends on ``seed``, its row's token ids and its position.
    """
    select = selection_of(loss)
    if select is None:
        return
    items = items or [Experience.placeholder()]  # for the collectives of a rank without samples
    masks = [item.action_mask for item in items]  # (1, A) each

    def trained(rows: Iterable[Tensor]) -> Tensor:
        """(N,) of the trained tokens."""
        return torch.cat([row[mask] for row, mask in zip(rows, masks)])

    chosen = select(
        trained(item.action_log_probs for item in items),
        trained(item.advantages for item in items),
        trained(_uniforms(item, seed) for item in items),
        options=loss.options,
        all_reduce_sum=partial(ranks.all_reduce, op="sum"),
    )  # (N,)
    of_rows = chosen.split([int(mask.sum()) for mask in masks])
    for item, mask, of_row in zip(items, masks, of_rows):
        item.selected = torch.zeros_like(mask).masked_scatter(mask, of_row)


def _uniforms(item: Experience, seed: int) -> Tensor:
    """Random numbers of a row (1, A), independent of its rank and of the order of rows."""
    key = zlib.crc32(item.sequences.cpu().numpy().tobytes(), seed & 0xFFFF_FFFF)
    generator = torch.Generator().manual_seed(key)
    return torch.rand(1, item.num_actions, generator=generator).to(item.sequences.device)


class ReplayBuffer:
    """A list of one-row experiences: the last ``limit``, or all if it is 0, on the CPU with ``cpu_offload``.

    :meth:`sample` and :meth:`collate_fn` put their batches on ``device``, through page-locked memory with
    ``pin_memory``.
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
        """Adds all rows of a batch."""
        if self.cpu_offload:
            experience = experience.to_device("cpu")
        self.items += experience.split()
        if self.limit > 0:
            self.items = self.items[-self.limit :]

    def extend(self, experiences: Iterable[Experience]) -> None:
        """Adds several batches."""
        for experience in experiences:
            self.append(experience)

    def fill(self, experiences: Iterable[Experience], repeated: Sequence[int] = ()) -> None:
        """Adds all rows of this rollout, then the rows at the positions ``repeated`` again."""
        experiences = list(experiences)
        self.extend(experiences)
        rows = self.items[-sum(len(part) for part in experiences) :]
        self.extend([replace(rows[i]) for i in repeated])

    def clear(self) -> None:
        """Removes all rows."""
        self.items.clear()

    def sample(self) -> Experience:
        """``sample_batch_size`` different rows as one batch."""
        if len(self) < self.sample_batch_size:
            raise ValueError(
                f"the replay buffer holds {len(self)} samples, fewer than {self.sample_batch_size}"
            )
        return self.collate_fn(random.sample(self.items, self.sample_batch_size))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Experience:
        return self.items[index]

    def collate_fn(self, items: Sequence[Experience]) -> Experience:
        """Rows → one padded batch on the training device."""
        batch = Experience.collate(items)
        if self.pin_memory and self.cpu_offload:
            batch.pin_memory()
        return batch.to_device(self.device)

    def normalize(
        self, attribute: str, strategy: Ranks, divide_std: bool = True, **options: Any
    ) -> None:
        """Whitens the advantages (the only ``attribute``) over the trained tokens of all ranks; see ``whiten``."""
        if attribute != "advantages":
            raise ValueError(f"only 'advantages' can be normalised, not {attribute!r}")
        # for the collectives of a rank without samples
        items = self.items or [Experience.placeholder()]
        values = torch.cat([item.advantages for item in items], 1)  # (1, ΣA)
        mask = torch.cat([item.action_mask for item in items], 1)
        whitened = whiten(
            values,
            mask,
            all_reduce_sum=partial(strategy.all_reduce, op="sum"),
            divide_std=divide_std,
            **options,
        )
        rows = whitened.split([item.num_actions for item in items], dim=1)
        for item, row in zip(items, rows):
            item.advantages = row


@dataclass(frozen=True)
class StepPart:
    """What a micro batch must know about its optimizer step."""

    # trained tokens and sequences of the step, over all ranks and micro batches
    normalizer: LossNormalizer
    # A metric is a micro batch's share of the step. Times this factor, its mean over the micro batches with samples, of
    # all ranks, is the metric of the step.
    status_scale: float = 1.0
    loss_scale: float = 1.0  # factor of the loss beside the normalizer; 1 if the step was planned
    has_samples: bool = True  # False: a placeholder that only keeps the ranks' collectives level
    # of further terms of the actor's loss: lightppo.trainer.update.OwnLoss; placeholders have some, too
    own_losses: tuple[Callable[[Any], Any], ...] = ()


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
    micro_batches: Sequence[Experience], ranks: Ranks, *, scale: float = 1.0
) -> list[Experience]:
    """Gives this rank's micro batches the step's totals, and adds placeholders up to the common count. Collective."""
    placeholder = Experience.placeholder(ranks.device)
    normalizer = normalizer_of(micro_batches or [placeholder], ranks, scale)
    count = ranks.all_reduce(len(micro_batches), "sum")
    part = StepPart(normalizer, status_scale=count / ranks.world_size)
    placeholder.part = replace(part, has_samples=False)
    planned = [replace(micro_batch, part=part) for micro_batch in micro_batches]
    return level(planned, ranks, filler=lambda: placeholder)


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
) -> Iterator[Minibatch]:
    """Splits this rank's rows into optimizer steps, every row into exactly one.

    Args:
        train_batch_size: samples per optimizer step over all ranks; steps are smaller if it does not divide.
        actor, critic: what one pass takes; ``None``: the critic's passes take what the actor's take.
        layout, share_prompts: of the models that run the micro batches; whether prompts may be shared if it can.
        shuffle: draw single samples, or all samples of a prompt together; steps then split at most two prompts each.
        collate: rows → padded batch on the training device.
        loss_scale: constant of ``seq-mean-token-sum-norm``.
    """
    steps = math.ceil(ranks.all_reduce(len(items), "sum") / train_batch_size)
    order = torch.randperm(len(items), generator=generator).tolist()
    shares = share_prompts and layout.shares_prompts
    prompts = [item.prompts()[0] for item in items] if shares or shuffle == "groups" else []
    if shuffle == "groups":  # all samples of a prompt come to its first one
        first_places: dict[bytes, int] = {}
        for place, row in enumerate(order):
            first_places.setdefault(prompts[row], place)
        order.sort(key=lambda row: first_places[prompts[row]])
    lengths = [item.row_lengths()[0] for item in items]

    def planned(rows: Sequence[int], spec: MicroBatchSpec) -> list[Experience]:
        """The micro batches of an optimizer step of these rows."""
        shared = [prompts[row] for row in rows if shares]
        parts = layout.split([lengths[row] for row in rows], spec, ranks, shared)
        batches = [collate([items[rows[i]] for i in part]) for part in parts]
        return plan_step(batches, ranks, scale=loss_scale)

    for rows in torch.tensor(order, dtype=torch.long).tensor_split(steps) if steps else ():
        of_step = rows.tolist()
        of_actor = planned(of_step, actor)
        has_its_own = critic is not None and critic != actor
        yield Minibatch(of_actor, planned(of_step, critic) if has_its_own else None)


# -- files -------------------------------------------------------------------------------------------------------------


def save_batch(
    path: Path, minibatch: Minibatch, texts: Sequence[Sequence[str]], **facts: Any
) -> None:
    """Writes this rank's part of an optimizer step, for :func:`load_batch`.

    Args:
        texts: prompt and response of each row, for people.
        **facts: numbers and texts, such as the step and the rank.
    """

    def plain(part: Experience) -> dict[str, Any]:
        tensors = {**vars(part), **part.extra}
        for name in ("extra", "info", "part"):
            del tensors[name]
        for name, tensor in tensors.items():
            tensors[name] = None if tensor is None else on_cpu(tensor).detach()
        step = part.part and vars(part.part) | {
            "normalizer": vars(part.part.normalizer),
            "own_losses": (),
        }
        return {"tensors": tensors, "info": part.info, "part": step}

    kinds = {
        "micro_batches": minibatch.micro_batches,
        "critic_micro_batches": minibatch.critic_micro_batches,
    }
    parts = {name: batches and [plain(part) for part in batches] for name, batches in kinds.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**parts, "texts": [tuple(row) for row in texts], "facts": facts}, path)


def load_batch(path: Path) -> tuple[Minibatch, list[tuple[str, str]], dict[str, Any]]:
    """What :func:`save_batch` wrote, on the CPU: optimizer step, texts of its rows, facts. Runs no code of the file."""
    saved = tensor_file.read(path)

    def experience(plain: dict[str, Any]) -> Experience:
        if (part := plain["part"]) is not None:
            part.pop("pretrain", None)  # of an older lightppo
            part = StepPart(**part | {"normalizer": LossNormalizer(**part["normalizer"])})
        tensors, own = plain["tensors"], {field.name for field in fields(Experience)}
        extra = {name: tensors.pop(name) for name in tensors.keys() - own}
        extra = {name: values for name, values in extra.items() if values is not None}
        return Experience(**tensors, extra=extra, info=plain["info"], part=part)

    kinds = [
        saved[name] and [experience(p) for p in saved[name]]
        for name in ("micro_batches", "critic_micro_batches")
    ]
    return Minibatch(*kinds), saved["texts"], saved["facts"]
