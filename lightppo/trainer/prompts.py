"""The order of an episode's prompts, and whatever a dataloader yields → prompts and language-model batches."""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from lightppo.algorithms.losses import IGNORE_INDEX
from lightppo.data.records import Prompt
from lightppo.errors import ConfigError
from lightppo.models.packing import to_device
from lightppo.ranks import Ranks
from lightppo.trainer.loop import TrainerState

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
        self.num_samples, self.batch_size = num_samples, batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed = shuffle, seed
        self.epoch = self._start = 0
        self._left_out: set[int] = set()

    def leave_out(self, positions: Iterable[int]) -> None:
        """Leave these prompts out of all further passes, in addition to earlier ones; call it alike on every rank."""
        left_out = self._left_out | set(positions)
        if not left_out < set(range(self.num_samples)):
            raise ValueError(
                f"{len(left_out)} prompts cannot be left out of {self.num_samples}: {sorted(left_out)[-5:]}"
            )
        self._left_out = left_out

    @property
    def epoch_size(self) -> int:
        """Prompts per epoch."""
        return self.num_samples - len(self._left_out)

    def order(self) -> list[int]:
        """Positions of all prompts in this epoch's order, the same on every rank."""
        whole: Iterable[int] = range(self.num_samples)
        if self.shuffle:
            # Not seed + epoch: epoch 1 of seed 42 would be epoch 0 of seed 43.
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            whole = torch.randperm(self.num_samples, generator=generator).tolist()
        return [position for position in whole if position not in self._left_out]

    def __iter__(self) -> Iterator[list[int]]:
        order, start = self.order(), self._start
        self._start = 0  # a resumed position counts once; the next pass is complete
        for begin in range(start, len(order), self.batch_size):
            yield order[begin : begin + self.batch_size][self.rank :: self.world_size]

    def __len__(self) -> int:
        """Batches in the next pass (equal on all ranks); after a resume, fewer than in an epoch."""
        return -(-(self.epoch_size - self._start) // self.batch_size)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Choose the next pass's order, and its start: how many prompts of this epoch all ranks have used."""
        if not 0 <= consumed_samples <= self.epoch_size:
            raise ValueError(
                f"consumed_samples is {consumed_samples}, but an epoch has {self.epoch_size} prompts"
            )
        self.epoch, self._start = epoch, consumed_samples


class EpisodePrompts:
    """The generation batches of one episode on this rank, from where it was left.

    Args:
        dataloader: its ``batch_sampler`` or ``sampler`` has ``set_epoch(epoch, consumed_samples)``; one with
            ``set_epoch(epoch)`` cannot start inside an episode, one with none is taken as it comes.
        episode: its number, from 0; seeds the shuffling.
        consumed_prompts: prompts of this episode that were used before, over all ranks.
        convert: makes prompts of what the dataloader yields.

    Attributes:
        exhausted: no batch is left; the same on every rank.
        taken: prompts of this rank taken so far.
    """

    def __init__(
        self,
        dataloader: Iterable,
        episode: int,
        consumed_prompts: int,
        convert: Callable[[Any], list[Prompt]],
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


@dataclass
class PromptFilter:
    """Gathers the mean scores of an episode's prompts, and leaves the best solved ones out of the next.

    At most ``max_share`` of the prompts of an episode leave, of those with a mean score above ``threshold``, the
    highest first; without a threshold none.
    """

    threshold: float | None
    max_share: float
    strategy: Ranks

    def restore(self, dataloader: Iterable, state: TrainerState) -> None:
        """Leave out what was left out before, at the start of a run."""
        if self.threshold is None:
            return
        sampler, dataset = (
            getattr(dataloader, "batch_sampler", None),
            getattr(dataloader, "dataset", None),
        )
        if not hasattr(sampler, "leave_out") or not hasattr(dataset, "positions_of"):
            raise ConfigError(
                "--dataset_filter_threshold needs a dataloader that can leave prompts out: a PromptDataset with a "
                "RolloutBatchSampler, as PPOTrainer.from_config makes it"
            )
        sampler.leave_out(dataset.positions_of(state.left_out_prompts))

    def after_step(
        self,
        dataloader: Any,
        state: TrainerState,
        prompt_scores: Mapping[int, float],
        ends_episode: bool,
    ) -> dict[str, float]:
        """Take a step's mean score of each prompt into the state; at the end of the episode, leave prompts out.

        Returns what to log; empty without a filter. Collective.
        """
        if self.threshold is None:
            return {}
        for part in self.strategy.all_gather_object(dict(prompt_scores)):
            state.episode_scores |= part
        if ends_episode:
            sampler, dataset = dataloader.batch_sampler, dataloader.dataset
            found = too_well_solved(
                state.episode_scores, self.threshold, self.max_share, sampler.epoch_size
            )
            sampler.leave_out(dataset.positions_of(found))
            state.left_out_prompts = state.left_out_prompts + found
            self.strategy.print(
                f"--dataset_filter_threshold {self.threshold:g}: {len(found)} prompts left out after episode "
                f"{state.episode + 1}, {sampler.epoch_size} stay"
            )
        return {"left_out_prompts": float(len(state.left_out_prompts))}


def too_well_solved(
    scores: Mapping[int, float], threshold: float, max_share: float, prompts: int
) -> list[int]:
    """The prompts with a mean score above the threshold, at most ``max_share`` of all, best solved first."""
    # Of equal scores the lower row number goes first: every rank and a resumed run choose the same.
    above = sorted(
        (index for index in scores if scores[index] > threshold), key=lambda i: (-scores[i], i)
    )
    return above[: int(max_share * prompts)]


class PromptText(str):
    """The text of a prompt, which also knows the :class:`Prompt`: its token ids, row number and further columns."""

    prompt: Prompt

    @classmethod
    def of(cls, prompt: Prompt) -> PromptText:
        text = cls(prompt.text)
        text.prompt = prompt
        return text


def as_prompts(batch: Any, tokenizer: Any, prompt_max_len: int) -> list[Prompt]:
    """A batch of a prompts dataloader as prompts.

    Args:
        batch: prompts, strings, or in the seed's style (prompts, labels) or (prompts, labels, references), where
            ``references`` are the ground truth and ``labels`` name the data source.
        tokenizer: for strings.
        prompt_max_len: longest prompt, tokens.

    Raises:
        TypeError: on a batch of another form.
        ValueError: on a string longer than ``prompt_max_len`` tokens, or columns of different lengths.
    """
    if isinstance(batch, list) and all(isinstance(item, Prompt) for item in batch):
        return batch
    texts, labels, references = _columns(batch)
    for name, column in (("labels", labels), ("references", references)):
        if column is not None and len(column) != len(texts):
            raise ValueError(f"a batch of {len(texts)} prompts has {len(column)} {name}")
    prompts = []
    for i, text in enumerate(texts):
        if isinstance(text, PromptText):
            label = (
                references[i]
                if references is not None
                else text.prompt.label
                if labels is None
                else labels[i]
            )
            prompts.append(replace(text.prompt, label=label))
            continue
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(token_ids) > prompt_max_len:
            raise ValueError(
                f"the prompt {text[:60]!r}… has {len(token_ids)} tokens, more than prompt_max_len {prompt_max_len}: "
                "raise it, or build the dataset with truncation"
            )
        label = (
            references[i] if references is not None else labels[i] if labels is not None else None
        )
        source = str(labels[i]) if references is not None and labels is not None else "default"
        prompts.append(Prompt(text, token_ids, label, _index_of(text), source))
    return prompts


def _columns(batch: Any) -> list:
    """``[prompts, labels, references]``, the last two possibly ``None``."""
    columns = (
        [batch] if _is_texts(batch) else list(batch) if isinstance(batch, (list, tuple)) else []
    )
    of_rows = all(c is None or (hasattr(c, "__len__") and not isinstance(c, str)) for c in columns)
    if not 1 <= len(columns) <= 3 or not _is_texts(columns[0]) or not of_rows:
        raise TypeError(
            "a batch of prompts must be a list of Prompt or of strings, or (prompts, labels[, references]); "
            f"got {type(batch).__name__} {str(batch)[:80]}"
        )
    return [*columns, None, None][:3]


def _is_texts(column: Any) -> bool:
    return isinstance(column, (list, tuple)) and all(isinstance(text, str) for text in column)


def _index_of(text: str) -> int:
    """A number for a prompt without row number: equal texts form one group, on any rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


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
