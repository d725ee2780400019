"""The command line: flags, YAML beneath them, and what is refused with exit code 2."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightppo.config import PPOConfig, parse_args
from lightppo.config.cli import parse_section
from lightppo.option import Section, option

ROOT = Path(__file__).parents[2]
REQUIRED_FLAGS = ("pretrain", "prompt_data")


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
    flat = parse(
        [
            "--input_template=-- {}",
            "--system_prompt",
            "- x",
            "--use_wandb",
            "--wandb_run_name",
            "1e5",
        ]
    ).flat()
    assert (flat["input_template"], flat["system_prompt"], flat["wandb_run_name"]) == (
        "-- {}",
        "- x",
        "1e5",
    )


@pytest.mark.parametrize(
    "flags", ["--gamma 0.5 --gamma 0.9", "--gamma=0.9", "--gamma 0.5 --bf16 --gamma=0.9"]
)
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
    assert parse(flags).resolved().algorithm.adv_norm is expected


def test_none_for_lists(parse):
    assert parse("").reward.reward_clip_range == (-10.0, 10.0)
    assert parse("--reward_clip_range None").reward.reward_clip_range is None
    assert parse("--reward_clip_range=None").reward.reward_clip_range is None
    assert parse("--stop None").rollout.stop == ("None",)  # a list of texts, which cannot be None


def test_the_launcher_puts_local_rank_first():
    flags = ["--local_rank=1", "--pretrain", "m", "--prompt_data", "d", "--reward_fn", "r.py"]
    assert parse_args(flags).strategy.local_rank == 1


def test_arguments_of_the_process(monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["x.py", "--pretrain=m", "--prompt_data=d", "--reward_fn=r.py", "--seed", "7"]
    )
    assert parse_args().strategy.seed == 7


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        ("--train_batch_sise 3", ["--train_batch_sise", "--train_batch_size"]),
        ("--advantage_estimatr gae", ["--advantage_estimatr", "--advantage_estimator"]),
        ("--model.pretrain x", ["--model.pretrain"]),
        ("stray", ["stray"]),
        ("--gamma abc", ["--gamma", "abc"]),
        ("--gamma", ["--gamma", "expected one argument"]),
        ("--num_episodes 1.5", ["--num_episodes", "1.5"]),
        ("--adam_betas 0.9", ["--adam_betas", "2 numbers"]),
        ("--zero_stage 4", ["--zero_stage", "'4'"]),
        ("--advantage_estimator ppo", ["--advantage_estimator", "group_norm"]),
        ("--bf16 True", ["True"]),
        ("--adv_norm yes", ["--adv_norm", "'yes'"]),
        ("--gamma 2", ["train_ppo.py: error: --gamma must be a number ≥0 ≤1, not '2'\n"]),
        ("--gamma nan", ["train_ppo.py: error: --gamma", "'nan'"]),
        ("--train_batch_size 0", ["train_ppo.py: error: --train_batch_size", "≥1"]),
        ("--zero_stage None", ["--zero_stage", "None"]),
        ("--adam_betas None", ["--adam_betas", "2 numbers"]),
        ("--reward_clip_range None None", ["--reward_clip_range", "2 numbers or None"]),
    ],
)
def test_refused_flags(refusal, flags, fragments):
    printed = refusal(flags)
    assert all(fragment in printed for fragment in fragments), printed


def test_every_problem_has_its_line(refusal):
    lines = refusal("--gama 1 --gamma 2 --top_p 3 stray").splitlines()
    named = [
        re.search(r"--\w+|'stray'", line.removeprefix("train_ppo.py: error: "))[0] for line in lines
    ]
    assert sorted(named) == ["'stray'", "--gama", "--gamma", "--top_p"]
    assert "'stray'" in refusal("--gamma 1 stray")


def test_what_every_run_needs(capsys):
    with pytest.raises(SystemExit):
        parse_args([], prog="run.py")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:3] for line in lines[:2]] == [
        ["run.py:", "error:", f"--{name}"] for name in REQUIRED_FLAGS
    ]
    assert all(
        flag in lines[2]
        for flag in ("--reward_fn", "--remote_rm_url", "--reward_pretrain", "--reward_source")
    )


KEY = "0123456789abcdef"


@pytest.mark.parametrize(
    "flags", [f"--use_wandb {KEY}", f"--use_wandb={KEY}", f"--use-wandb {KEY} --gamma 1"]
)
def test_a_wandb_key_goes_where_wandb_looks_and_nowhere_else(parse, monkeypatch, capsys, flags):
    monkeypatch.setenv("WANDB_API_KEY", "another")
    monkeypatch.setattr("sys.argv", ["train_ppo.py", *flags.split()])
    config = parse(flags)
    assert config.logging.use_wandb is True
    assert os.environ["WANDB_API_KEY"] == KEY
    assert KEY not in " ".join([*sys.argv, *capsys.readouterr(), str(config.flat())])


def test_a_bare_use_wandb_leaves_the_key_alone(parse, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "mine")
    for flags in ("--use_wandb", "--use_wandb --gamma 1", "--use_wandb True --no_use_wandb"):
        with contextlib.suppress(SystemExit):
            parse(flags)
        assert os.environ["WANDB_API_KEY"] == "mine"


def test_a_wandb_key_is_not_echoed_by_mistakes(refusal, yaml_file, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")
    path = yaml_file(f"use_wandb: {KEY}k\n")
    for flags in (
        f"--use_wandb {KEY} --gama 1",
        f"--wandb_key {KEY}",
        f"--wandb.key={KEY}",
        f"wandb.key={KEY}",
    ):
        assert KEY not in refusal(flags)
    printed = refusal(["--config", path])
    assert "--use_wandb must be true or false" in printed
    assert KEY not in printed


@pytest.mark.skipif(sys.platform != "linux", reason="process lists of Linux")
def test_a_wandb_key_is_not_in_the_list_of_processes():
    required = [f"--{name}=x.py" for name in ("pretrain", "prompt_data", "reward_fn")]
    code = (
        f"import sys; from lightppo.config import parse_args; parse_args(sys.argv[1:] + {required})"
    )
    code += "; print(open('/proc/self/cmdline').read())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--use_wandb", KEY], capture_output=True, text=True, timeout=60
    )
    assert "--use_wandb" in done.stdout
    assert KEY not in done.stdout + done.stderr


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
    assert re.search(r"--rollout_batch_size 129 .*2 ranks", printed)
    assert re.search(r"--train_batch_size 43 .*2 ranks", printed)


def test_config_file_under_flags(parse, yaml_file):
    path = yaml_file(
        "gamma: 0.5\nlambd: 0.5\nactor_learning_rate: 1e-5\nbf16: true\nstop: [a, b]\nvalue_clip: null\n"
    )
    config = parse(["--lambd", "0.9", "--config", path])
    flat = config.flat()
    assert (flat["gamma"], flat["lambd"]) == (0.5, 0.9)
    assert flat["actor_learning_rate"] == 1e-5  # which YAML reads as text
    assert (flat["bf16"], flat["stop"], flat["value_clip"]) == (True, ("a", "b"), None)
    assert flat["config"] == path
    # a flag also takes back what the file sets
    flat = parse([f"--config={path}", "--no_bf16", "--stop", "--value_clip", "0.1"]).flat()
    assert (flat["bf16"], flat["stop"], flat["value_clip"]) == (False, (), 0.1)


def test_two_files_are_an_error(parse, refusal, tmp_path):
    (tmp_path / "a.yaml").write_text("gamma: 0.5\nlambd: 0.5")
    (tmp_path / "b.yaml").write_text("gamma: 0.6")
    told = refusal(f"--config {tmp_path / 'a.yaml'} --config={tmp_path / 'b.yaml'}")
    assert "--config is given twice, " in told
    assert "whose key `config` may name the other one" in told
    assert parse(f"--config {tmp_path / 'a.yaml'} --config None").algorithm.gamma == 1.0


def test_a_file_over_another(parse, refusal, tmp_path):
    (tmp_path / "base.yaml").write_text("gamma: 0.5\nlambd: 0.5\ntop_p: 0.9")
    (tmp_path / "middle.yaml").write_text("config: base.yaml\nlambd: 0.6\ntop_k: 3")
    (tmp_path / "top.yaml").write_text("config: middle.yaml\ntop_k: 4")
    flat = parse(f"--config {tmp_path / 'top.yaml'} --gamma 0.9").flat()
    assert [flat[name] for name in ("gamma", "lambd", "top_p", "top_k")] == [0.9, 0.6, 0.9, 4]
    assert flat["config"] == str(tmp_path / "top.yaml")
    (tmp_path / "base.yaml").write_text("config: middle.yaml")
    assert "'config' leads back to this file" in refusal(f"--config {tmp_path / 'top.yaml'}")
    (tmp_path / "base.yaml").unlink()
    assert "base.yaml: cannot be read" in refusal(f"--config {tmp_path / 'top.yaml'}")


def test_empty_config_file(parse, yaml_file):
    assert parse(["--config", yaml_file("# nothing yet\n")]).algorithm == parse().algorithm


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gama: 1\n", ["'gama'", "'gamma'"]),
        ("train-batch-size: 8\n", ["'train-batch-size'", "'train_batch_size'"]),
        ("5: 8\n", ["'5'"]),
        ("algorithm:\n  gamma: 1\n", ["'algorithm'", "top level"]),
        ("gamma:\n  a: 1\n", ["--gamma", "{'a': 1}"]),
        ("gamma: 2\n", ["--gamma", "≤1", "2"]),
        ("gamma: high\n", ["--gamma", "'high'"]),
        ("bf16: 1\n", ["--bf16", "true or false"]),
        ("zero_stage: 5\n", ["--zero_stage", "0, 1, 2, 3", "5"]),
        ("max_norm: null\n", ["--max_norm", "≥0", "None"]),
        ("gamma: 1\ngamma: 0.9\n", ["'gamma'", "twice"]),
        ("- gamma\n", ["mapping", "list"]),
        ("gamma: [1\n", ["YAML", "flow sequence"]),
    ],
)
def test_refused_config_files(refusal, yaml_file, text, words):
    path = yaml_file(text)
    printed = refusal(["--config", path])
    assert printed.startswith(f"train_ppo.py: error: --config {path}: ")
    assert all(word in printed for word in words), printed
    assert printed.count("\n") == 1


def test_all_mistakes_of_a_file_are_told(refusal, yaml_file):
    path = yaml_file("gama: 1\nbf16: 1\n")
    assert refusal(["--config", path]).count(f"train_ppo.py: error: --config {path}: ") == 2


def test_config_files_that_cannot_be_read(refusal, tmp_path):
    assert "--config /nowhere.yaml: cannot be read (No such file" in refusal(
        "--config /nowhere.yaml"
    )
    assert "cannot be read (Is a directory)" in refusal(["--config", str(tmp_path)])
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\x00\x80")
    assert "is not YAML" in refusal(["--config", str(tmp_path / "weights.bin")])
    assert "--config" in refusal("--config")


def test_mistakes_are_told_before_anything_heavy_is_loaded():
    """Also through the example script: exit code 2 with the standard library, pydantic and yaml."""
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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    codes, modules = json.loads(done.stdout.splitlines()[-1])
    assert codes == [2] * len(runs)
    heavy = {
        "torch",
        "numpy",
        "transformers",
        "deepspeed",
        "datasets",
        "accelerate",
        "vllm",
        "wandb",
        "matplotlib",
    }
    assert not heavy & {name.split(".")[0] for name in modules}
    assert "lightppo.config.cli" in modules


def test_round_trip_of_a_parsed_config(parse):
    assert PPOConfig.from_flat(parse("--gamma 0.5 --bf16").flat()) == parse("--gamma 0.5 --bf16")


class PaperConfig(Section):
    """Paper."""

    size: str | None = option(None, "Format.", required=True)
    sheets: int = option(1, "Number.", ge=1)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--size A4 --sheets 2", 2),
        ("--sheets 2", ["--size is required"]),
        ("--size A4 --sheets 0", ["--sheets"]),
        ("--size A4 --sheats 2", ["--sheats", "--sheets"]),
        ("--size A4 --sheets 9", ["too many for 1"]),
    ],
)
def test_a_script_with_one_section(flags, expected, capsys):
    check = lambda paper, ranks: [f"too many for {ranks}"] if paper.sheets > 8 else []  # noqa: E731
    run = lambda: parse_section(PaperConfig, check, flags.split(), "print.py")  # noqa: E731
    if isinstance(expected, int):
        assert run().sheets == expected
        return
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in ("print.py: error: ", *expected))
