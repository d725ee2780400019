"""Runs with --load_in_4bit: what they hold, the reference, resuming, exports, rollouts, two ranks at ZeRO-3."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import REPO, run_ranks
from support.runs import fitted, forget_checkpoints, trained_rows, whole_weights
from support.tiny import save_causal_lm, tiny_config, write_jsonl
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lightppo import PPOTrainer
from lightppo.errors import CheckpointError, ModelLoadError
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import AdaptersOff
from lightppo.models.adapters.quantised import quantised_layers
from lightppo.rollout.vllm.weights import full_weights
from lightppo.trainer import build

pytestmark = pytest.mark.usefixtures("world")

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # rows of whole blocks
QLORA = {"lora_rank": 4, "lora_alpha": 32.0, "load_in_4bit": True}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory) -> str:
    return save_causal_lm(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture
def config_of(make_config, wide_model):
    return lambda **options: make_config(**{"pretrain": wide_model} | QLORA | options)


def held_bytes(model: Any) -> int:
    return sum(
        t.numel() * t.element_size() for t in model.hf_model.state_dict(keep_vars=True).values()
    )


def test_what_a_run_holds(config_of, tmp_path):
    """Actor and critic in 4 bits, no second copy for the reference, the reward model as it is."""
    torch.manual_seed(1)
    LlamaForSequenceClassification(tiny_config(**WIDE, num_labels=1)).save_pretrained(
        tmp_path / "rm"
    )
    options = {
        "reward_pretrain": (str(tmp_path / "rm"),),
        "reward_fn": None,
        "init_critic_from_actor": True,
    }
    config = config_of(**options, init_kl_coef=0.1).resolved()
    models = build.build_models(config, build.build_strategy(config))
    assert models.reference is None
    for model in (models.actor, models.critic):
        assert len(quantised_layers(model)) == 14
        trained = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
        assert held_bytes(model) - trained < held_bytes(models.reward_models[0]) / 3
    assert quantised_layers(models.reward_models[0]) == {}

    dense = build.build_models(
        config.with_options(load_in_4bit=False), build.build_strategy(config)
    )
    assert quantised_layers(dense.actor) == {}


KL = {
    "in the reward": {"init_kl_coef": 0.2},
    "full loss, packed, checkpointing": {
        "init_kl_coef": 0.2, "use_kl_loss": True, "kl_estimator": "full", "packing_samples": True,
        "gradient_checkpointing": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "zero_stage"),
    # 3: also ranks/quantised.py; in the reward: over dense weights, in test_lora_runs.py
    [
        pytest.param("in the reward", 0, marks=pytest.mark.long),
        ("full loss, packed, checkpointing", 0),
        pytest.param("full loss, packed, checkpointing", 3, marks=pytest.mark.long),
    ],
)
def test_the_reference_gives_the_numbers_of_a_separate_one_in_4_bits(
    config_of, tmp_path, wide_model, case, zero_stage
):
    options = KL[case] | {
        "old_log_probs": "forward",
        "zero_stage": zero_stage,
        "load_checkpoint": False,
    }
    shared = fitted(config_of(save_path=str(tmp_path / "shared"), **options))
    assert isinstance(shared.initial_model, AdaptersOff)

    copy = shutil.copytree(wide_model, tmp_path / "copy")
    options["ref_offload"] = zero_stage == 3  # of what is not in 4 bits
    separate = fitted(
        config_of(save_path=str(tmp_path / "separate"), ref_pretrain=str(copy), **options)
    )
    assert len(quantised_layers(separate.strategy.unwrap_model(separate.initial_model))) == 14
    ours, theirs = trained_rows(tmp_path / "shared"), trained_rows(tmp_path / "separate")
    assert ours == theirs
    if case == "in the reward":
        assert ours[0]["rollout/kl"] == 0.0 != ours[2]["rollout/kl"]


# Of the others test_adapters_on_ranks.py has checkpoints.
@pytest.mark.parametrize("zero_stage", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_resumed_run_is_the_uninterrupted_run(config_of, tmp_path, zero_stage):
    def run(folder: str, steps: int) -> PPOTrainer:
        paths = {
            "save_path": str(tmp_path / folder / "run"),
            "ckpt_path": str(tmp_path / folder / "ckpt"),
        }
        options = {
            "lora_dropout": 0.2,
            "init_kl_coef": 0.1,
            "zero_stage": zero_stage,
            "save_steps": 1,
        }
        return fitted(config_of(**options, **paths, benchmark_steps=steps))

    whole = run("whole", 3)
    run("halves", 1)
    resumed = run("halves", 3)
    assert trained_rows(tmp_path / "halves" / "run") == trained_rows(tmp_path / "whole" / "run")
    for name in ("actor", "critic"):
        expected, got = whole_weights(whole, name), whole_weights(resumed, name)
        assert any("lora_B" in key for key in expected)
        assert all(torch.equal(got[key], expected[key]) for key in expected), name
    folder = tmp_path / "whole" / "ckpt" / "_actor" / "global_step3"
    held = torch.load(next(folder.glob("*model_states.pt")), weights_only=False)["module"]
    assert {key.rpartition("lora_")[2] for key in held} == {"A.default.weight", "B.default.weight"}
    with pytest.raises(CheckpointError, match=r"4 bits.*--load_in_4bit"):
        PPOTrainer.from_config(
            whole.config.with_options(load_in_4bit=False, save_path=str(tmp_path / "other"))
        )


def test_other_weights_in_4_bits_are_not_taken_for_the_same(config_of, tmp_path):
    fitted(config_of(save_steps=1, benchmark_steps=1))
    path = Path(save_causal_lm(tmp_path / "other", **WIDE))
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        # nothing but one weight of a layer in 4 bits
        model.model.layers[0].mlp.up_proj.weight[3, 5] *= -1
    model.save_pretrained(path)
    with pytest.raises(CheckpointError, match="frozen weights"):
        PPOTrainer.from_config(
            config_of(pretrain=str(path), critic_pretrain=str(path), resume=str(tmp_path / "ckpt"))
        )


def test_exports_are_dense_merged_models(config_of, tmp_path, wide_model):
    trainer = fitted(config_of(save_value_network=True, save_steps=3, save_hf_ckpt=True))
    ids = torch.randint(4, 40, (3, 9))
    with torch.no_grad():
        expected = trainer.actor.model(input_ids=ids).logits
    base = AutoModelForCausalLM.from_pretrained(wide_model)
    for folder in (tmp_path / "run", tmp_path / "ckpt" / "global_step3_hf"):
        merged, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
        assert merged.state_dict().keys() == base.state_dict().keys()
        with torch.no_grad():
            torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-5, rtol=0)
            assert (merged(input_ids=ids).logits - base(input_ids=ids).logits).abs().max() > 1e-2
        assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    critic, info = LlamaForSequenceClassification.from_pretrained(
        tmp_path / "run_critic", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        hidden = critic.model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(
            critic.score(hidden).squeeze(-1), trainer.critic(ids), atol=1e-4, rtol=0
        )


def test_rollouts_are_those_of_the_weights_that_are_sent(config_of, wide_model):
    """Hugging Face generation over 4 bits and over the merged dense model: the same greedy tokens."""
    trainer = fitted(config_of(benchmark_steps=1, temperature=1.0))
    merged = AutoModelForCausalLM.from_pretrained(wide_model)
    merged.load_state_dict(dict(full_weights(trainer.actor)))
    ids = torch.randint(4, 40, (3, 9))
    ours, theirs = (
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
        )
        for model in (trainer.actor.hf_model, merged)
    )
    assert torch.equal(ours, theirs)


def test_refusals(config_of, make_config, monkeypatch):
    with pytest.raises(ModelLoadError, match=r"--load_in_4bit: .* 22% "):
        PPOTrainer.from_config(make_config(**QLORA))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "bitsandbytes" else find_spec(name),
    )
    monkeypatch.setattr(
        build, "build_models", lambda *_: pytest.fail("the models were loaded first")
    )
    with pytest.raises(ModelLoadError, match=r"--load_in_4bit .*lightppo\[qlora\]"):
        PPOTrainer.from_config(config_of())


@pytest.mark.slow
@pytest.mark.long  # test_lora_runs.py has this run, and test_adapters_on_ranks.py the weights in 4 bits
def test_two_ranks_at_zero3(assets, wide_model, tmp_path):
    """Resumed after its first step it repeats the others, and what it saves loads and has learnt."""

    def launch() -> list[dict[str, float]]:
        flags = {
            "pretrain": wide_model, "prompt_data": assets["prompt_data"], "reward_fn": assets["reward_fn"],
            "zero_stage": 3, "lora_rank": 4, "lora_alpha": 32, "prompt_max_len": 12, "generate_max_len": 5,
            "rollout_batch_size": 4, "train_batch_size": 4, "micro_train_batch_size": 1, "kl_target": 0.1,
            "actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2, "save_steps": 1,
            "save_path": tmp_path / "model", "ckpt_path": tmp_path / "ckpt",
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items()]
        run_ranks(
            REPO / "examples" / "train_ppo.py",
            *words,
            "--load_in_4bit",
            "--packing_samples",
            timeout=300,
        )
        return trained_rows(tmp_path / "model")

    whole = launch()
    forget_checkpoints(tmp_path / "ckpt", after=1)
    assert launch() == whole
    kls = [row["rollout/kl"] for row in whole]
    assert abs(kls[0]) < 1e-6 < abs(kls[2])

    unset_hf_deepspeed_config()
    ids = torch.randint(4, 40, (3, 9))
    merged, base = (
        AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "model", wide_model)
    )
    rounded = Actor(wide_model, load_in_4bit=True).hf_model
    with torch.no_grad():
        logits = merged(input_ids=ids).logits
        for before in (base, rounded):
            assert (logits - before(input_ids=ids).logits).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fork", pytest.param("python", marks=pytest.mark.long)])
def test_supervised_training(wide_model, tmp_path, launcher):
    """examples/train_sft.py takes the flag too."""
    data = write_jsonl(
        tmp_path / "sft.jsonl", [{"input": f"{a}+1=", "output": f"{a + 1}"} for a in range(8)]
    )
    flags = {
        "pretrain": wide_model, "dataset": data, "output_key": "output", "max_len": 24, "train_batch_size": 8,
        "micro_train_batch_size": 4, "num_epochs": 8, "learning_rate": 1e-2, "zero_stage": 2, "lora_rank": 4,
        "save_path": tmp_path / "model",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()]
    script = REPO / "examples" / "train_sft.py"
    result = run_ranks(
        script, *words, "--load_in_4bit", launcher=launcher, world_size=1, timeout=300
    )
    assert "Failed to load" not in result.output  # bitsandbytes's warning
    losses = [
        json.loads(line)["train/loss"]
        for line in (tmp_path / "model" / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < 0.8 * losses[0]
    assert len(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()) == 21
