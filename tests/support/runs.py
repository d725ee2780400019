"""Whole runs in a test's process, and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def fitted(config: Any) -> Any:
    """The trainer of a config, after ``fit``."""
    from lightppo import PPOTrainer

    trainer = PPOTrainer.from_config(config)
    trainer.fit()
    return trainer


def rows(folder: Path) -> list[dict[str, Any]]:
    """Metrics of the training steps, without what a clock measured."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k == "step" or k.startswith(("train/", "rollout/"))}
        for row in found
        if "rollout/reward" in row
    ]


def whole_weights(trainer: Any, name: str) -> dict[str, Any]:
    """Copies of all parameters of the trainer's ``actor`` or ``critic``, gathered. Collective."""
    with trainer.strategy.gathered_parameters(getattr(trainer, name)) as module:
        return {key: p.detach().clone() for key, p in module.named_parameters()}
