"""Runs that learn from a teacher: alone, beside a reward, as a loss; resumed; two ranks; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import REPO, run_ranks
from support.runs import NUMBERS, fitted, trained_rows
from support.tiny import save_causal_lm, sums, write_jsonl

from lightppo import PPOTrainer
from lightppo.config import PPOConfig
from lightppo.errors import ConfigError

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with other weights, far enough away to teach something."""
    from transformers import AutoModelForCausalLM

    folder = save_causal_lm(tmp_path_factory.mktemp("teacher"), seed=7)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def taught(make_config, teacher, tmp_path) -> Callable[..., PPOConfig]:
    """``taught(name, **options)``: a run from the teacher alone, into a folder of its own."""

    def make(name: str = "run", **options: Any) -> PPOConfig:
        folders = {"save_path": str(tmp_path / name), "ckpt_path": str(tmp_path / name / "ckpt")}
        alone = {"advantage_estimator": "on_policy_distill", "reward_fn": None, "init_kl_coef": 0.0}
        return make_config(**alone | {"teacher_pretrain": teacher} | folders | options)

    return make


def rows_of(run: Any) -> list[dict[str, float]]:
    """The training steps of a config, or of a folder, without what a clock measured."""
    return trained_rows(run, ("alarm/", *NUMBERS))


def rows_after(config: PPOConfig) -> list[dict[str, float]]:
    """Its training steps, after the run."""
    return rows_of(fitted(config).config)


def assert_close(one: dict[str, float], other: dict[str, float], **tolerance: float) -> None:
    names = [n for n in one if n.startswith(NUMBERS) and one[n] is not None]
    assert {n: one[n] for n in names} == pytest.approx({n: other[n] for n in names}, **tolerance)


def test_alone_it_needs_neither_reward_nor_reference_nor_critic(taught):
    rows = rows_after(taught())
    for row in rows:
        assert row["rollout/advantage_mean"] == pytest.approx(-row["rollout/teacher_kl"], abs=1e-6)
        assert row["rollout/samples"] == 4
        assert (
            not {"rollout/reward", "rollout/kl", "rollout/value_mean", "alarm/equal_rewards"}
            & row.keys()
        )
    assert rows[0]["rollout/teacher_kl"] > 0.1


@pytest.mark.long
def test_alone_it_brings_the_student_near_the_teacher(taught, tmp_path):
    """From 1.8 nats to 0.8 in 20 steps. A step of 32 samples is 0.2 nats of noise: ten steps at 1e-6 say nothing."""
    prompts = write_jsonl(tmp_path / "prompts.jsonl", sums(64))
    sizes = {
        "rollout_batch_size": 32,
        "train_batch_size": 32,
        "micro_train_batch_size": 16,
        "num_episodes": 10,
    }
    options = {
        "actor_learning_rate": 1e-2,
        "lr_warmup_ratio": 0.0,
        "total_training_steps": 20,
        "prompt_data": prompts,
    }
    found = [row["rollout/teacher_kl"] for row in rows_after(taught(**options, **sizes))]
    assert sum(found[-5:]) / 5 < 0.6 * found[0]


def test_a_loss_learns_from_all_tokens(taught):
    advantage, loss = rows_after(taught("advantage")), rows_after(taught("loss", distill_by="loss"))
    assert loss[0]["rollout/teacher_kl"] == pytest.approx(
        advantage[0]["rollout/teacher_kl"], abs=1e-5
    )
    assert loss[0]["train/policy_loss"] == loss[0]["rollout/advantage_max"] == 0
    assert loss[0]["train/actor_grad_norm"] > 0
    assert loss[-1]["train/distill_loss"] < loss[0]["train/distill_loss"]
    # at the first step a token's estimate has the exact divergence of its position as its mean
    assert loss[0]["train/distill_loss"] == pytest.approx(loss[0]["rollout/teacher_kl"], rel=0.5)


def test_the_teachers_best_tokens_make_one_pass_over_the_rollout(taught, teacher):
    """Of all tokens it is the divergence over the vocabulary; of three it is less, and the teacher gives them less."""
    from transformers import AutoTokenizer

    tokens = len(AutoTokenizer.from_pretrained(teacher))
    every = {"distill_by": "loss", "distill_beta": 0.5, "benchmark_steps": 1}
    (whole,) = rows_after(taught("whole", **every))
    (all_of_them,) = rows_after(taught("all", distill_topk=tokens, **every))
    names = {"train/distill_loss", "train/actor_grad_norm", "rollout/teacher_log_prob"}
    assert {name: all_of_them[name] for name in names} == pytest.approx(
        {name: whole[name] for name in names}, rel=1e-4
    )
    assert all_of_them["train/teacher_top_mass"] == pytest.approx(1.0, abs=1e-5)
    (three,) = rows_after(taught("three", distill_topk=3, **every))
    assert 0 < three["train/distill_loss"] < whole["train/distill_loss"]
    assert 3 / tokens < three["train/teacher_top_mass"] < 1


def test_more_tokens_than_there_are_are_refused_before_models_load(taught):
    with pytest.raises(ConfigError, match=r"--distill_topk 1000: there are \d+ tokens"):
        PPOTrainer.from_config(taught(distill_by="loss", distill_topk=1000))


def test_a_student_that_is_its_teacher_has_no_gradient(taught, assets):
    options = {"teacher_pretrain": assets["pretrain"], "distill_beta": 0.5, "benchmark_steps": 1}
    (row,) = rows_after(taught(distill_by="loss", **options))
    assert row["train/distill_loss"] == pytest.approx(0, abs=1e-6)
    assert row["train/actor_grad_norm"] == pytest.approx(0, abs=1e-5)


def test_beside_a_reward_the_term_is_weighed(taught, assets):
    options = {
        "advantage_estimator": "rloo",
        "n_samples_per_prompt": 2,
        "train_batch_size": 8,
        "benchmark_steps": 1,
    }
    options |= {"reward_fn": assets["reward_fn"], "temperature": 0.8}
    (without,) = rows_after(taught("without", teacher_pretrain=None, **options))
    (row,) = rows_after(taught("with", distill_coef=0.25, **options))
    gained = row["rollout/advantage_mean"] - without["rollout/advantage_mean"]
    assert gained == pytest.approx(-0.25 * row["rollout/teacher_kl"], abs=1e-5)
    assert row["rollout/reward"] == without["rollout/reward"]


def test_scores_beside_a_teacher_alone_are_recorded_and_change_nothing(taught, assets):
    (watched,) = rows_after(taught("watched", reward_fn=assets["reward_fn"], benchmark_steps=1))
    (alone,) = rows_after(taught("alone", benchmark_steps=1))
    assert "rollout/reward" in watched
    names = [name for name in alone if name.startswith("train/")]
    assert [watched[name] for name in names] == [alone[name] for name in names]


@pytest.mark.parametrize(
    "by",
    [
        {"distill_by": "advantage"},
        {"distill_by": "loss"},
        {"distill_by": "loss", "distill_topk": 3},
    ],
    ids=["advantage", "loss", "topk"],
)
def test_padding_packing_and_micro_batches_change_nothing(taught, by):
    common = {
        **by,
        "benchmark_steps": 1,
        "n_samples_per_prompt": 2,
        "train_batch_size": 4,
    }
    (whole,) = rows_after(
        taught("whole", packing_samples=False, micro_train_batch_size=4, **common)
    )
    (cut,) = rows_after(
        taught("cut", micro_train_batch_size=1, micro_rollout_batch_size=3, **common)
    )
    assert_close(whole, cut, abs=1e-5, rel=1e-4)


ADAPTERS = {"distill_by": "loss", "distill_beta": 0.5, "lora_rank": 2}


@pytest.mark.parametrize(
    "options", [{}, pytest.param(ADAPTERS, marks=pytest.mark.long)], ids=["plain", "adapters"]
)
def test_a_resumed_run_is_the_uninterrupted_one(taught, teacher, options):
    whole = rows_after(taught("whole", **options))
    rows_after(taught("cut", save_steps=1, benchmark_steps=1, **options))
    assert rows_after(taught("cut", save_steps=1, **options)) == whole
    with pytest.raises(ConfigError, match="--distill_coef"):
        PPOTrainer.from_config(taught("cut", distill_coef=3.0, num_episodes=2, **options))


def test_a_teacher_with_another_vocabulary_is_refused_before_models_load(taught, tmp_path):
    from transformers import AutoTokenizer

    other = save_causal_lm(tmp_path / "other")
    files = Path(other, "tokenizer.json")
    spelled = json.loads(files.read_text())
    vocab = spelled["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    files.write_text(json.dumps(spelled))
    assert AutoTokenizer.from_pretrained(other).get_vocab()["1"] == vocab["1"]
    with pytest.raises(
        ConfigError, match=r"--teacher_pretrain .*2 of its tokens .*'1', '2'.*family"
    ):
        PPOTrainer.from_config(taught(teacher_pretrain=other))


def test_a_trainer_made_by_hand_gets_teacher_and_its_name_together(trainer_with, parts):
    options = {"advantage_estimator": "on_policy_distill", "init_kl_coef": 0.0}
    with pytest.raises(ConfigError, match="teacher="):
        trainer_with(teacher_pretrain="larger", **options)
    trainer = trainer_with(teacher_pretrain="larger", teacher=parts["reference"], **options)
    assert trainer.experience_maker.passes["teacher"].model is parts["reference"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"distill_by": "loss", "distill_topk": 3}, marks=pytest.mark.long)],
    ids=["advantage", "topk"],
)
def test_two_ranks_at_zero3(assets, teacher, taught, tmp_path, more):
    """With adapters; both models sharded, the teacher's shards on the host. The numbers are those of one rank."""
    flags = {
        "pretrain": assets["pretrain"], "prompt_data": assets["prompt_data"], "teacher_pretrain": teacher,
        "advantage_estimator": "on_policy_distill", "init_kl_coef": 0.0, "zero_stage": 3, "lora_rank": 4,
        "prompt_max_len": 12, "generate_max_len": 5, "rollout_batch_size": 4, "train_batch_size": 4,
        "micro_train_batch_size": 1, "actor_learning_rate": 1e-2, "benchmark_steps": 2, "num_examine": 0,
        "save_path": tmp_path / "two", **more,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()]
    run_ranks(REPO / "examples" / "train_ppo.py", *words, "--ref_offload", timeout=300)
    alone = rows_after(taught("one", lora_rank=4, benchmark_steps=2, **more))
    for one, other in zip(alone, rows_of(tmp_path / "two"), strict=True):
        assert_close(one, other, abs=2e-4, rel=2e-3)
