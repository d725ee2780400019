"""How long a run is: PPO steps of an episode, and the limits that end it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightppo.config import PPOConfig
from lightppo.trainer.checkpointing import TrainerState


def steps_per_episode(config: PPOConfig, dataloader: Iterable, update_steps: int = 0) -> int:
    """PPO steps of the coming episode: from the dataloader's length, or from a number of optimizer steps.

    With ``--dynamic_sampling`` at most so many, since rejected groups take prompts as well.

    Args:
        config: batch sizes.
        dataloader: of the prompts; one batch is a generation batch.
        update_steps: optimizer steps per episode, where the dataloader has no length.
    """
    r, t = config.rollout, config.training
    if hasattr(dataloader, "__len__"):
        per_batch = config.sampling.gen_batch_size or r.rollout_batch_size
        return math.ceil(len(dataloader) * per_batch / r.rollout_batch_size)
    samples = r.rollout_batch_size * r.n_samples_per_prompt
    return max(1, update_steps * t.train_batch_size // t.max_epochs // samples)


def reached_limits(config: PPOConfig, state: TrainerState) -> str:
    """The limits that a run has come to, as flags; empty while it goes on."""
    t = config.training
    limits = {
        "num_episodes": (state.episode, t.num_episodes),
        "total_training_steps": (state.global_step, t.total_training_steps),
        "benchmark_steps": (state.global_step, t.benchmark_steps),
    }
    return ", ".join(f"--{name} {n}" for name, (done, n) in limits.items() if n is not None and done >= n)
