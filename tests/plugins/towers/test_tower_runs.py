"""Checkpoints with an image tower are refused for training at once; their language model alone trains and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.runs import fitted
from support.tiny import save_reward_model, sums, write_jsonl
from support.towers import gemma3, save_language_model, save_with_tower

from lightppo import PPOTrainer
from lightppo.__main__ import main
from lightppo.config.cli import parse_args
from lightppo.errors import ModelLoadError
from lightppo.models.actor import Actor
from lightppo.plugins.supervised.sections import DPOConfig, RMConfig, SFTConfig
from lightppo.plugins.supervised.trainer import SupervisedTrainer
from lightppo.strategy.deepspeed import DeepspeedStrategy

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(scope="module", params=["gemma3", "qwen3_5"])
def whole(request, tmp_path_factory) -> str:
    """A checkpoint with its tower."""
    return save_with_tower(request.param, tmp_path_factory.mktemp("whole") / request.param)


def refusal(start: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(ModelLoadError, match="has an image or audio tower") as error:
        start(*arguments, **options)
    assert error.value.exit_code == 2
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize("flag", ["pretrain", "critic_pretrain"])
def test_ppo_refuses_it(whole, flag, make_config, tmp_path):
    message = refusal(PPOTrainer.from_config, make_config(**{flag: whole, "enable_ema": True}))
    assert message.startswith(f"--{flag} {whole} has an image or audio tower (")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [SFTConfig, RMConfig, DPOConfig])
def test_training_on_data_refuses_it(whole, kind, tmp_path):
    rows = [{"input": "1+1=", "output": "2", "chosen": "2", "rejected": "3"}]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    arguments = [f"--pretrain={whole}", f"--dataset={data}", f"--save_path={tmp_path / 'run'}"]
    sizes = ["--train_batch_size=1", "--micro_train_batch_size=1", "--zero_stage=0"]
    refusal(SupervisedTrainer.from_config, parse_args([*arguments, *sizes], kind=kind))
    assert not (tmp_path / "run").exists()


def test_a_script_that_makes_an_optimizer_is_refused_and_one_that_reads_is_not(whole):
    actor = Actor(whole)
    assert actor(torch.tensor([[5, 6, 7, 8]]), 2).shape == (1, 2)
    strategy = DeepspeedStrategy(zero_stage=0)
    refusal(strategy.create_optimizer, actor, lr=1e-3)
    refusal(strategy.create_optimizer, Actor(gemma3()), lr=1e-3)  # built, not loaded
    strategy.create_optimizer(Actor(save_text(whole)), lr=1e-3)


def save_text(whole: str) -> str:
    folder = Path(whole).parent / "text"
    return str(folder) if folder.exists() else save_language_model(whole, folder)


def test_merge_refuses_it(whole, tmp_path, capsys):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(whole), LoraConfig(r=2, target_modules=["down_proj"])
    )
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(SystemExit) as exit_info:
        main(["merge", str(tmp_path / "adapter"), str(tmp_path / "out"), "--base", whole])
    assert exit_info.value.code == 2
    assert "has an image or audio tower" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_only_reads_may_have_a_tower_and_the_language_model_alone_trains(
    whole, make_config, tmp_path, capsys
):
    text = save_text(whole)
    reward = save_reward_model(tmp_path / "reward")
    options = {
        "pretrain": text,
        "critic_pretrain": reward,
        "ref_pretrain": whole,
        "init_kl_coef": 0.1,
    }
    fitted(make_config(**options, total_training_steps=1, lr_warmup_ratio=0.0, save_steps=1))
    before, after = (
        load_file(Path(folder) / "model.safetensors") for folder in (text, tmp_path / "run")
    )
    assert {name: t.shape for name, t in after.items()} == {
        name: t.shape for name, t in before.items()
    }
    assert any(not torch.equal(after[name], before[name]) for name in before)
    config, start = (
        json.loads((Path(folder) / "config.json").read_text())
        for folder in (tmp_path / "run", text)
    )
    assert (config["architectures"], config["model_type"]) == (
        start["architectures"],
        start["model_type"],
    )
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:  # of a base whose tower the export would not have
        main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--base", whole])
    assert exit_info.value.code == 2
    assert f"--base {whole} has an image or audio tower" in capsys.readouterr().err
    main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out")])


def test_an_evaluation_only_reads(whole, make_config, tmp_path):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", sums(3))
    options = {
        "pretrain": whole,
        "val_only": True,
        "eval_data": prompts,
        "advantage_estimator": "reinforce",
    }
    fitted(make_config(**options, eval_max_samples=2))
    assert (tmp_path / "run" / "metrics.jsonl").exists()
