"""The command line: flags, YAML beneath them, and what is refused with exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightppo.config import parse_args
from lightppo.config.fields import range_text
from lightppo.config.ppo import PPOConfig, all_options

ROOT = Path(__file__).parents[2]


def test_flags_of_every_kind(parse):
    flat = parse(
        "--gamma .9 --top_k=7 --bf16 --no_do_sample --adam_betas 0.8 0.99 --reward_clip_range -5 1e1 "
        "--stop a b --stop_token_ids 3 4 --zero_stage 3 --lr_scheduler linear --save_epochs 5 --value_clip None"
    ).flat()
    expected = {
        "gamma": 0.9,
        "top_k": 7,
        "bf16": True,
        "do_sample": False,
        "adam_betas": (0.8, 0.99),
        "reward_clip_range": (-5.0, 10.0),
        "stop": ("a", "b"),
        "stop_token_ids": (3, 4),
        "zero_stage": 3,
        "lr_scheduler": "linear",
        "save_epochs": 5,
        "value_clip": None,
    }
    assert {name: flat[name] for name in expected} == expected


def test_text_that_looks_like_something_else(parse):
    flat = parse(["--input_template=-- {}", "--system_prompt", "- x", "--wandb_run_name", "1e5"]).flat()
    assert (flat["input_template"], flat["system_prompt"], flat["wandb_run_name"]) == ("-- {}", "- x", "1e5")


@pytest.mark.parametrize("flags", ["--gamma 0.5 --gamma 0.9", "--gamma=0.9", "--gamma 0.5 --bf16 --gamma=0.9"])
def test_the_last_flag_wins(parse, flags):
    assert parse(flags).algorithm.gamma == 0.9


def test_a_repeated_list_replaces_and_no_value_empties_it(parse):
    assert parse("--stop a b --stop c").rollout.stop == ("c",)
    assert parse("--stop a --stop").rollout.stop == ()
    assert parse("--bf16 --no_bf16").model.bf16 is False


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", True),  # gae is whitened
        ("--adv_norm", True),
        ("--no_adv_norm", False),
        ("--no-adv-norm", False),
        ("--adv_norm False", False),
        ("--adv_norm=False", False),
        ("--no_adv_norm --adv_norm None", True),
        ("--no_adv_norm --adv_norm --gamma 1", True),
    ],
)
def test_switches_that_may_be_none(parse, flags, expected):
    assert parse(flags).algorithm.adv_norm is expected


def test_the_launcher_puts_local_rank_first():
    flags = ["--local_rank=1", "--pretrain", "m", "--prompt_data", "d", "--reward_fn", "r.py"]
    assert parse_args(flags).strategy.local_rank == 1


def test_arguments_of_the_process(monkeypatch):
    monkeypatch.setattr("sys.argv", ["x.py", "--pretrain=m", "--prompt_data=d", "--reward_fn=r.py", "--seed", "7"])
    assert parse_args().strategy.seed == 7


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        ("--train_batch_sise 3", ["--train_batch_sise", "--train_batch_size"]),
        ("--advantage_estimatr gae", ["--advantage_estimatr", "--advantage_estimator"]),
        ("--model.pretrain x", ["--model.pretrain"]),
        ("stray", ["stray"]),
        ("--gamma abc", ["--gamma", "abc"]),
        ("--gamma", ["--gamma", "Missing"]),
        ("--num_episodes 1.5", ["--num_episodes", "1.5"]),
        ("--adam_betas 0.9", ["--adam_betas", "Expected 2"]),
        ("--zero_stage 4", ["--zero_stage", "'4'"]),
        ("--advantage_estimator ppo", ["--advantage_estimator", "group_norm"]),
        ("--bf16 True", ["True"]),
        ("--gamma 2", ["train_ppo.py: error: --gamma 2.0 is out of range: it must be ≥0 ≤1\n"]),
        ("--gamma nan", ["train_ppo.py: error: --gamma must be a number, not nan\n"]),
        ("--train_batch_size 0", ["train_ppo.py: error: --train_batch_size 0 is out of range: it must be ≥1\n"]),
    ],
)
def test_refused_flags(refusal, flags, fragments):
    printed = refusal(flags)
    assert all(fragment in printed for fragment in fragments), printed


def test_every_problem_has_its_line(capsys):
    with pytest.raises(SystemExit):
        parse_args([], prog="run.py")
    assert capsys.readouterr().err.splitlines() == [
        "run.py: error: --pretrain is required: the path or hub name of the causal LM to train",
        "run.py: error: --prompt_data is required: a file, folder or hub name with prompts",
        "run.py: error: no reward: set --reward_fn path.py, --remote_rm_url URL, --reward_pretrain MODEL or a built-in "
        "--reward_source (math, format, code)",
    ]


@pytest.mark.parametrize("flags", ["--gama 1", "--gamma 2", "--help", "--config /nowhere.yaml"])
def test_only_rank_0_speaks(parse, capsys, monkeypatch, flags):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stopped:
        parse(flags)
    assert stopped.value.code == (0 if flags == "--help" else 2)
    assert capsys.readouterr() == ("", "")


def test_the_number_of_ranks_comes_from_the_launcher(parse, refusal, monkeypatch):
    parse("--rollout_batch_size 129 --train_batch_size 43")
    monkeypatch.setenv("WORLD_SIZE", "2")
    printed = refusal("--rollout_batch_size 129 --train_batch_size 43")
    assert "--rollout_batch_size 129 is not divisible by the 2 ranks" in printed
    assert "--train_batch_size 43 is not divisible by the 2 ranks" in printed


def test_help_shows_unit_range_and_default_of_every_flag(parse, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    assert stopped.value.code == 0
    # boxes and line breaks of the terminal away
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for _, f in all_options():
        meta = f.metadata
        notes = [note for note in (meta["unit"], range_text(meta["bounds"])) if note]
        shown = " ".join(map(str, f.default)) if isinstance(f.default, tuple) else f.default
        values = f", --no_{f.name}" if isinstance(f.default, bool) else r"( \S+){1,4}?"
        words = [meta["help"], *([f"[{'; '.join(notes)}]"] if notes else []), f"(default: {shown})"]
        assert re.search(f"--{f.name}{values} {re.escape(' '.join(words))}", text), f.name


def test_config_file_under_flags(parse, yaml_file):
    path = yaml_file("gamma: 0.5\nlambd: 0.5\nactor_learning_rate: 1e-5\nbf16: true\nstop: [a, b]\nvalue_clip: null\n")
    config = parse(["--lambd", "0.9", "--config", path])
    flat = config.flat()
    assert (flat["gamma"], flat["lambd"]) == (0.5, 0.9)
    assert flat["actor_learning_rate"] == 1e-5  # which YAML reads as text
    assert (flat["bf16"], flat["stop"], flat["value_clip"]) == (True, ("a", "b"), None)
    assert flat["config"] == path
    # a flag also takes back what the file sets
    flat = parse([f"--config={path}", "--no_bf16", "--stop", "--value_clip", "0.1"]).flat()
    assert (flat["bf16"], flat["stop"], flat["value_clip"]) == (False, (), 0.1)


def test_of_two_files_the_last_wins(parse, tmp_path):
    (tmp_path / "a.yaml").write_text("gamma: 0.5\nlambd: 0.5")
    (tmp_path / "b.yaml").write_text("gamma: 0.6")
    config = parse(f"--config {tmp_path / 'a.yaml'} --config={tmp_path / 'b.yaml'}")
    assert (config.algorithm.gamma, config.algorithm.lambd) == (0.6, 0.95)
    assert parse(f"--config {tmp_path / 'a.yaml'} --config None").algorithm.gamma == 1.0


def test_empty_config_file(parse, yaml_file):
    assert parse(["--config", yaml_file("# nothing yet\n")]).algorithm == parse().algorithm


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama: 1\n", "unknown option 'gama' (did you mean 'gamma'?)"),
        ("train-batch-size: 8\n", "unknown option 'train-batch-size' (did you mean 'train_batch_size'?)"),
        ("5: 8\n", "unknown option '5'"),
        ("algorithm:\n  gamma: 1\n", "sections are not nested: write the options of 'algorithm' at the top level"),
        ("gamma:\n  a: 1\n", "--gamma must be a number, not {'a': 1}"),
        ("gamma: 2\n", "--gamma 2.0 is out of range: it must be ≥0 ≤1"),
        ("gamma: high\n", "--gamma must be a number, not 'high'"),
        ("bf16: 1\n", "--bf16 must be true or false, not 1"),
        ("zero_stage: 5\n", "--zero_stage must be one of 0, 1, 2, 3, not 5"),
        ("max_norm: null\n", "--max_norm must be a number, not None"),
        ("gamma: 1\ngamma: 0.9\n", "is not YAML: option 'gamma' is given twice"),
        ("config: other.yaml\n", "the file names another with 'config': give one file only"),
        ("- gamma\n", "must be a mapping of option to value, not a list"),
        ("gamma: [1\n", "is not YAML: while parsing a flow sequence"),
    ],
)
def test_refused_config_files(refusal, yaml_file, text, message):
    path = yaml_file(text)
    printed = refusal(["--config", path])
    assert printed.startswith(f"train_ppo.py: error: --config {path}: {message}")
    assert printed.count("\n") == 1


def test_all_mistakes_of_a_file_are_told(refusal, yaml_file):
    path = yaml_file("gama: 1\nbf16: 1\n")
    assert refusal(["--config", path]).count(f"train_ppo.py: error: --config {path}: ") == 2


def test_config_files_that_cannot_be_read(refusal, tmp_path):
    assert "--config /nowhere.yaml: cannot be read (No such file" in refusal("--config /nowhere.yaml")
    assert "cannot be read (Is a directory)" in refusal(["--config", str(tmp_path)])
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\x00\x80")
    assert "is not YAML" in refusal(["--config", str(tmp_path / "weights.bin")])
    assert "--config" in refusal("--config")


def test_mistakes_are_told_before_anything_heavy_is_loaded():
    """Also through the example script: exit code 2 with the standard library, tyro and yaml."""
    runs = [["--gama", "1"], ["--gamma", "2"], ["--pretrain", "m"], ["--config", "/nowhere.yaml"]]
    code = f"""
import json, runpy, sys
codes = []
for flags in {runs!r}:
    sys.argv = ["train_ppo.py", *flags]
    try:
        runpy.run_path({str(ROOT / "examples" / "train_ppo.py")!r}, run_name="__main__")
    except SystemExit as stopped:
        codes.append(stopped.code)
print(json.dumps([codes, sorted(sys.modules)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    codes, modules = json.loads(done.stdout.splitlines()[-1])
    assert codes == [2] * len(runs)
    heavy = {"torch", "numpy", "transformers", "deepspeed", "datasets", "accelerate", "vllm", "wandb", "matplotlib"}
    assert not heavy & {name.split(".")[0] for name in modules}
    assert "lightppo.config.cli" in modules


def test_round_trip_of_a_parsed_config(parse):
    assert PPOConfig.from_flat(parse("--gamma 0.5 --bf16").flat()) == parse("--gamma 0.5 --bf16")
