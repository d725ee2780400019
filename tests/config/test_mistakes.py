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
        return [
            line
            for line in lines
            if " error: " in line and not re.search("--[a-z_]+ is required", line)
        ]

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
        (
            "ppo --max_length 9",
            "--max_length (did you mean '--prompt_max_len' or '--generate_max_len'?)",
        ),
        ("sft --max_length 9", "--max_length: here --max_len (1024 there, 2048 here) (TRL)"),
        ("ppo --algo grpo", "--algo (did you mean '--advantage_estimator'?)"),
        ("dpo --algo ipo", "--algo (did you mean '--preference_loss'?)"),
        (
            "ppo --device cuda",
            "--device: a GPU is used where there is one; CUDA_VISIBLE_DEVICES chooses it",
        ),
        ("ppo --vllm", "--vllm (did you mean '--rollout_engine vllm'?)"),
        ("sft --prompt_data x", "--prompt_data (did you mean '--dataset'?)"),
        ("ppo --dataset x", "--dataset (did you mean '--prompt_data'?)"),
        # not TRL's name of what PPO has
        ("sft --dataset_name x", "--dataset_name: here --dataset (TRL)"),
        ("sft --num_train_epochs 3", "--num_train_epochs: here --num_epochs (3 there, 1 here)"),
        ("sft --num_iterations 2", "--num_iterations: here --max_epochs of lightppo ppo (TRL)"),
        ("rm --model.loss_type x", "--model.loss_type: not here: the loss of pairs is the Bradley"),
        ("dpo --loss_type ipo", "--loss_type: here --preference_loss: dpo for sigmoid, ipo (TRL)"),
        (
            "sft --reward_fn f.py",
            "--reward_fn: it is an option of lightppo ppo, not of this command",
        ),
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


def test_nested_files_of_other_trainers_are_read_key_by_key(told, tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text("actor: {model_name_or_path: m, adam: {lr: 1e-6}}\ndata: {max_len: 9}\n")
    start = f"lightppo ppo: error: --config {path}: "
    assert told(["ppo", "--config", str(path)]) == [
        f"{start}unknown option 'actor.model_name_or_path': here --pretrain (OpenRLHF)",
        f"{start}unknown option 'actor.adam.lr': here --actor_learning_rate (OpenRLHF)",
        f"{start}unknown option 'data.max_len': here --prompt_max_len and --generate_max_len (OpenRLHF)",
        f"{start}nested keys are of another trainer: lightppo translate {path} says what they are here",
    ]
    path.write_text("".join(f"data: {{x{i}: 1}}\n".replace("data", f"data{i}") for i in range(40)))
    assert told(["ppo", "--config", str(path)])[-2:] == [
        f"{start}32 more lines like these",
        f"{start}nested keys are of another trainer: lightppo translate {path} says what they are here",
    ]


def test_nested_sections_of_ours_are_told(told, tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text("pretrain: m\ndata: {prompt_data: x}\n")
    message = "sections are not nested: write the options of 'data' at the top level"
    assert told(["ppo", "--config", str(path)]) == [
        f"lightppo ppo: error: --config {path}: {message}"
    ]


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
        (
            "ppo --bf16 true",
            "--bf16 true: a switch takes no value: write --bf16 for on, --no_bf16 for off",
        ),
        (
            "ppo --bf16=False",
            "--bf16 False: a switch takes no value: write --bf16 for on, --no_bf16 for off",
        ),
        (
            "sft --no-bf16 x",
            "--no_bf16 x: a switch takes no value: write --bf16 for on, --no_bf16 for off",
        ),
        ("ppo -seed 3", "unexpected argument '-seed': write --seed, with two dashes"),
        ("ppo -seed=3", "unexpected argument '-seed': write --seed, with two dashes"),
        (
            "ppo -train-batch-size 3",
            "unexpected argument '-train-batch-size': write --train_batch_size, with two dashes",
        ),
        ("ppo -lr 3", "unexpected argument '-lr': here --actor_learning_rate (slime)"),
        (
            "ppo --prompt_data a.jsonl b.jsonl",
            "unexpected argument 'b.jsonl': separate several with commas: --prompt_data a.jsonl,b.jsonl",
        ),
        (
            "sft --dataset=a.jsonl b.jsonl",
            "unexpected argument 'b.jsonl': separate several with commas: --dataset a.jsonl,b.jsonl",
        ),
        (
            "eval runs/a",
            "unexpected argument 'runs/a': a path needs its flag, such as --pretrain runs/a",
        ),
    ],
)
def test_how_a_flag_is_written(told, words, message):
    assert told(words) == [f"lightppo {words.split()[0]}: error: {message}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "chat --pretrain m",
            "unknown flag --pretrain: MODEL is given without a flag: lightppo chat MODEL",
        ),
        (
            "merge --output o --adapter a",
            "unknown flag --output: OUT is given without a flag: lightppo merge ADAPTER OUT",
        ),
        ("convert c o --steps 3", "unknown flag --steps (did you mean '--step'?)"),
        ("report run --output p", "unknown flag --output (did you mean '--out'?)"),
        (
            "watch --save_path run",
            "unknown flag --save_path: RUN is given without a flag: lightppo watch RUN",
        ),
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


REQUIRED = ["--pretrain", "m", "--prompt_data", "p.jsonl", "--reward_fn", "r.py"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "ppo --lr_warmup_ratio 0.1 --lr_warmup_steps 10",
            "--lr_warmup_ratio and --lr_warmup_steps both say how long",
        ),
        (
            "ppo --seed 99999999999999999999",
            "--seed must be a whole number ≥0 <2^63, not '99999999999999999999'",
        ),
        ("ppo --seed -1", "--seed must be a whole number ≥0 <2^63, not '-1'"),
        ("ppo --chat_template_kwargs x", "--chat_template_kwargs is not JSON: Expecting value"),
        (
            "eval --eval_data e --chat_template_kwargs [1]",
            "--chat_template_kwargs must be a JSON object",
        ),
        (
            'ppo --chat_template_kwargs {"tokenize":false}',
            "--chat_template_kwargs has 'tokenize', which is no variable of a chat template",
        ),
        (
            "eval --eval_data e --temperature 0.5",
            "--temperature has no effect on an evaluation: set --eval_temperature",
        ),
        (
            "eval --eval_data e --top_p 0.5",
            "--top_p has no effect on an evaluation: set --eval_top_p",
        ),
        (
            "eval --eval_data e --n_samples_per_prompt 4",
            "--n_samples_per_prompt has no effect on an evaluation: set",
        ),
        (
            "eval --eval_data e --no_do_sample",
            "--no_do_sample has no effect on an evaluation: set --eval_temperature 0",
        ),
        (
            "ppo --val_only --eval_data e --temperature 0.5",
            "--temperature has no effect on an evaluation",
        ),
        ("eval", "--eval_data is required: the prompts whose answers an evaluation scores"),
    ],
)
def test_what_was_taken_in_silence(capsys, words, message):
    command, *more = words.split()
    with pytest.raises(SystemExit) as stopped:
        main([command, *REQUIRED, *more])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightppo {command}: error: {message}")


@pytest.mark.parametrize(
    "words",
    ["--temperature 1.0", "--top_p 1", "--top_k -1", "--n_samples_per_prompt 1", "--do_sample"],
)
def test_a_default_is_never_an_error(capsys, words):
    """An evaluation says that it has no effect."""
    from lightppo.config import parse_args

    assert parse_args([*REQUIRED, "--val_only", "--eval_data", "e", *words.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"note: {words.split()[0]} has no effect on an evaluation: set --eval_" in line


def test_the_file_of_a_run_may_say_how_its_training_samples(tmp_path, capsys):
    """``lightppo eval --config`` of a training."""
    from lightppo.config import parse_args

    (tmp_path / "run.yaml").write_text(
        "temperature: 0.7\nn_samples_per_prompt: 4\ntrain_batch_size: 128\n"
    )
    words = [*REQUIRED, "--config", str(tmp_path / "run.yaml"), "--val_only", "--eval_data", "e"]
    assert parse_args(words).rollout.temperature == 0.7


def test_greedy_rollouts_are_told():
    from lightppo.config import PPOConfig
    from lightppo.preflight.advice import advice

    def told(**options):
        return " ".join(advice(PPOConfig.from_flat(pretrain="m", **options).resolved()))

    assert "--temperature 0: rollouts are the most likely answers alone" in told(temperature=0.0)
    assert "--no_do_sample: rollouts are the most likely answers alone" in told(do_sample=False)
    assert "most likely" not in told() + told(temperature=0.0, val_only=True, eval_data="e")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "report RUN --out x.pdf",
            "--out x.pdf: it is a page of HTML: give a name that ends in .html",
        ),
        (
            "report RUN --picture x.jpg",
            "--picture x.jpg: it is a PNG picture: give a name that ends in .png",
        ),
        (
            "watch MODEL --once",
            "MODEL is no run: it has no metrics.jsonl and no run_config.yaml; give a --save_path",
        ),
        (
            "watch modle --once",
            "modle: no such folder; there is MODEL; give the --save_path of a run",
        ),
        (
            "replay EVALUATION --step 1",
            "EVALUATION is an evaluation (lightppo eval): it has no training step to replay",
        ),
        ("memory --nodes 0", "--nodes 0: must be at least 1"),
        ("memory --gpus -1", "--gpus -1: must be at least 0"),
        ("convert nothing OUT", "nothing: no such folder. Name the --save_path of a run"),
        (
            "convert EMPTY OUT",
            "EMPTY holds no checkpoint of the actor: name the --save_path or --ckpt_path of a run that",
        ),
        (
            "convert MODEL OUT",
            "MODEL is a Hugging Face folder already: there is nothing to convert",
        ),
        ("convert RUN LONG/x", "OUT LONG/x: "),
        ("merge lora OUT", "lora: no such folder. Name the folder of an adapter"),
        ("merge EMPTY OUT", "EMPTY has no adapter_config.json: it is no folder of an adapter"),
        ("merge RUN OUT", "RUN has no adapter_config.json: name RUN/adapter"),
        ("merge RUN/adapter LONG/x", "OUT LONG/x: "),
        (
            "merge RUN/adapter OUT --base org/no",
            "--base org/no: no such folder here, not in the hub's cache, and ",
        ),
        ("chat org/no", "MODEL org/no: no such folder here, not in the hub's cache, and "),
        (
            "chat MODEL --base org/no",
            "--base org/no: no such folder here, not in the hub's cache, and ",
        ),
        ("chat MODEL --seed 99999999999999999999", "--seed must be a whole number ≥0 <2^63"),
        (
            "serve-vllm --model org/no",
            "--model org/no: no such folder here, not in the hub's cache, and ",
        ),
        ("serve-vllm --model MODEL --host 0.0.0.0", "--host 0.0.0.0 "),
        (
            "data --pretrain MODEL --prompt_data org/no",
            "--prompt_data org/no: no such file or folder here, not in the",
        ),
    ],
)
def test_folders_and_names_of_small_commands(told, tmp_path, monkeypatch, words, message):
    pytest.importorskip("plotext")
    monkeypatch.chdir(tmp_path)
    for name in ("RUN/adapter", "MODEL", "EVALUATION", "EMPTY"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "MODEL" / "config.json").write_text("{}")
    (tmp_path / "RUN" / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "RUN" / "metrics.jsonl").write_text(
        '{"step": 1, "time": 0.0, "rollout/reward": 0.5}\n'
    )
    (tmp_path / "EVALUATION" / "run_config.yaml").write_text("val_only: true\n")
    long = "x" * 300  # no file system takes it
    (line,) = told(words.replace("LONG", long).split())
    assert line.startswith(f"lightppo {words.split()[0]}: error: {message.replace('LONG', long)}")


def test_the_folder_of_a_run_needs_flags(told, tmp_path):
    (tmp_path / "run_config.yaml").write_text("")
    assert told(f"eval {tmp_path}") == [
        f"lightppo eval: error: unexpected argument '{tmp_path}': of a run, --config {tmp_path}/run_config.yaml names "
        f"the options and --pretrain {tmp_path} the model"
    ]


def test_the_report_of_an_evaluation_has_its_numbers():
    from lightppo.logging.report_page import before_and_after

    (line,) = before_and_after([{"step": 0, "time": 0.0, "eval/reward": 0.25}]).splitlines()
    assert line.split() == ["eval/reward", "0.25"]
    assert before_and_after([{"step": 0, "time": 0.0}]) == "no numbers were recorded"
