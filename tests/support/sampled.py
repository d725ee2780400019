"""Two prompts, two samples of each with fixed scores, and what a trainer makes of them."""

from __future__ import annotations

from typing import Any

import torch

from lightppo import PPOTrainer
from lightppo.data.records import Prompt

PROMPTS = [Prompt("a", [5, 6], index=0), Prompt("b", [7], index=1)]
# Two samples of each prompt: (prompt, sample) → score
SCORES = {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 3.0, (1, 1): 7.0}


class OneBatch:
    """The only generation batch of an episode."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts, self.exhausted = prompts, False

    def take(self) -> list[Prompt]:
        self.exhausted = True
        return self.prompts


def sample(trainer: PPOTrainer, prompts: Any = None, step: int = 1) -> Any:
    """Fill the trainer's buffer with the experience of one step; what was collected."""
    source = (
        prompts if hasattr(prompts, "take") else OneBatch(PROMPTS if prompts is None else prompts)
    )
    found = trainer.sampler.collect(source, step)
    trainer.make_experience(found, step)
    return found


def collected(trainer: PPOTrainer, name: str) -> torch.Tensor:
    """One row per sample: all have two tokens."""
    sample(trainer)
    return torch.cat([getattr(item, name) for item in trainer.replay_buffer.items])  # (4, 2)
