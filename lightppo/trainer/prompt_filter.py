"""Prompts that the policy solves too well leave the further episodes (``--dataset_filter_threshold``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightppo.errors import ConfigError
from lightppo.trainer.state import TrainerState


class PromptFilter:
    """Gathers the mean scores of an episode's prompts, and leaves the best solved ones out of the next.

    Args:
        threshold: prompts with a higher mean score may be left out; ``None``: no filter.
        max_share: of the prompts of the episode, at most; the highest scores first.
        strategy: gathers over ranks.
    """

    def __init__(self, threshold: float | None, max_share: float, strategy: Any) -> None:
        self.threshold = threshold
        self.max_share = max_share
        self.strategy = strategy

    def restore(self, dataloader: Iterable, state: TrainerState) -> None:
        """Leave out what was left out before, at the start of a run.

        Raises:
            ConfigError: the dataloader cannot leave prompts out.
        """
        if self.threshold is None:
            return
        sampler, dataset = getattr(dataloader, "batch_sampler", None), getattr(dataloader, "dataset", None)
        if not hasattr(sampler, "leave_out") or not hasattr(dataset, "positions_of"):
            raise ConfigError(
                "--dataset_filter_threshold needs a dataloader that can leave prompts out: a PromptDataset with a "
                "RolloutBatchSampler, as PPOTrainer.from_config makes it"
            )
        sampler.leave_out(dataset.positions_of(state.left_out_prompts))

    def after_step(
        self, dataloader: Any, state: TrainerState, prompt_scores: Mapping[int, float], ends_episode: bool
    ) -> dict[str, float]:
        """Take the scores of a step; at the end of the episode, leave prompts out. Collective.

        Args:
            dataloader: of the prompts.
            state: gets the scores and what is left out.
            prompt_scores: mean score of each prompt that this rank sampled.
            ends_episode: this was the episode's last step.

        Returns:
            what to log; empty without a filter.
        """
        if self.threshold is None:
            return {}
        for part in self.strategy.all_gather_object(dict(prompt_scores)):
            state.episode_scores |= part
        if ends_episode:
            sampler, dataset = dataloader.batch_sampler, dataloader.dataset
            found = too_well_solved(state.episode_scores, self.threshold, self.max_share, sampler.epoch_size)
            sampler.leave_out(dataset.positions_of(found))
            state.left_out_prompts = state.left_out_prompts + found
            self.strategy.print(
                f"--dataset_filter_threshold {self.threshold:g}: {len(found)} prompts left out after episode "
                f"{state.episode + 1}, {sampler.epoch_size} stay"
            )
        return {"left_out_prompts": float(len(state.left_out_prompts))}


def too_well_solved(scores: Mapping[int, float], threshold: float, max_share: float, prompts: int) -> list[int]:
    """The prompts with a mean score above the threshold, at most ``max_share`` of all, best solved first.

    Of equal scores the lower row number goes first, so that every rank and a resumed run choose the same.
    """
    above = sorted((index for index in scores if scores[index] > threshold), key=lambda i: (-scores[i], i))
    return above[: int(max_share * prompts)]
