"""TrainerState: all that a run must remember beside models and optimizers, in one place."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass
class TrainerState:
    """Where a run stands, after a finished step.

    Attributes:
        global_step: PPO steps done.
        episode: current pass over the prompts, from 0.
        consumed_prompts: prompts taken from this episode, over all ranks.
        pretrain_batches: batches taken from the pretraining data on each rank.
        skipped_optimizer_steps: optimizer steps skipped for a non-finite gradient, actor and critic.
        stopped_optimizer_steps: optimizer steps of the actor skipped by an early stop.
        run_id: of the Weights & Biases run.
        episode_scores: mean score of the prompts sampled in this episode, by ``Prompt.index``; only where
            ``--dataset_filter_threshold`` looks at them.
        left_out_prompts: ``Prompt.index`` of those that it has left out of the further episodes.
    """

    global_step: int = 0
    episode: int = 0
    consumed_prompts: int = 0
    pretrain_batches: int = 0
    skipped_optimizer_steps: int = 0
    stopped_optimizer_steps: int = 0
    run_id: str | None = None
    episode_scores: dict[int, float] = field(default_factory=dict)
    left_out_prompts: list[int] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From ``state_dict``."""
        return cls(**values)

    def finish_step(self, prompts: int, last_of_episode: bool) -> None:
        """Count one PPO step that used ``prompts`` prompts over all ranks."""
        self.global_step += 1
        self.consumed_prompts += prompts
        if last_of_episode:
            self.episode += 1
            self.consumed_prompts = 0
            self.episode_scores = {}


def state_from_consumed(consumed_samples: int, steps_per_episode: int, rollout_batch_size: int) -> TrainerState:
    """Where a run stands after ``consumed_samples`` prompts, counted as the seed does: steps × rollout_batch_size."""
    step = consumed_samples // rollout_batch_size
    episode, step_in_episode = divmod(step, steps_per_episode)
    return TrainerState(global_step=step, episode=episode, consumed_prompts=step_in_episode * rollout_batch_size)
