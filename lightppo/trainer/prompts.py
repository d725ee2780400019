"""The order of an episode's prompts, and its batches on each rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import Sampler

from lightppo.callbacks import Callback
from lightppo.data.records import Prompt, group_by_prompt
from lightppo.errors import ConfigError
from lightppo.rollout.sampler import CollectedStep

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
        positions: Iterable[int] = range(self.num_samples)
        if self.shuffle:
            # Not seed + epoch: epoch 1 of seed 42 would be epoch 0 of seed 43.
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            positions = torch.randperm(self.num_samples, generator=generator).tolist()
        return [position for position in positions if position not in self.left_out]

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
        sampler = next((x for x in samplers if hasattr(x, "set_epoch")), None)
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


# -- ``--dataset_filter_threshold``: prompts that are solved leave the further episodes -------------------------------


class PromptFilter(Callback):
    """Gathers the mean scores of an episode's prompts, and leaves the best solved ones out of the next.

    At most ``max_share`` of the prompts of an episode leave, of those with a mean score above ``threshold``, the
    highest first.
    """

    def __init__(self, threshold: float, max_share: float) -> None:
        self.threshold = threshold
        self.max_share = max_share
        self.scores: dict[int, float] = {}  # of the prompts of this episode, by Prompt.index
        self.left_out: list[int] = []  # Prompt.index of those that are left out
        self.episode = 0
        self._of_step: Mapping[int, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores, "left_out": self.left_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scores = dict(state["scores"])
        self.left_out = list(state["left_out"])

    def on_start(self, run: Any) -> None:
        """Leave out what was left out before."""
        self.episode = run.state.episode
        if run.only_evaluates:
            return
        sampler: Any = getattr(run.prompts, "batch_sampler", None)
        dataset: Any = getattr(run.prompts, "dataset", None)
        if not hasattr(sampler, "left_out") or not hasattr(dataset, "positions_of"):
            raise ConfigError(
                "--dataset_filter_threshold needs a dataloader that can leave prompts out: a PromptDataset with a "
                "RolloutBatchSampler, as PPOTrainer.from_config makes it"
            )
        leave_out(sampler, dataset.positions_of(self.left_out))

    def on_rollouts(self, run: Any, step: int, collected: CollectedStep) -> None:
        self._of_step = {
            group[0].prompt.index: sum(cast(float, rollout.reward) for rollout in group)
            / len(group)
            for group in group_by_prompt(collected.scored)
        }

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the step's mean score of each prompt; at the end of the episode, leave prompts out. Collective."""
        for scores in run.strategy.all_gather_object(dict(self._of_step)):
            self.scores |= scores
        if run.state.episode > self.episode:
            sampler = run.prompts.batch_sampler
            dataset = run.prompts.dataset
            solved_prompts = too_well_solved(
                self.scores, self.threshold, self.max_share, sampler.epoch_size
            )
            leave_out(sampler, dataset.positions_of(solved_prompts))
            self.left_out = self.left_out + solved_prompts
            self.scores = {}
            self.episode = run.state.episode
            run.strategy.print(
                f"--dataset_filter_threshold {self.threshold:g}: {len(solved_prompts)} prompts left out after episode "
                f"{self.episode}, {sampler.epoch_size} stay"
            )
        return {"rollout/left_out_prompts": float(len(self.left_out))}


def prompt_filter(run: Any) -> PromptFilter | None:
    """Make the filter of a run with a threshold."""
    threshold = run.config.flat().get("dataset_filter_threshold")
    if threshold is None:
        return None
    callback = PromptFilter(threshold, run.config.sampling.dataset_max_filter_percentage)
    run.register_state("prompt_filter", callback)
    return callback


def too_well_solved(
    scores: Mapping[int, float], threshold: float, max_share: float, prompts: int
) -> list[int]:
    """Return the prompts with a mean score above the threshold, at most ``max_share`` of all, best solved first."""
    # Of equal scores the lower row number goes first: every rank and a resumed run choose the same.
    solved = sorted(
        (index for index in scores if scores[index] > threshold), key=lambda i: (-scores[i], i)
    )
    return solved[: int(max_share * prompts)]


def leave_out(sampler: RolloutBatchSampler, positions: Iterable[int]) -> None:
    """Leave these prompts out of all further passes, in addition to earlier ones; call it alike on every rank."""
    left_out = sampler.left_out | set(positions)
    if not left_out < set(range(sampler.num_samples)):
        raise ValueError(
            f"{len(left_out)} prompts cannot be left out of {sampler.num_samples}: {sorted(left_out)[-5:]}"
        )
    sampler.left_out = left_out
