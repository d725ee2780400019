"""Command lines, scripts and YAML files of other trainers: which program, which options, how many ranks."""

from __future__ import annotations

import pytest

from lightppo.cli.other_commands import PROGRAMS, commands_of, read
from lightppo.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "program", "values"),
    [
        (
            "trl grpo --beta 0.04 --bf16 --report_to wandb trackio",
            "trl-grpo",
            {"beta": "0.04", "bf16": True, "report_to": ["wandb", "trackio"]},
        ),
        ("python trl/scripts/dpo.py --beta=0.1", "trl-dpo", {"beta": "0.1"}),
        ("python train.py --scale_rewards none", "trl-grpo", {"scale_rewards": "none"}),
        (
            "python3 -m verl.trainer.main_ppo data.shuffle=False +trainer.logger='[\"console\"]'",
            "verl",
            {"data.shuffle": "False", "trainer.logger": '["console"]'},
        ),
        (
            "ray job submit --working-dir . -- python3 -m openrlhf.cli.train_ppo_ray --actor.adam.lr 1e-6",
            "openrlhf",
            {"actor.adam.lr": "1e-6"},
        ),
        ("deepspeed --module openrlhf.cli.train_rm --bf16", "openrlhf-rm", {"bf16": True}),
        ("python3 train.py --hf-checkpoint m --use-tis", "slime", {"hf_checkpoint": "m", "use_tis": True}),
        ("torchrun train_colocate.py --l2 1.0e-2 > log.txt 2>&1", "lightrft", {"l2": "1.0e-2"}),
        ("python gsm8k_rl.py actor.path=m gconfig.n_samples=4", "areal", {"actor.path": "m", "gconfig.n_samples": "4"}),
    ],
)  # fmt: skip
def test_a_command_line(text, program, values):
    theirs = read(text)
    assert (theirs.program, theirs.values, theirs.notes) == (program, values, [])


@pytest.mark.parametrize(
    ("launcher", "ranks", "nodes"),
    [
        ("accelerate launch --num_processes 4 x/grpo.py", 4, 1),
        ("accelerate launch --num_processes=16 --num_machines 2 x/grpo.py", 16, 2),
        ("torchrun --nproc-per-node 8 --nnodes 2 x/grpo.py", 16, 2),
        ("torchrun --nproc_per_node=2 x/grpo.py", 2, 1),
        ("deepspeed --num_gpus 3 x/grpo.py", 3, 1),
        ("python x/grpo.py", 1, 1),
    ],
)
def test_ranks_of_the_launcher(launcher, ranks, nodes):
    theirs = read(f"{launcher} --num_generations 4")
    assert (theirs.ranks, theirs.nodes, theirs.values) == (ranks, nodes, {"num_generations": "4"})


SCRIPT = r"""#!/bin/bash
# the model
MODEL="org/a model"   # in quotes
export N=${N:-5}
OUT=runs/$(date +"%m %d")
BATCH_ARGS=(
   --num_generations $N
   # --beta 1
   --per_device_train_batch_size 2  # of a rank
)
mkdir -p $OUT && nvidia-smi | grep x
WANDB_MODE=offline accelerate launch --num_processes 2 grpo.py \
    --model_name_or_path "$MODEL" \
    ${BATCH_ARGS[@]} \
    --output_dir "$OUT" \
    --dataset_name $DATA "$@" 2>&1 | tee log
"""


def test_a_script_with_variables_and_arrays(tmp_path):
    (tmp_path / "run.sh").write_text(SCRIPT)
    theirs = read(str(tmp_path / "run.sh"))
    assert (theirs.program, theirs.ranks, theirs.notes) == ("trl-grpo", 2, [])
    assert theirs.values == {
        "model_name_or_path": "org/a model",
        "num_generations": "5",
        "per_device_train_batch_size": "2",
        "output_dir": 'runs/$(date +"%m %d")',
        "dataset_name": "$DATA",  # nobody says what it is
    }
    assert [words[0] for words in commands_of(SCRIPT)] == ["mkdir", "nvidia-smi", "grep", "accelerate", "tee"]  # fmt: skip


def test_a_yaml_file_with_references(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "actor: {path: m, optimizer: {lr: 1e-6}}\nref: {path: '${actor.path}'}\ngconfig: {n_samples: 4}\n"
    )
    theirs = read(str(path))
    assert theirs.program == "areal"
    assert theirs.values == {
        "actor.path": "m",
        "actor.optimizer.lr": "1e-6",
        "ref.path": "m",
        "gconfig.n_samples": 4,
    }


def test_a_command_line_over_its_file(tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text("beta: 0.1\nnum_generations: 4\n")
    assert read(f"trl grpo --config {path} --beta 0.2").values == {
        "beta": "0.2",
        "num_generations": 4,
    }
    theirs = read("trl grpo --config there.yaml --beta 0.2")
    assert theirs.values == {"beta": "0.2"}
    (note,) = theirs.notes
    assert (
        note == "there.yaml cannot be read: No such file or directory: its options are missing here"
    )


def test_what_is_no_option_is_told():
    assert read("trl grpo stray --beta 1").notes == ["'stray' is no option: it was left out"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ls -la", "names no program that lightppo knows: say which it is by --from, one of trl-grpo"),
        ("", "names no program"),
        ("trl grpo --x 'open", "the command cannot be read: No closing quotation"),
        ("missing.yaml", "missing.yaml cannot be read: No such file or directory"),
        ("missing.sh", "missing.sh cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(text, message):
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_yaml_file_that_is_none(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: [\n")
    with pytest.raises(ConfigError, match=r"x\.yaml cannot be read"):
        read(str(path))
    path.write_text("- a\n")
    with pytest.raises(ConfigError, match="holds no options: it must be a mapping"):
        read(str(path))


def test_a_program_may_be_named():
    theirs = read("python mine.py --learning_rate 1e-6", "trl-sft")
    assert (theirs.program, theirs.values) == ("trl-sft", {"learning_rate": "1e-6"})


def test_programs_train_by_commands_of_ours():
    assert {one.command for one in PROGRAMS.values()} == {"ppo", "sft", "rm", "dpo"}


@pytest.mark.parametrize(
    ("kind", "program"),
    [("rl", "areal"), ("sft", "areal-sft"), ("rw", "areal-rm"), ("dpo", "areal-dpo")],
)
def test_files_of_areal_by_their_data(tmp_path, kind, program):
    path = tmp_path / "x.yaml"
    more = "gconfig: {n_samples: 4}" if kind == "rl" else ""
    path.write_text(f"actor: {{path: m}}\ntrain_dataset: {{type: {kind}}}\n{more}\n")
    assert read(str(path)).program == program


def test_an_array_of_another_file_is_told():
    theirs = read("python3 train.py --hf-checkpoint m ${MODEL_ARGS[@]} --seed 1")
    assert theirs.values == {"hf_checkpoint": "m", "seed": "1"}
    assert theirs.notes == ["${MODEL_ARGS[@]} is set elsewhere: its options are missing here"]
