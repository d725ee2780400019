"""``--dataset_filter_threshold``: prompts that are solved leave the further episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightppo.callbacks import Callback
from lightppo.data.records import group_by_prompt
from lightppo.errors import ConfigError
from lightppo.rollout.sampler import CollectedStep
from lightppo.trainer.prompts import RolloutBatchSampler


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
        sampler = getattr(run.prompts, "batch_sampler", None)
        dataset = getattr(run.prompts, "dataset", None)
        if not hasattr(sampler, "left_out") or not hasattr(dataset, "positions_of"):
            raise ConfigError(
                "--dataset_filter_threshold needs a dataloader that can leave prompts out: a PromptDataset with a "
                "RolloutBatchSampler, as PPOTrainer.from_config makes it"
            )
        leave_out(sampler, dataset.positions_of(self.left_out))

    def on_rollouts(self, run: Any, step: int, collected: CollectedStep) -> None:
        self._of_step = {
            group[0].prompt.index: sum(rollout.reward for rollout in group) / len(group)
            for group in group_by_prompt(collected.scored)
        }

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the step's mean score of each prompt; at the end of the episode, leave prompts out. Collective."""
        for part in run.strategy.all_gather_object(dict(self._of_step)):
            self.scores |= part
        if run.state.episode > self.episode:
            sampler = run.prompts.batch_sampler
            dataset = run.prompts.dataset
            found = too_well_solved(self.scores, self.threshold, self.max_share, sampler.epoch_size)
            leave_out(sampler, dataset.positions_of(found))
            self.left_out = self.left_out + found
            self.scores = {}
            self.episode = run.state.episode
            run.strategy.print(
                f"--dataset_filter_threshold {self.threshold:g}: {len(found)} prompts left out after episode "
                f"{self.episode}, {sampler.epoch_size} stay"
            )
        return {"rollout/left_out_prompts": float(len(self.left_out))}


def prompt_filter(run: Any) -> PromptFilter | None:
    """Make the filter of a run with a threshold."""
    threshold = run.config.flat().get("dataset_filter_threshold")
    if threshold is None:
        return None
    own = PromptFilter(threshold, run.config.sampling.dataset_max_filter_percentage)
    run.register_state("prompt_filter", own)
    return own


def too_well_solved(
    scores: Mapping[int, float], threshold: float, max_share: float, prompts: int
) -> list[int]:
    """Return the prompts with a mean score above the threshold, at most ``max_share`` of all, best solved first."""
    # Of equal scores the lower row number goes first: every rank and a resumed run choose the same.
    above = sorted(
        (index for index in scores if scores[index] > threshold), key=lambda i: (-scores[i], i)
    )
    return above[: int(max_share * prompts)]


def leave_out(sampler: RolloutBatchSampler, positions: Iterable[int]) -> None:
    """Leave these prompts out of all further passes, in addition to earlier ones; call it alike on every rank."""
    left_out = sampler.left_out | set(positions)
    if not left_out < set(range(sampler.num_samples)):
        raise ValueError(
            f"{len(left_out)} prompts cannot be left out of {sampler.num_samples}: {sorted(left_out)[-5:]}"
        )
    sampler.left_out = left_out
