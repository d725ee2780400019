"""What a wrong name may have meant: the table first, then similar whole words, and nothing far away."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from lightppo.config import PPOConfig
from lightppo.config import option_errors as mistakes
from lightppo.config.supervised_options import COMMANDS
from lightppo.suggestions import (
    _MEANT,
    _table,
    likeness,
    nearest,
    similar,
    typing_errors,
)

FLAGS = {
    kind: {f"--{one.name}" for one in config.all_options()} for kind, config in COMMANDS.items()
}
FLAGS["ppo"] = {f"--{one.name}" for one in PPOConfig.all_options()}


@pytest.mark.parametrize(
    ("a", "b", "errors"),
    [("gamma", "gamma", 0), ("gama", "gamma", 1), ("verison", "version", 1), ("trian", "train", 1), ("ab", "ba", 1),
     ("", "abc", 3), ("kitten", "sitting", 3), ("ppo", "opo", 1)],
)  # fmt: skip
def test_typing_errors(a, b, errors):
    assert typing_errors(a, b) == typing_errors(b, a) == errors


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("GRPO", ["grpo", "gae"], ["grpo"]),  # letters' case
        ("trainbatchsize", ["train_batch_size", "batch_size"], ["train_batch_size"]),
        ("train-batch-sise", ["train_batch_size", "micro_train_batch_size"], ["train_batch_size"]),
        ("maxModelLen", ["max_model_len"], ["max_model_len"]),
        ("max_model_length", ["max_model_len", "reward_max_length"], ["max_model_len"]),
        ("learning_rate", ["actor_learning_rate", "learning_curve"], ["actor_learning_rate"]),
        ("model", ["max_model_len", "reward_delta"], []),  # a third of the words
        ("device", ["code_score", "seed"], []),  # letters in common are no words in common
        ("algo", ["val_only", "lambd"], []),
        ("lr", ["l2", "lambd"], []),  # too short for a typing error
        # more than can be meant
        ("reward", ["reward_fn", "reward_bias", "reward_delta", "reward_format"], []),
        ("", ["a"], []),
    ],
)
def test_similar_names(name, known, found):
    assert similar(name, known) == found


def test_likeness_is_symmetric_and_bounded():
    names = sorted(FLAGS["ppo"])[::20]
    for a in names:
        assert [likeness(a, b) for b in names] == [likeness(b, a) for b in names]
        assert likeness(a, a) == 1
        assert all(0 <= likeness(a, b) < 1 for b in names if b != a)


@pytest.mark.parametrize("kind", _MEANT)
def test_every_answer_of_the_table_exists_somewhere(kind):
    from lightppo.__main__ import COMMANDS as NAMES

    known = {
        "flag": set.union({"--out", "--output"}, *FLAGS.values()),
        "command": {*NAMES, "--help", "--version"},
        "argument": {"MODEL", "RUN", "CHECKPOINT", "ADAPTER", "OUT"},
        "advantage_estimator": set(ADVANTAGE_ESTIMATORS),
        "policy_loss": set(POLICY_LOSSES),
        "reward_fn_style": {"queries"},
        "rollout_engine": {"hf", "vllm_server"},
        "attn_implementation": {"flash_attention_2"},
    }[kind]
    for name, answers in _table(kind).items():
        for answer in answers:
            words = answer.split()
            is_value = kind == "flag" and len(words) == 2 and words[0] in known
            assert words[0] == ":" or {*words} <= known or is_value, (name, answer)


def test_no_name_stands_twice_in_a_table():
    for kind, text in _MEANT.items():
        names = [
            name for line in text.strip().splitlines() for name in line.partition(" | ")[0].split()
        ]
        assert len(names) == len(set(names)), kind


def test_an_answer_that_is_not_here_leads_to_the_next():
    assert nearest("--epochs", FLAGS["ppo"], "flag") == " (did you mean '--num_episodes'?)"
    assert nearest("--epochs", FLAGS["sft"], "flag") == " (did you mean '--num_epochs'?)"
    assert nearest("--reward_model", FLAGS["sft"], "flag") == ""
    assert nearest("--vllm", FLAGS["ppo"], "flag") == " (did you mean '--rollout_engine vllm'?)"


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        # what pointed elsewhere
        ("ppo", "n_sample", "did you mean '--n_samples_per_prompt'?"),
        ("ppo", "discount", "did you mean '--gamma'?"),
        ("ppo", "prompts_file", "did you mean '--prompt_data'?"),
        ("ppo", "reward_server_url", "did you mean '--remote_rm_url'?"),
        ("ppo", "max_prompts", "did you mean '--max_samples'?"),
        ("ppo", "max_train_steps", "did you mean '--total_training_steps'?"),
        ("ppo", "value_loss_coef", "did you mean '--critic_learning_rate'?"),
        ("ppo", "model_name", "did you mean '--pretrain'?"),
        ("ppo", "training_batch_size", "did you mean '--train_batch_size'?"),
        # what had no answer
        ("ppo", "gae_lambda", "did you mean '--lambd'?"),
        ("ppo", "save_interval", ": here --save_steps (slime)"),
        ("sft", "save_every", "did you mean '--save_steps'?"),
        ("ppo", "batchsize", "did you mean '--train_batch_size'?"),
        ("ppo", "gradient_checkpoint", "did you mean '--gradient_checkpointing'?"),
        ("ppo", "reward_scale", "did you mean '--reward_scaling'?"),
        ("ppo", "math_verify", "did you mean '--reward_source math'?"),
        ("ppo", "optimizer_class", ""),
        # what another command has
        (
            "sft",
            "gae_lambda",
            ": --lambd is for that, an option of lightppo ppo, not of this command",
        ),
        ("ppo", "margin_key", ": it is an option of lightppo rm, not of this command"),
        ("rm", "dpo_beta", ": --beta is for that, an option of lightppo dpo"),
    ],
)
def test_names_that_people_write(kind, name, meant):
    told = mistakes.nearest(f"--{name}", FLAGS[kind], "option")
    assert meant in told if meant else told == ""


NAMES = Path(__file__).with_name("names_that_people_write.txt").read_text(encoding="utf-8").split()


def test_few_names_that_people_write_have_no_answer():
    assert len(NAMES) == len(set(NAMES)) > 650
    unknown = [name for name in NAMES if f"--{name}" not in FLAGS["ppo"]]
    assert [
        name for name in unknown if not mistakes.nearest(f"--{name}", FLAGS["ppo"], "option")
    ] == []


def test_a_name_with_an_answer_has_at_most_three_flags():
    for name in NAMES:
        told = mistakes.nearest(f"--{name}", FLAGS["ppo"], "option")
        assert "did you mean" not in told or told.count("--") <= 4, told
