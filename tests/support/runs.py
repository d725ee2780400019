"""Whole runs in a test's process, and what they leave behind."""

from __future__ import annotations

import json
import shutil
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


def forget_checkpoints(folder: Path, after: int) -> None:
    """Removes those of later steps: the run goes on from ``after`` when it is started again."""
    later = [path for path in folder.glob("_*/global_step*") if int(path.name.removeprefix("global_step")) > after]
    assert later, f"{folder} has no checkpoint after step {after}"
    for path in later:
        shutil.rmtree(path)


def whole_weights(trainer: Any, name: str) -> dict[str, Any]:
    """Copies of all parameters of the trainer's ``actor`` or ``critic``, gathered. Collective."""
    with trainer.strategy.gathered_parameters(getattr(trainer, name)) as module:
        return {key: p.detach().clone() for key, p in module.named_parameters()}
