"""Text training of checkpoints with towers: runs, resume, LoRA, convert and merge leave each tower byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.runs import fitted, forget_checkpoints
from support.tiny import sums, write_jsonl
from support.towers import (
    KINDS,
    gemma3,
    save_language_model,
    save_with_tower,
    sums_of,
    sums_of_tower,
)

from lightppo import PPOTrainer
from lightppo.__main__ import main
from lightppo.config.cli import parse_args
from lightppo.config.supervised_options import DPOConfig, RMConfig, SFTConfig
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import CheckpointError, ConfigError, ModelLoadError
from lightppo.models.actor import Actor
from lightppo.supervised.trainer import SupervisedTrainer

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.slow]

ONE_STEP = {"total_training_steps": 1, "lr_warmup_ratio": 0.0, "advantage_estimator": "reinforce"}
LORA = {"lora_rank": 2, "lora_alpha": 8}


@pytest.fixture(scope="module", params=list(KINDS))
def any_whole(request, tmp_path_factory) -> str:
    """A checkpoint with its tower."""
    return save_with_tower(request.param, tmp_path_factory.mktemp("whole") / request.param)


@pytest.fixture(scope="module", params=["gemma3", "qwen3_5"])
def whole(request, tmp_path_factory) -> str:
    return save_with_tower(request.param, tmp_path_factory.mktemp("whole") / request.param)


def check_export(whole: str, export: Path) -> None:
    """It has the same tensors; those of the tower are the same to the bit, others have moved."""
    before, after = sums_of(whole), sums_of(export)
    assert before.keys() == after.keys()
    tower = sums_of_tower(whole)
    assert tower == sums_of_tower(export)
    moved = {name for name in before if before[name] != after[name]}
    assert moved
    assert not moved & tower.keys()
    architectures = [
        json.loads((Path(folder) / "config.json").read_text())["architectures"]
        for folder in (whole, export)
    ]
    assert architectures[0] == architectures[1]


def check_log_probs(actor: Any, export: Path) -> None:
    """The class that the checkpoint came with computes what the trainer does."""
    hf_model = actor.hf_model
    loaded = getattr(transformers, hf_model.whole.auto_class).from_pretrained(export).eval()
    ids = torch.tensor([[5, 9, 14, 8, 6, 7], [11, 6, 9, 15, 16, 8]])
    with torch.no_grad():
        ours, theirs = (
            model.eval()(input_ids=ids).logits.log_softmax(-1) for model in (hf_model, loaded)
        )
    torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=0)


def test_ppo_with_weight_decay(any_whole, make_config, tmp_path):
    trainer = fitted(make_config(pretrain=any_whole, l2=0.1, **ONE_STEP))
    check_export(any_whole, tmp_path / "run")
    check_log_probs(trainer.actor, tmp_path / "run")
    held = [tensor for group in trainer.actor_optim.param_groups for tensor in group["params"]]
    text = sum(parameter.numel() for parameter in trainer.actor.parameters())
    assert sum(tensor.numel() for tensor in held) == text


def test_a_critic_an_average_and_the_records_of_a_run(whole, make_config, tmp_path):
    options = {
        "critic_pretrain": whole,
        "enable_ema": True,
        "save_value_network": True,
        "hf_save_steps": 1,
        "init_kl_coef": 0.1,
    }
    fitted(make_config(pretrain=whole, total_training_steps=1, lr_warmup_ratio=0.0, **options))
    check_export(whole, tmp_path / "run")
    check_export(whole, tmp_path / "ckpt" / "global_step1_hf")
    critic = tmp_path / "run_critic"
    of_tower = {name: value for name, value in sums_of_tower(critic).items() if "score" not in name}
    assert of_tower == sums_of_tower(whole)
    transformers.AutoModelForSequenceClassification.from_pretrained(critic)


@pytest.mark.parametrize(
    ("whole", "adapters"),
    [
        pytest.param("gemma3", {}, id="gemma3-full"),
        pytest.param("qwen3_5", LORA, id="qwen3_5-lora"),
        # each family and each way to train is above
        pytest.param("gemma3", LORA, id="gemma3-lora", marks=pytest.mark.long),
        pytest.param("qwen3_5", {}, id="qwen3_5-full", marks=pytest.mark.long),
    ],
    indirect=["whole"],
)
def test_resume_convert_and_merge(whole, make_config, tmp_path, adapters):
    options = ONE_STEP | adapters | {"pretrain": whole, "save_steps": 1, "l2": 0.1}
    trainer = fitted(make_config(**options | {"total_training_steps": 2}))
    first = sums_of(tmp_path / "run")
    check_export(whole, tmp_path / "run")
    if not adapters:
        check_log_probs(trainer.actor, tmp_path / "run")

    main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "converted")])
    assert sums_of(tmp_path / "converted") == first
    main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "earlier"), "--step", "1"])
    check_export(whole, tmp_path / "earlier")
    assert sums_of(tmp_path / "earlier") != first
    if adapters:
        main(["merge", str(tmp_path / "run" / "adapter"), str(tmp_path / "merged")])
        assert sums_of(tmp_path / "merged") == first
        for name in ("config.json", "preprocessor_config.json"):
            kept = Path(whole, name).read_bytes()
            assert (tmp_path / "merged" / name).read_bytes() == kept

    forget_checkpoints(tmp_path / "ckpt", after=1)
    shutil.rmtree(tmp_path / "run")
    fitted(make_config(**options | {"total_training_steps": 2}))
    assert sums_of(tmp_path / "run") == first


def other_tower(whole: str, folder: Path) -> str:
    """A copy in which one number of the tower is another."""
    shutil.copytree(whole, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(iter(sums_of_tower(folder)))
    weights[name].view(-1)[0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_folder_that_is_gone_or_has_another_tower_ends_a_resume_at_its_start(
    whole, make_config, tmp_path, capsys
):
    base = tmp_path / "base"
    shutil.copytree(whole, base)
    options = ONE_STEP | {"pretrain": str(base), "save_steps": 1}
    fitted(make_config(**options))
    shutil.rmtree(base)
    more = make_config(**options | {"total_training_steps": 2})
    with pytest.raises((ConfigError, ModelLoadError), match="--pretrain"):
        PPOTrainer.from_config(more)
    other_tower(whole, base)
    with pytest.raises((ConfigError, CheckpointError), match="--pretrain"):
        PPOTrainer.from_config(more)
    capsys.readouterr()
    for start in (str(base), save_text(whole)):
        with pytest.raises(SystemExit) as exit_info:
            main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--base", start])
        assert exit_info.value.code == 2
        assert "was trained beside other image or audio towers" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--base", whole])
    check_export(whole, tmp_path / "out")


def test_a_checkpoint_knows_its_tower(whole, tmp_path):
    """Where no run compares what --pretrain names."""
    strategy = DeepspeedStrategy(zero_stage=0)
    actors = []
    for start in (whole, other_tower(whole, tmp_path / "other")):
        actor = Actor(start)
        optimizer = strategy.create_optimizer(actor, lr=1e-3)
        actors.append(strategy.prepare((actor, optimizer, None))[0])
    strategy.save_ckpt(actors[0], tmp_path / "ckpt")
    strategy.load_ckpt(actors[0], tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="beside other image or audio towers, or none"):
        strategy.load_ckpt(actors[1], tmp_path / "ckpt")


@pytest.mark.parametrize("kind", [SFTConfig, RMConfig, DPOConfig])
def test_training_on_data(whole, kind, tmp_path):
    rows = [{"input": "1+1=", "output": "2"}, {"input": "2+1=", "output": "3"}]
    if kind is not SFTConfig:
        rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 2
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    arguments = [f"--pretrain={whole}", f"--dataset={data}", f"--save_path={tmp_path / 'run'}"]
    sizes = ["--train_batch_size=2", "--micro_train_batch_size=1", "--zero_stage=0", "--l2=0.1"]
    rate = ["--learning_rate=1e-2", "--lr_warmup_ratio=0"]
    config = parse_args([*arguments, *sizes, *rate], kind=kind)
    SupervisedTrainer.from_config(config).fit()
    of_tower = sums_of_tower(tmp_path / "run")
    assert {k: v for k, v in of_tower.items() if "score" not in k} == sums_of_tower(whole)
    if kind is not RMConfig:
        check_export(whole, tmp_path / "run")


def test_merge_takes_an_adapter_of_the_whole_model(tmp_path):
    """As peft makes one of the class that the checkpoint came with."""
    from peft import LoraConfig, get_peft_model

    whole = save_with_tower("gemma3", tmp_path / "gemma3")
    model = transformers.AutoModelForImageTextToText.from_pretrained(whole)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["down_proj", "k_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    folder = tmp_path / "adapter"
    adapted.save_pretrained(folder)
    weights = load_file(folder / "adapter_model.safetensors")
    assert [name for name in weights if "vision_tower" in name]
    arguments = ["merge", str(folder), str(tmp_path / "out"), "--base", whole]
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert not (tmp_path / "out").exists()

    text = {name: tensor for name, tensor in weights.items() if "vision_tower" not in name}
    save_file(text, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    main(arguments)
    check_export(whole, tmp_path / "out")
    for module in adapted.base_model.model.model.vision_tower.modules():
        if hasattr(module, "lora_B"):
            module.lora_B.default.weight.data.zero_()
    expected = adapted.merge_and_unload().state_dict()
    merged = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-5, rtol=0)


def save_text(whole: str) -> str:
    folder = Path(whole).parent / "text"
    return str(folder) if folder.exists() else save_language_model(whole, folder)


def test_the_language_model_alone_is_a_text_model(whole, make_config, tmp_path):
    text = save_text(whole)
    fitted(make_config(pretrain=text, ref_pretrain=whole, init_kl_coef=0.1, **ONE_STEP))
    before, after = sums_of(text), sums_of(tmp_path / "run")
    assert before.keys() == after.keys()
    assert before != after


def test_a_model_that_was_built_has_no_tower_to_copy():
    strategy = DeepspeedStrategy(zero_stage=0)
    with pytest.raises(ModelLoadError, match="has an image or audio tower"):
        strategy.create_optimizer(Actor(gemma3()), lr=1e-3)


def refused(start: Any, *arguments: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"known kind: fusion\.0 \(1 tensors\)") as error:
        start(*arguments)
    assert error.value.exit_code == 2
    assert len(str(error.value).splitlines()) == 1


def test_parts_that_cannot_be_told_apart_are_named_before_a_run_begins(
    whole, make_config, tmp_path
):
    strange = tmp_path / "strange"
    shutil.copytree(whole, strange)
    weights = load_file(strange / "model.safetensors") | {"fusion.0": torch.ones(1)}
    save_file(weights, strange / "model.safetensors", metadata={"format": "pt"})
    for flag in ("pretrain", "critic_pretrain"):
        refused(PPOTrainer.from_config, make_config(**{flag: str(strange)}))
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"input": "1+1=", "output": "2"}])
    arguments = [f"--pretrain={strange}", f"--dataset={rows}", f"--save_path={tmp_path / 'run'}"]
    sizes = ["--train_batch_size=1", "--micro_train_batch_size=1", "--zero_stage=0"]
    refused(SupervisedTrainer.from_config, parse_args([*arguments, *sizes], kind=SFTConfig))
    assert not (tmp_path / "run").exists()

    prompts = write_jsonl(tmp_path / "prompts.jsonl", sums(3))
    options = {"pretrain": str(strange), "val_only": True, "eval_data": prompts}
    fitted(make_config(**options, advantage_estimator="reinforce", eval_max_samples=2))
    assert (tmp_path / "run" / "metrics.jsonl").exists()  # an evaluation only reads


def test_each_part_of_a_checkpoint_converts(make_config, tmp_path):
    whole = save_with_tower("gemma3", tmp_path / "gemma3")
    options = {"critic_pretrain": whole, "enable_ema": True, "save_steps": 1, "init_kl_coef": 0.1}
    options |= {"total_training_steps": 1, "lr_warmup_ratio": 0.0, "save_value_network": True}
    fitted(make_config(pretrain=whole, **options))
    for part in ("actor", "critic", "ema"):
        out = tmp_path / part
        main(["convert", str(tmp_path / "ckpt"), str(out), "--part", part])
        if part == "critic":
            assert sums_of(out) == sums_of(tmp_path / "run_critic")
        else:
            check_export(whole, out)


def test_frozen_weights_in_4_bits(make_config, tmp_path):
    """The export and a merge add the adapter to the dense weights, see lora.md."""
    pytest.importorskip("bitsandbytes")
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # rows of whole blocks
    whole = save_with_tower("mistral3", tmp_path / "mistral3", **wide)
    fitted(make_config(pretrain=whole, load_in_4bit=True, **LORA, **ONE_STEP))
    check_export(whole, tmp_path / "run")
    main(["merge", str(tmp_path / "run" / "adapter"), str(tmp_path / "merged")])
    check_export(whole, tmp_path / "merged")


def test_memory_is_counted_without_the_tower(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightppo.preflight.budget.library_bytes", lambda ranks: 10**9)
    whole = save_with_tower("gemma3", tmp_path / "gemma3")
    printed = []
    for model in (whole, save_text(whole)):
        words = [f"--pretrain={model}", "--advantage_estimator=reinforce", "--gpu_memory=1GB"]
        with pytest.raises(SystemExit) as exit_info:
            main(["memory", *words])
        assert exit_info.value.code == 0
        printed.append(capsys.readouterr().out.replace(model, "MODEL"))
    assert printed[0] == printed[1]
