"""A model learns to ask an environment before it answers: `make quickstart ENV=lookup`, shorter."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.runs import logged
from support.world import one_rank

from lightppo import PPOTrainer
from lightppo.config import parse_args
from lightppo.plugins.supervised.sections import SFTConfig
from lightppo.plugins.supervised.trainer import SupervisedTrainer

LOOKUP = Path(__file__).parents[2] / "examples" / "environments" / "lookup.py"


@pytest.mark.learning
def test_it_asks_before_it_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    spec = importlib.util.spec_from_file_location("lookup", LOOKUP)
    lookup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lookup)
    lookup.main(tmp_path)
    with one_rank():
        warm_up = SFTConfig.from_flat(
            pretrain=str(tmp_path / "model"),
            dataset=str(tmp_path / "sft.jsonl"),
            output_key="output",
            save_path=str(tmp_path / "sft"),
            max_len=24,
            max_steps=400,
            train_batch_size=128,
            micro_train_batch_size=128,
            learning_rate=5e-3,
            adam_betas=(0.9, 0.99),
        )
        SupervisedTrainer.from_config(warm_up).fit()
        options = [
            "--config",
            str(LOOKUP.with_suffix(".yaml")),
            "--pretrain",
            str(tmp_path / "sft"),
        ]
        options += ["--prompt_data", str(tmp_path / "prompts.jsonl")]
        options += [
            "--eval_data",
            str(tmp_path / "eval.jsonl"),
            "--save_path",
            str(tmp_path / "ppo"),
        ]
        config = parse_args([*options, "--total_training_steps", "40", "--zero_stage", "0"])
        PPOTrainer.from_config(config).fit()
    accuracy = [row["eval/accuracy"] for row in logged(config) if "eval/accuracy" in row]
    assert 0.2 < accuracy[0] < 0.7  # a guess is right once in a hundred
    assert accuracy[-1] > 0.9
