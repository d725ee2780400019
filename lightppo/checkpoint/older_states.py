"""Checkpoints of older versions: what their states are called now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_present_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds; an older one has parts' states in that of the trainer, and lacks some."""
    trainer = dict(saved["trainer"])
    run_ids = trainer.pop("run_ids", None) or {}
    if (run_id := trainer.pop("run_id", None)) is not None:
        run_ids = {"wandb": run_id}
    scores = trainer.pop("episode_scores", {})
    left_out = trainer.pop("left_out_prompts", [])
    batches = trainer.pop("pretrain_batches", 0) * saved.get("world_size", 1)
    older = {
        "trackers": run_ids,
        "recorded": saved.get("records", {}),
        "prompt_filter": {"scores": scores, "left_out": left_out},
        "pretraining": {"batches": batches},
        "evaluation": {"step": None, "result": None},
    }
    return older | dict(saved) | {"trainer": trainer}
