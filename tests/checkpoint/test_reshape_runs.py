"""A PPO run that goes on with other ranks and another ZeRO stage: each prompt once, the numbers as if it had not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.ranks import REPO, run_ranks
from support.runs import forget_checkpoints, trained_rows
from support.tiny import sums, write_jsonl

from lightppo.rollout.sampler import dealt_out

REWARD = """
def reward_func(queries, prompts, labels):
    return [i % 2 + 0.01 * len(query) for i, query in enumerate(queries)]
"""

STEPS = 4
# Of the metrics of later steps, against the run that was not resumed: sums over other ranks and shards round otherwise.
TOLERANCE = 1e-3


@pytest.fixture
def run(tiny_model, tmp_path):
    """``run(folder, ranks, stage, *flags)``: rows of metrics, and what it wrote. GAE with everything that has a state;
    16 prompts in generation batches of 8 and steps of 4: after every other step 4 groups wait."""
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", sums(16))
    text = write_jsonl(tmp_path / "text.jsonl", [{"input": f"{i}+{i}={2 * i}"} for i in range(24)])

    def start(
        folder: Path, ranks: int, stage: int, *flags: str
    ) -> tuple[list[dict[str, Any]], str]:
        result = run_ranks(
            REPO / "examples" / "train_ppo.py",
            *(
                "--pretrain",
                tiny_model,
                "--prompt_data",
                prompts,
                "--reward_fn",
                tmp_path / "reward.py",
            ),
            *(
                "--save_path",
                folder / "run",
                "--ckpt_path",
                folder / "ckpt",
                "--rollout_data_dir",
                folder / "data",
            ),
            *("--rollout_batch_size=4", "--gen_batch_size=8", "--n_samples_per_prompt=2"),
            *(
                "--train_batch_size=8",
                "--micro_train_batch_size=2",
                "--prompt_max_len=12",
                "--generate_max_len=4",
            ),
            *(
                "--dynamic_sampling",
                "--filter_metric=score",
                "--enable_ema",
                "--ref_ema_eta=0.2",
                "--value_norm=exp",
            ),
            *(
                "--reward_running_norm",
                "--init_kl_coef=0.1",
                "--kl_target=0.001",
                "--pretrain_data",
                text,
            ),
            *(
                "--actor_learning_rate=1e-4",
                "--critic_learning_rate=1e-4",
                "--num_examine=0",
                "--save_steps=1",
            ),
            *("--max_ckpt_num=9", f"--zero_stage={stage}", *flags),
            world_size=ranks,
        )
        return trained_rows(folder / "run"), result.output

    return start


def sampled(folder: Path) -> dict[str, list[str]]:
    return {
        path.name: path.read_text().splitlines() for path in sorted((folder / "data").iterdir())
    }


def test_two_ranks_at_zero_2_go_on_as_one_at_zero_3(run, tmp_path):
    straight, _ = run(tmp_path / "straight", 2, 2)
    assert [row["step"] for row in straight] == list(range(1, STEPS + 1))
    shutil.copytree(tmp_path / "straight", tmp_path / "moved")
    forget_checkpoints(tmp_path / "moved" / "ckpt", after=1)
    shutil.rmtree(tmp_path / "moved" / "data")
    resumed, output = run(tmp_path / "moved", 1, 3, "--reshape_ckpt")
    assert "--reshape_ckpt: 2 ranks → 1; random generators are seeded anew" in output
    assert "resume: --zero_stage was 2, is 3" in output

    assert [row["rollout/surplus_groups"] for row in resumed] == [4, 0, 4, 0]
    assert resumed[1]["rollout/stale_groups"] == 4  # what two ranks held is with the one
    first, later = sampled(tmp_path / "straight"), sampled(tmp_path / "moved")
    trained = [
        json.loads(line)["index"]
        for found in (first["step1.jsonl"], *later.values())
        for line in found
    ]
    # its samples
    assert {index: trained.count(index) for index in trained} == dict.fromkeys(range(16), 2)
    # to the letter
    assert later == {name: found for name, found in first.items() if name != "step1.jsonl"}

    assert [row.keys() for row in resumed] == [row.keys() for row in straight]
    for now, before in zip(resumed, straight, strict=True):
        numbers = [
            {name: value for name, value in row.items() if value is not None}
            for row in (now, before)
        ]
        assert numbers[0] == pytest.approx(numbers[1], rel=TOLERANCE, abs=1e-5), before["step"]


DEMONSTRATIONS = [{"input": f"{i}+{i}=", "output": "abcdefghijkl"[: i + 1]} for i in range(12)]
PAIRS = [
    {"input": f"{i}+{i}=", "chosen": "abc"[: 1 + i % 3], "rejected": "xyzabc"[: 1 + i % 5]}
    for i in range(12)
]


@pytest.mark.parametrize(
    ("command", "data", "more"),
    [
        ("rm", PAIRS, ()),
        pytest.param("sft", DEMONSTRATIONS, ("--lora_rank=4",), marks=pytest.mark.long),
        pytest.param("dpo", PAIRS, (), marks=pytest.mark.long),
    ],
)
def test_training_on_data_goes_on_with_other_ranks_and_another_stage(
    tiny_model, tmp_path, command, data, more
):
    """In the middle of the second epoch; a rank of two has other rows and padding than the one has."""
    dataset, script = write_jsonl(tmp_path / "rows.jsonl", data), tmp_path / "command.py"
    script.write_text("from lightppo.__main__ import main\n\nmain()\n")

    def run(folder: Path, ranks: int, stage: int, *flags: str) -> tuple[list[dict[str, Any]], str]:
        result = run_ranks(
            *(
                script,
                command,
                f"--pretrain={tiny_model}",
                f"--dataset={dataset}",
                "--max_len=24",
                "--num_epochs=2",
            ),
            *(
                f"--save_path={folder / 'run'}",
                f"--ckpt_path={folder / 'ckpt'}",
                "--learning_rate=1e-3",
                *more,
            ),
            *(
                "--train_batch_size=4",
                "--micro_train_batch_size=2",
                "--save_steps=1",
                "--max_ckpt_num=9",
            ),
            *(f"--zero_stage={stage}", *flags),
            world_size=ranks,
        )
        found = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        return [row for row in found if "train/loss" in row], result.output

    straight, _ = run(tmp_path / "straight", 2, 2)
    assert [row["step"] for row in straight] == list(range(1, 7))
    shutil.copytree(tmp_path / "straight", tmp_path / "moved")
    forget_checkpoints(tmp_path / "moved" / "ckpt", after=4)
    resumed, output = run(tmp_path / "moved", 1, 3, "--reshape_ckpt")
    assert "--reshape_ckpt: 2 ranks → 1" in output
    assert "resume: --zero_stage was 2, is 3" in output
    assert "4 steps done" in output
    for now, before in zip(resumed, straight, strict=True):
        numbers = [
            {n: x for n, x in row.items() if n.startswith("train/")} for row in (now, before)
        ]
        assert numbers[0] == pytest.approx(numbers[1], rel=TOLERANCE, abs=1e-5), before["step"]


def test_the_surplus_of_old_ranks_is_dealt_out_oldest_first():
    held = [[{"step": 1, "group": "a"}, {"step": 3, "group": "b"}], [{"step": 2, "group": "c"}], []]
    dealt = [[group["group"] for group in groups] for groups in dealt_out(held, 2)]
    assert dealt == [["a", "b"], ["c"]]
    assert [len(groups) for groups in dealt_out(held, 4)] == [1, 1, 1, 0]
    assert dealt_out(held, 3) == held
