"""The bodies of LightRFT's trainer as overrides: each method alone and all together, in a small PPO run.

They are read from a copy of that trainer beside the checkout, or where LIGHTPPO_SEED_TRAINER says; without one these
tests are skipped. The copy is a page of documentation that has each method on one line: ``LAYOUT`` says how many words
each line of the code had, and how far it was indented.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sampled import PROMPTS
from support.tiny import read_jsonl
from torch.utils.data import DataLoader
from tqdm import tqdm

import lightppo
from lightppo import PPOTrainer

LAYOUT = {
    "fit": """
        0.2 1.1 1.1 1.1 1.1 1.1 1.1 0.3 1.1 1.5 1.4 1.3 1.6 1.3 1.6 1.3 1.10 1.3 1.11 1.3 1.1 1.3 2.8 2.1 1.1
        1.6 1.4 2.8 1.4 2.8 1.3 1.3 1.5 1.7 1.7 1.7 1.5 2.3 3.1 4.8 3.1 2.3 3.1 3.4 3.2 2.1 2.5 3.5 4.3 3.1 4.4
        5.3 6.2 5.1 5.1 4.1 3.3 3.4 4.2 3.2 3.3 3.3 3.1 3.2 3.4 4.4 3.1 3.2 3.6 3.5 3.1 3.5 1.7 2.1 1.7 2.1
    """,
    "ppo_train": """
        0.3 1.1 1.7 1.9 1.3 1.6 1.2 1.1 1.1 1.14 1.3 2.1 2.1 2.1 2.1 2.1 2.1 1.1 1.3 1.3 1.3 1.4 2.3 3.1 3.5 3.2
        2.1 2.4 3.1 3.4 3.7 3.4 4.3 4.3 4.3 3.3 3.4 4.3 5.2 5.2 5.2 5.2 5.2 5.2 5.2 4.1 3.4 4.3 4.3 4.3 3.4 4.3
        3.1 3.1 1.2 2.3 2.4 3.5 4.3 2.4 3.3 1.1 1.2
    """,
    "training_step": """
        0.2 4.2 4.1 4.7 1.1 1.8 1.7 1.3 1.6 1.3 1.7 1.3 1.5 1.3 1.1 1.3 1.4 2.4 1.5 2.1 1.2
    """,
    "training_step_actor": """
        0.2 6.2 6.7 1.1 1.3 1.7 1.3 1.6 1.3 1.1 1.1 1.15 1.3 2.4 2.4 2.4 2.7 2.7 2.11 8.1 2.7 3.4 1.1 2.3 2.3
        2.3 2.3 2.3 2.3 2.7 3.3 1.3 1.4 2.1 2.1 2.1 2.1 2.1 1.1 1.3 1.3 2.1 2.1 2.1 2.1 2.1 1.1 1.2 2.5 3.3 4.1
        4.1 4.1 4.1 3.1 2.1 3.5 2.3 3.5 2.6 2.1 3.12 3.4 3.8 2.3 2.3 1.1 2.3 1.4 1.2 2.3 1.1 2.3 1.11 1.3 1.3
        1.5 2.3 2.3 2.3 2.3 3.1 3.1 3.1 2.1 2.5 2.3 2.3 2.4 2.4 2.2 3.3 2.1 3.3 2.7 2.5 1.4 1.2 2.4 1.2 1.6 1.5
        2.3 1.11 1.3 2.3 2.1 1.5 2.4 3.6 6.1 2.1 3.3 1.2
    """,
    "training_step_critic": """
        0.7 1.1 1.3 1.7 1.3 1.6 1.3 1.1 1.1 1.15 1.3 2.4 2.4 2.4 2.7 2.7 2.11 8.1 1.1 2.3 2.3 2.3 2.3 2.3 2.3
        1.3 1.4 2.1 2.1 2.1 2.1 2.1 1.1 1.3 1.3 2.1 2.1 2.1 2.1 1.1 1.4 1.2 2.3 1.1 2.3 1.7 1.3 1.4 1.2 1.3 2.2
        2.3 2.2 1.1 1.2
    """,
    "save_logs_and_checkpoints": """
        0.7 1.1 1.8 1.4 1.3 1.5 1.3 1.5 1.3 1.10 1.3 1.10 1.3 1.1 1.6 2.13 2.10 2.3 3.6 3.6 3.4 3.4 3.7 2.1 2.7
        2.3 2.8 2.3 2.3 2.5 3.2 4.9 4.5 4.3 3.4 4.9 4.1 3.6 4.4 4.1 3.1 4.7 4.3 2.3 2.7 3.7 3.2 4.9 4.3 4.1 3.7
        3.2 4.9 4.3 4.1 3.4 3.5 4.9 4.1 2.3 2.7 3.5 4.3 3.5 4.3 3.5 4.5 5.3 1.7 1.6 2.3 2.1 1.3 1.15 1.6 2.3 2.3
    """,
    "_save_checkpoint": """
        0.5 1.1 1.5 1.4 1.3 1.6 1.3 1.7 1.3 1.1 1.3 2.1 3.1 3.2 3.1 3.1 3.1 3.1 2.1 2.5 3.1 4.6 3.1 1.2 2.9 2.3
        2.3 2.3 2.4 2.3
    """,
}

ARGS = {
    "max_epochs": 1,
    "use_kl_loss": False,
    "kl_estimator": "k3",
    "packing_samples": False,
    "aux_loss_coef": 0.0,
    "advantage_estimator": "gae",
    "max_ckpt_num": 3,
    "max_ckpt_mem": 1000,
}


def recorded() -> str:
    """The text of the copy."""
    named = os.environ.get("LIGHTPPO_SEED_TRAINER")
    beside = sorted((Path(__file__).parents[3] / "shared" / "seeds").glob("*.txt"))
    texts = [Path(path).read_text() for path in ([named] if named else beside)]
    found = [text for text in texts if "class PPOTrainer(ABC)" in text]
    if not found:
        pytest.skip("no copy of LightRFT's trainer beside the checkout")
    return found[0]


def method(text: str, name: str) -> str:
    """The source of one method, with the lines and the indentation that it had."""
    words = iter(re.search(rf"^(?:\[docs\])?\s*(def {name}\(.*)$", text, re.MULTILINE)[1].split())
    lines = []
    for pair in LAYOUT[name].split():
        depth, count = map(int, pair.split("."))
        lines.append("    " * (depth + 1) + " ".join(itertools.islice(words, count)))
    assert not list(words), f"{name} has another number of words than LAYOUT says"
    return "\n".join(lines)


def pasted(*names: str) -> type[PPOTrainer]:
    """A subclass whose methods of these names are the recorded ones; its imports are lightppo's."""
    text = recorded()
    source = (
        "class Pasted(PPOTrainer):\n" + "\n\n".join(method(text, name) for name in names) + "\n"
    )
    imported = {name: getattr(lightppo, name) for name in lightppo.__all__}
    module = types.ModuleType("pasted")
    vars(module).update(
        vars(typing), **imported, os=os, sys=sys, torch=torch, DataLoader=DataLoader, tqdm=tqdm
    )
    module.__file__ = __file__
    exec(compile(source, "pasted", "exec"), vars(module))
    return module.Pasted


@pytest.fixture
def run(made, parts, tmp_path, monkeypatch):
    """``run(*methods, args={...}, **options)``: the trainer after two episodes of one step each."""
    if not torch.cuda.is_available():  # the seed trains on GPUs only
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # two micro batches make a step
    monkeypatch.setattr(parts["strategy"], "micro_train_batch_size", 2)

    def fit(
        *names: str, args: dict[str, Any] | None = None, pretrain: Any = None, **options: Any
    ) -> PPOTrainer:
        given = (
            ARGS | {"use_tensorboard": str(tmp_path / "tb"), "wandb_run_name": "run"} | (args or {})
        )
        trainer = made(pasted(*names), args=given, dataloader_pin_memory=False, **options)
        prompts = parts["strategy"].setup_dataloader(PROMPTS, 2, False, True, collate_fn=list)
        trainer.fit(trainer.args, prompts, pretrain, 0, 1)
        return trainer

    return fit


def written(folder: Path) -> dict[str, list[float]]:
    """Points in TensorBoard files, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[float]] = {}
    for path in sorted({path.parent for path in folder.rglob("events*")}):
        events = EventAccumulator(str(path)).Reload()
        found |= {
            name: [e.value for e in events.Scalars(name)] for name in events.Tags()["scalars"]
        }
    return found


def logged(tmp_path: Path) -> list[dict[str, Any]]:
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    return [row for row in rows if "train/policy_loss" in row]


@pytest.mark.parametrize("name", LAYOUT)
def test_each_body_runs_alone(run, tmp_path, name):
    trainer = run(name)
    steps = trainer.actor_scheduler.last_epoch
    assert steps > 0
    assert (tmp_path / "ckpt" / "_actor" / "global_step2").is_dir()
    assert (tmp_path / "ckpt" / "_critic" / "global_step2").is_dir()
    if name != "save_logs_and_checkpoints":
        assert [row["step"] for row in logged(tmp_path)] == [1, 2]
    points = written(tmp_path / "tb")
    assert len(points["train/policy_loss"]) == len(points["train/critic_loss"]) == 2


@pytest.mark.parametrize(
    "options", [{}, {"use_kl_loss": True}, {"use_kl_loss": True, "kl_estimator": "k2"}]
)
def test_all_bodies_run_together(run, tmp_path, options):
    trainer = run(*LAYOUT, args=options, save_hf_ckpt=True, kl_target=0.5, kl_horizon=100)
    points = written(tmp_path / "tb")
    assert {
        "train/policy_loss",
        "train/critic_loss",
        "train/values",
        "train/kl",
        "train/clip_ratio",
    } <= points.keys()
    assert all(len(values) == 2 for values in points.values())
    assert (tmp_path / "ckpt" / "global_step2_hf" / "config.json").is_file()
    assert trainer.kl_ctl.value != 0.001  # its fit has told the controller


def test_the_bodies_train_on_text_as_well(run, tmp_path):
    ids = torch.tensor([[5, 6, 7, 8], [6, 7, 8, 9]])
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}]
    run("training_step_actor", pretrain=batches, ptx_coef=0.1)
    assert all(row["train/ptx_loss"] > 0 for row in logged(tmp_path))
