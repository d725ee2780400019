"""The small loop has the numbers of the trainer, to the last bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import REPO, run_ranks
from support.runs import fitted, trained_rows
from support.scripts import beside
from support.tiny import REWARD, sums, write_jsonl

SMALL = {"prompt_max_len": 12, "generate_max_len": 5, "rollout_batch_size": 8, "train_batch_size": 8,
         "actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2}  # fmt: skip


@pytest.fixture
def files(tiny_model: str, tmp_path: Path) -> list[str]:
    """Arguments of the script: model, prompts for three steps, reward function."""
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", sums(20))
    return [tiny_model, prompts, str(tmp_path / "reward.py")]


def test_it_trains_as_the_trainer_does(world, files, tmp_path, monkeypatch, capsys):
    from lightppo import HFRolloutEngine

    with beside(REPO / "examples"):
        loop = importlib.import_module("custom_loop")
    monkeypatch.setattr(loop, "OPTIONS", loop.OPTIONS | SMALL)
    steps: list[dict[str, Any]] = []  # the actor's weights after each

    def remember(engine: HFRolloutEngine, actor: Any) -> None:
        steps.append({name: p.detach().clone() for name, p in actor.named_parameters()})

    monkeypatch.setattr(HFRolloutEngine, "sync_weights", remember)
    loop.train(loop.options(*files, str(tmp_path / "loop")).resolved())
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    of_loop = steps.copy()
    steps.clear()

    trainer = fitted(loop.options(*files, str(tmp_path / "trainer")))
    rows = trained_rows(trainer.config)
    assert len(of_loop) == len(steps) == len(rows) == 3
    for weights_of_loop, weights_of_trainer in zip(of_loop, steps):
        assert weights_of_loop.keys() == weights_of_trainer.keys()
        for name, weight in weights_of_loop.items():
            assert torch.equal(weight, weights_of_trainer[name]), name
    assert printed == [
        f"step {row['step']}: reward {row['rollout/reward']}, KL {row['rollout/policy_kl']}"
        for row in rows
    ]
    assert rows[0]["train/kl_coef"] != rows[-1]["train/kl_coef"]
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("loop", "trainer")]
    assert saved[0] == saved[1]


BOTH = f"""
import sys
sys.path.insert(0, {str(REPO / "examples")!r})
import custom_loop
from lightppo import PPOTrainer

custom_loop.OPTIONS |= {SMALL!r}
files, out = sys.argv[1:4], sys.argv[4]
custom_loop.train(custom_loop.options(*files, out + "/loop").resolved())
PPOTrainer.from_config(custom_loop.options(*files, out + "/trainer")).fit()
"""


@pytest.mark.long
def test_it_does_so_on_two_ranks(files, tmp_path):
    (tmp_path / "both.py").write_text(BOTH)
    run_ranks(tmp_path / "both.py", *files, str(tmp_path))
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("loop", "trainer")]
    assert saved[0] == saved[1]
