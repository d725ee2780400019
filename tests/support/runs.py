"""Whole runs in a test's process, and what they leave behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from support.tiny import read_jsonl

NUMBERS = ("train/", "rollout/")  # namespaces without what a clock measured


def fitted(config: Any, kind: type | None = None) -> Any:
    """The trainer of a config, after ``fit``; ``kind``: its class, if it is not ``PPOTrainer``."""
    from lightppo import PPOTrainer

    trainer = (kind or PPOTrainer).from_config(config)
    trainer.fit()
    return trainer


def run_folder(run: Any) -> Path:
    """The folder of a run: of its config, or the path itself."""
    return Path(run) if isinstance(run, str | Path) else Path(run.checkpoint.save_path)


def logged(run: Any) -> list[dict[str, Any]]:
    """Every row of a run's metrics; ``run``: its config, or its folder."""
    return read_jsonl(run_folder(run) / "metrics.jsonl")


def numbers(run: Any, namespaces: tuple[str, ...] = NUMBERS) -> list[dict[str, Any]]:
    """All logged rows, without what a clock measured."""
    return [
        {k: v for k, v in row.items() if k == "step" or k.startswith(namespaces)}
        for row in logged(run)
    ]


def trained_rows(run: Any, namespaces: tuple[str, ...] = NUMBERS) -> list[dict[str, Any]]:
    """Metrics of the training steps, without what a clock measured."""
    return [
        row
        for row in numbers(run, namespaces)
        if "rollout/reward" in row or "train/policy_loss" in row
    ]


def forget_checkpoints(folder: Path, after: int) -> None:
    """Removes those of later steps: the run goes on from ``after`` when it is started again."""
    later = [
        path
        for path in folder.glob("_*/global_step*")
        if int(path.name.removeprefix("global_step")) > after
    ]
    assert later, f"{folder} has no checkpoint after step {after}"
    for path in later:
        shutil.rmtree(path)


def whole_weights(trainer: Any, name: str = "actor") -> dict[str, Any]:
    """Copies of all parameters of the trainer's model of this name, gathered. Collective."""
    with trainer.strategy.gathered_parameters(getattr(trainer, name)) as module:
        return {key: p.detach().clone() for key, p in module.named_parameters()}
