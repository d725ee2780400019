"""What a wrong name may have meant: the table first, then similar whole words, and nothing far away."""

from __future__ import annotations

import pytest

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from lightppo.config.rules import PPOConfig
from lightppo.plugins.hints.meant_names import (
    _MEANT,
    _table,
    likeness,
    nearest,
    similar,
    typing_errors,
)
from lightppo.plugins.supervised.sections import COMMANDS

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
            assert words[0] == ":" or {*words} <= known or words == ["--rollout_engine", "vllm"], (
                name,
                answer,
            )


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
