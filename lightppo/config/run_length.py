"""The steps of a run, by its options and its prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from lightppo.config.rules import generation_batch

if TYPE_CHECKING:
    from lightppo.config import PPOConfig


def steps_per_episode(config: PPOConfig, dataloader: Iterable, update_steps: int = 0) -> int:
    """PPO steps of the coming episode, at most so many with ``--dynamic_sampling``, whose rejected groups take prompts.

    From the length of the dataloader, whose batches are generation batches; where it has none, from ``update_steps``,
    the optimizer steps per episode.
    """
    rollout = config.rollout
    training = config.training
    if hasattr(dataloader, "__len__"):
        prompts = len(dataloader) * generation_batch(config)
        return math.ceil(prompts / rollout.rollout_batch_size)
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    return max(1, update_steps * training.train_batch_size // training.max_epochs // samples)


def optimizer_steps(
    config: PPOConfig, rollouts_per_episode: int, role: Literal["actor", "critic"] = "actor"
) -> int:
    """Optimizer steps of the whole run: what the learning-rate schedule of a model stretches over."""
    rollout = config.rollout
    training = config.training
    rollouts = training.total_training_steps or training.num_episodes * rollouts_per_episode
    if role == "actor":
        frozen = max(0, config.algorithm.freezing_actor_steps)
        rollouts = max(0, rollouts - frozen)
    return (
        rollouts
        * math.ceil(
            rollout.rollout_batch_size * rollout.n_samples_per_prompt / training.train_batch_size
        )
        * training.max_epochs
    )
