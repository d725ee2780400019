"""Two prompts, two samples of each with fixed scores, and what a trainer makes of them."""

from __future__ import annotations

import torch

from lightppo import PPOTrainer
from lightppo.data.records import Prompt

PROMPTS = [Prompt("a", [5, 6], index=0), Prompt("b", [7], index=1)]
# Two samples of each prompt: (prompt, sample) → score
SCORES = {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 3.0, (1, 1): 7.0}


def collected(trainer: PPOTrainer, name: str) -> torch.Tensor:
    """One row per sample: all have two tokens."""
    trainer._collect_experience(PROMPTS, step=1)
    return torch.cat([getattr(item, name) for item in trainer.replay_buffer.items])  # (4, 2)
