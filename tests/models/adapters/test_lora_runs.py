"""Runs with LoRA: the numbers of a separate reference without one, resuming, exports, and two ranks at ZeRO-3."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from support.ranks import REPO, run_ranks
from support.runs import fitted, forget_checkpoints, trained_rows, whole_weights
from support.tiny import save_causal_lm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lightppo import PPOTrainer
from lightppo.errors import CheckpointError, ConfigError, ModelLoadError
from lightppo.models.adapters import lora
from lightppo.models.adapters.lora import AdaptersOff
from lightppo.trainer import build
from lightppo.zero3 import is_engine, parameter_count

pytestmark = pytest.mark.usefixtures("world")

LORA = {"lora_rank": 4, "lora_alpha": 32.0}


KL = {
    "in the reward": {"init_kl_coef": 0.2},
    "k3 loss": {"init_kl_coef": 0.2, "use_kl_loss": True, "kl_estimator": "k3"},
    "full loss, dropout": {
        "init_kl_coef": 0.2,
        "use_kl_loss": True,
        "kl_estimator": "full",
        "lora_dropout": 0.1,
    },
    "packed, checkpointing": {
        "init_kl_coef": 0.2,
        "packing_samples": True,
        "gradient_checkpointing": True,
    },
}


KL["full loss, dropout, packed, checkpointing"] = (
    KL["full loss, dropout"] | KL["packed, checkpointing"]
)


@pytest.mark.parametrize(
    ("zero_stage", "case"),
    [
        (0, "in the reward"),
        # the loss has the logits of the other, and its log probs with them
        pytest.param(0, "k3 loss", marks=pytest.mark.long),
        (0, "full loss, dropout"),
        (0, "packed, checkpointing"),
        # each of its parts is above; test_two_ranks_at_zero3 has the stage
        pytest.param(3, "full loss, dropout, packed, checkpointing", marks=pytest.mark.long),
    ],
)
def test_the_reference_gives_the_numbers_of_a_separate_one(
    make_config, tmp_path, tiny_model, case, zero_stage
):
    options = (
        LORA
        | KL[case]
        | {
            "old_log_probs": "forward",
            "max_epochs": 2,
            "zero_stage": zero_stage,
            "load_checkpoint": False,
        }
    )
    shared = fitted(make_config(save_path=str(tmp_path / "shared"), **options))
    assert isinstance(shared.initial_model, AdaptersOff)
    assert shared.initial_model.actor is shared.actor
    assert not [value for value in vars(shared.initial_model).values() if is_engine(value)]

    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    separate = fitted(
        make_config(save_path=str(tmp_path / "separate"), ref_pretrain=str(copy), **options)
    )
    assert is_engine(separate.initial_model.model)
    ours, theirs = trained_rows(tmp_path / "shared"), trained_rows(tmp_path / "separate")
    assert ours == theirs
    # there the old log probs come after the first step, with the KL
    if not options.get("use_kl_loss"):
        assert ours[0]["rollout/kl"] == 0.0
        assert ours[2]["rollout/kl"] != 0.0
    else:
        assert ours[0]["train/kl_loss"] != ours[2]["train/kl_loss"] != 0.0


def test_what_a_run_holds(make_config, tiny_model):
    """No second copy of the model: the actor, the critic, and their adapters."""
    config = make_config(**LORA).resolved()
    models = build.build_models(config, build.build_strategy(config))
    assert models.reference is None
    plain = parameter_count(AutoModelForCausalLM.from_pretrained(tiny_model))
    # rank 4 × (in + out) of q 64, k and v 48, o 64, gate, up and down 96; two layers
    adapters = 2 * 4 * (64 + 48 + 48 + 64 + 3 * 96)
    assert parameter_count(models.actor) == plain + adapters
    assert parameter_count(models.actor, trained_only=True) == adapters
    assert parameter_count(models.critic, trained_only=True) == adapters + 32  # the value head

    some = make_config(**LORA, target_modules=("q_proj", "v_proj"), init_kl_coef=0.0).resolved()
    models = build.build_models(some, build.build_strategy(some))
    assert models.reference is None
    assert parameter_count(models.actor, trained_only=True) == 2 * 4 * (64 + 48)


# 0: with weights in 4 bits, in test_quantised_runs.py; 3: on two ranks, in test_adapters_on_ranks.py
@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_resumed_run_is_the_uninterrupted_run(make_config, tmp_path, zero_stage):
    def run(folder: str, steps: int) -> PPOTrainer:
        paths = {
            "save_path": str(tmp_path / folder / "run"),
            "ckpt_path": str(tmp_path / folder / "ckpt"),
        }
        options = LORA | {
            "lora_dropout": 0.2,
            "init_kl_coef": 0.1,
            "zero_stage": zero_stage,
            "save_steps": 1,
        }
        return fitted(make_config(**options, **paths, max_epochs=2, benchmark_steps=steps))

    whole = run("whole", 3)
    run("halves", 1)
    resumed = run("halves", 3)
    assert trained_rows(tmp_path / "halves" / "run") == trained_rows(tmp_path / "whole" / "run")
    for name in ("actor", "critic"):
        expected, got = whole_weights(whole, name), whole_weights(resumed, name)
        assert all(torch.equal(got[key], expected[key]) for key in expected), name
    size = sum(
        f.stat().st_size
        for f in (tmp_path / "whole" / "ckpt" / "_actor" / "global_step3").rglob("*")
    )
    if zero_stage < 3:  # at ZeRO-3 the shards of all weights leave a few hundred bytes each
        assert size < 16 * parameter_count(whole.strategy.unwrap_model(whole.actor), True) + 60_000
    changed = whole.config.with_options(lora_rank=8, save_path=str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match=r" rank 4, alpha 32, .* rank 8, .*--lora_rank"):
        PPOTrainer.from_config(changed)


def test_exports_are_merged_models_with_the_adapter_inside(
    make_config, tmp_path, assets, tiny_model
):
    config = make_config(
        **LORA, eval_data=assets["prompt_data"], eval_steps=1, val_before_train=False, best_metric="eval/reward",
        hf_save_steps=2,
        save_value_network=True, save_steps=3, save_hf_ckpt=True,
    )  # fmt: skip
    trainer = fitted(config)
    ids = torch.randint(4, 40, (3, 9))
    with torch.no_grad():
        expected = trainer.actor.model(input_ids=ids).logits
        values = trainer.critic(ids)
    ckpt, base = tmp_path / "ckpt", AutoModelForCausalLM.from_pretrained(tiny_model)
    for folder in (
        tmp_path / "run",
        ckpt / "global_step2_hf",
        ckpt / "global_step3_hf",
        ckpt / "best_hf",
    ):
        merged = AutoModelForCausalLM.from_pretrained(folder)
        adapted = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tiny_model), str(folder / "adapter")
        )
        with torch.no_grad():
            logits = merged(input_ids=ids).logits
            torch.testing.assert_close(adapted(input_ids=ids).logits, logits, atol=1e-5, rtol=0)
            assert (logits - base(input_ids=ids).logits).abs().max() > 1e-3, folder
        if folder.name in ("run", "global_step3_hf"):
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run_critic")
    with torch.no_grad():
        hidden = critic.model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(critic.score(hidden).squeeze(-1), values, atol=1e-4, rtol=0)


def test_errors_before_and_at_loading(make_config, monkeypatch):
    with pytest.raises(ModelLoadError, match="--target_modules query: LlamaForCausalLM"):
        PPOTrainer.from_config(make_config(**LORA, target_modules=("query",)))
    with pytest.raises(ConfigError, match=r"--lora_dropout .*--lora_rank"):
        PPOTrainer.from_config(make_config(lora_dropout=0.1))

    def missing() -> None:
        raise ModelLoadError("--lora_rank needs peft")

    monkeypatch.setattr(lora, "check_peft", missing)
    with pytest.raises(ModelLoadError, match="--lora_rank"):
        lora.check_packages(SimpleNamespace(config=make_config(**LORA)))


def test_a_trainer_made_by_hand_cannot_move_the_actor_without_its_adapters(make_config):
    trainer = PPOTrainer.from_config(make_config(**LORA))
    config = make_config(ref_ema_eta=0.1).resolved()
    models = (trainer.actor, trainer.critic, None, trainer.initial_model, None)
    with pytest.raises(ConfigError, match="--ref_ema_eta"):
        PPOTrainer(
            trainer.strategy, *models, *[None] * 4, config=config, tokenizer=trainer.tokenizer
        )


@pytest.mark.slow
# two ranks of test_adapters_on_ranks.py go on from a checkpoint
@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_ranks_at_zero3(assets, tmp_path, resumes):
    """The KL starts at 0; what the run saves loads. Resumed after its first step it repeats the others."""

    def launch() -> list[dict[str, float]]:
        flags = {
            "pretrain": assets["pretrain"], "prompt_data": assets["prompt_data"], "reward_fn": assets["reward_fn"],
            "zero_stage": 3, "lora_rank": 4, "lora_alpha": 32, "lora_dropout": 0.1, "prompt_max_len": 12,
            "generate_max_len": 5, "rollout_batch_size": 4, "train_batch_size": 4, "micro_train_batch_size": 1,
            "max_epochs": 2, "actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2, "save_steps": 1,
            "benchmark_steps": 2, "kl_target": 0.1, "save_path": tmp_path / "model", "ckpt_path": tmp_path / "ckpt",
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items()]
        run_ranks(
            REPO / "examples" / "train_ppo.py", *words, "--gradient_checkpointing", timeout=300
        )
        return trained_rows(tmp_path / "model")

    whole = launch()
    if resumes:
        forget_checkpoints(tmp_path / "ckpt", after=1)
        assert launch() == whole
    kls = [row["rollout/kl"] for row in whole]
    assert len(kls) == 2
    # the old log probs are the engine's: rounding is all that differs
    assert abs(kls[0]) < 1e-6 < abs(kls[1])

    unset_hf_deepspeed_config()
    ids = torch.randint(4, 40, (3, 9))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(assets["pretrain"])
    with torch.no_grad():
        logits, before = merged(input_ids=ids).logits, base(input_ids=ids).logits
        assert (logits - before).abs().max() > 1e-2
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "model" / "adapter"))
        torch.testing.assert_close(adapted(input_ids=ids).logits, logits, atol=1e-5, rtol=0)


def test_another_reference_is_loaded(make_config, tmp_path):
    other = save_causal_lm(tmp_path / "other", seed=5)
    trainer = PPOTrainer.from_config(make_config(**LORA, ref_pretrain=other))
    reference = trainer.strategy.unwrap_model(trainer.initial_model)
    assert torch.equal(
        reference.lm_head.weight, AutoModelForCausalLM.from_pretrained(other).lm_head.weight
    )
