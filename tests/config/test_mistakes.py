"""Mistakes of a command line: one line each, which names the flag and says what to do, and exit code 2."""

from __future__ import annotations

import re

import pytest

from lightppo.__main__ import main


@pytest.fixture
def told(capsys):
    """``told("ppo --gama 1")``: the lines of a command that ends with exit code 2, without flags that are missing."""

    def run(words: str | list[str]) -> list[str]:
        with pytest.raises(SystemExit) as stopped:
            main(words.split() if isinstance(words, str) else words)
        assert stopped.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if " error: " in line and not re.search("--[a-z_]+ is required", line)]

    return run


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("ppo --model m", "--model (did you mean '--pretrain'?)"),
        ("sft --model m", "--model (did you mean '--pretrain'?)"),
        ("ppo --reward_model m", "--reward_model (did you mean '--reward_pretrain'?)"),
        ("ppo --epochs 3", "--epochs (did you mean '--num_episodes'?)"),
        ("sft --epochs 3", "--epochs (did you mean '--num_epochs'?)"),
        ("ppo --n_samples 3", "--n_samples (did you mean '--n_samples_per_prompt'?)"),
        ("ppo --n-samples 3", "--n_samples (did you mean '--n_samples_per_prompt'?)"),
        ("ppo --advantage gae", "--advantage (did you mean '--advantage_estimator'?)"),
        ("ppo --max_length 9", "--max_length (did you mean '--prompt_max_len' or '--generate_max_len'?)"),
        ("sft --max_length 9", "--max_length (did you mean '--max_len'?)"),
        ("ppo --algo grpo", "--algo (did you mean '--advantage_estimator'?)"),
        ("dpo --algo ipo", "--algo (did you mean '--preference_loss'?)"),
        ("ppo --device cuda", "--device: a GPU is used where there is one; CUDA_VISIBLE_DEVICES chooses it"),
        ("ppo --vllm", "--vllm (did you mean '--rollout_engine vllm'?)"),
        ("sft --prompt_data x", "--prompt_data (did you mean '--dataset'?)"),
        ("ppo --dataset x", "--dataset (did you mean '--prompt_data'?)"),
        ("sft --dataset_name x", "--dataset_name (did you mean '--dataset'?)"),  # not TRL's name of what PPO has
        ("sft --num_train_epochs 3", "--num_train_epochs (did you mean '--num_epochs'?)"),
        ("sft --reward_fn f.py", "--reward_fn: it is an option of lightppo ppo, not of this command"),
        ("ppo --margin_key m", "--margin_key: it is an option of lightppo rm, not of this command"),
    ],
)
def test_a_wrong_flag(told, words, meant):
    (line,) = told(words)
    assert line.startswith(f"lightppo {words.split()[0]}: error: unknown flag {meant}")


@pytest.mark.parametrize("flag", ["--foo", "--max_bar", "--reward_thing", "--x", "--colour"])
def test_a_flag_like_no_other_has_no_suggestion(told, flag):
    assert told(f"ppo {flag} 1") == [f"lightppo ppo: error: unknown flag {flag}"]


RECIPE = "DAPO is a recipe of several options: --config examples/recipes/dapo.yaml"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--advantage_estimator ppo", "(did you mean 'gae'?)"),
        ("--advantage_estimator GRPO", "(did you mean 'grpo'?)"),
        ("--advantage_estimator gspo", "it is a value of --policy_loss"),
        ("--advantage_estimator dapo", RECIPE),
        ("--policy_loss dapo", RECIPE),
        ("--policy_loss DAPO", RECIPE),
        ("--policy_loss grpo", "it is a value of --advantage_estimator"),
        ("--reward_fn_style openrlhf", "(did you mean 'queries'?)"),
        ("--rollout_engine VLLM", "(did you mean 'vllm'?)"),
        ("--rollout_engine transformers", "(did you mean 'hf'?)"),
        ("--attn_implementation flash", "(did you mean 'flash_attention_2'?)"),
    ],
)
def test_a_wrong_value(told, words, meant):
    (line,) = told(f"ppo {words}")
    assert line.startswith(f"lightppo ppo: error: {words.split()[0]}")
    assert meant in line


def test_a_value_like_no_other_has_no_suggestion(told):
    assert "did you mean" not in told("ppo --advantage_estimator zzz")[0]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("grpo", ": write lightppo ppo --advantage_estimator grpo"),
        ("GRPO", ": write lightppo ppo --advantage_estimator grpo"),
        ("gspo", ": write lightppo ppo --policy_loss gspo"),
        ("dapo", f": {RECIPE}, for lightppo ppo"),
        ("help", " (did you mean '--help'?)"),
        ("train", " (did you mean 'ppo' or 'sft'?)"),
        ("PPO", " (did you mean 'ppo'?)"),
        ("--verison", " (did you mean '--version'?)"),
        ("version", " (did you mean '--version'?)"),
        ("evaluate", " (did you mean 'eval'?)"),
        ("pppo", " (did you mean 'ppo'?)"),
        ("qwerty", ""),
    ],
)
def test_a_wrong_command(told, name, meant):
    assert told([name]) == [f"lightppo: error: unknown command {name!r}{meant}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ppo --bf16 true", "--bf16 true: a switch takes no value: write --bf16 for on, --no_bf16 for off"),
        ("ppo --bf16=False", "--bf16 False: a switch takes no value: write --bf16 for on, --no_bf16 for off"),
        ("sft --no-bf16 x", "--no_bf16 x: a switch takes no value: write --bf16 for on, --no_bf16 for off"),
        ("ppo -seed 3", "unexpected argument '-seed': write --seed, with two dashes"),
        ("ppo -seed=3", "unexpected argument '-seed': write --seed, with two dashes"),
        (
            "ppo -train-batch-size 3",
            "unexpected argument '-train-batch-size': write --train_batch_size, with two dashes",
        ),
        ("ppo -lr 3", "unexpected argument '-lr' (did you mean '--actor_learning_rate'?)"),
    ],
)
def test_how_a_flag_is_written(told, words, message):
    assert told(words) == [f"lightppo {words.split()[0]}: error: {message}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chat --pretrain m", "unknown flag --pretrain: MODEL is given without a flag: lightppo chat MODEL"),
        (
            "merge --output o --adapter a",
            "unknown flag --output: OUT is given without a flag: lightppo merge ADAPTER OUT",
        ),
        ("convert c o --steps 3", "unknown flag --steps (did you mean '--step'?)"),
        ("report run --output p", "unknown flag --output (did you mean '--out'?)"),
        ("watch --save_path run", "unknown flag --save_path: RUN is given without a flag: lightppo watch RUN"),
        ("diff a b c", "unexpected argument 'c'"),
        ("replay run --step 1 --pbd", "unknown flag --pbd (did you mean '--pdb'?)"),
        ("serve-reward --reward_fn a.py --prot 1", "unknown flag --prot (did you mean '--port'?)"),
        ("serve-reward", "name what scores: --reward_fn or --reward_pretrain"),
        ("chat", "the following arguments are required: MODEL"),
        ("memory --nodes two", "argument --nodes: invalid int value: 'two'"),
    ],
)
def test_small_commands(told, words, message):
    assert told(words) == [f"lightppo {words.split()[0]}: error: {message}"]
