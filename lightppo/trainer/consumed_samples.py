"""Where a script that counts samples itself goes on."""

from __future__ import annotations

from lightppo.trainer.loop import TrainerState


def state_after(
    consumed_samples: int, steps_per_episode: int, rollout_batch_size: int
) -> TrainerState:
    """Return the state after ``consumed_samples`` prompts, counted as the seed does: steps × rollout_batch_size."""
    step = consumed_samples // rollout_batch_size
    episode, step_in_episode = divmod(step, steps_per_episode)
    return TrainerState(
        global_step=step, episode=episode, consumed_prompts=step_in_episode * rollout_batch_size
    )
