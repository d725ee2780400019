"""Dynamic sampling under ZeRO-3 on two ranks: one rank has nothing, no hang, resumed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.ranks import REPO, run_ranks
from support.runs import forget_checkpoints
from support.tiny import read_jsonl, sums, write_jsonl

# On the rank in BAD_RANK all samples of a group have one score; on the other they differ.
REWARD = """
import os

def reward_func(queries, prompts, labels):
    if os.environ["RANK"] == os.environ["BAD_RANK"]:
        return [1.0] * len(queries)
    return [float(i % 2) for i in range(len(queries))]
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tiny_model, tmp_path):
    """``run(folder, *flags, bad_rank=…)``: rows of metrics.jsonl, and the output."""
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", sums(32))

    def start(
        folder: str, *flags: str, bad_rank: int, check: bool = True
    ) -> tuple[list[dict[str, Any]], str]:
        path = tmp_path / folder
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
                path / "run",
                "--ckpt_path",
                path / "ckpt",
                "--rollout_data_dir",
                path / "data",
            ),
            *(
                "--zero_stage=3",
                "--advantage_estimator=grpo",
                "--n_samples_per_prompt=2",
                "--rollout_batch_size=4",
            ),
            *(
                "--train_batch_size=4",
                "--micro_train_batch_size=2",
                "--prompt_max_len=12",
                "--generate_max_len=4",
            ),
            *(
                "--dynamic_sampling",
                "--num_examine=0",
                "--init_kl_coef=0.01",
                "--actor_learning_rate=1e-3",
                *flags,
            ),
            env={"BAD_RANK": str(bad_rank)},
            check=check,
        )
        file = path / "run" / "metrics.jsonl"
        rows = read_jsonl(file) if file.exists() else []
        kept = [
            {n: v for n, v in row.items() if n.startswith(("train/", "rollout/", "step"))}
            for row in rows
        ]
        # the step alone: what saving took
        return [row for row in kept if len(row) > 1], result.output

    return start


def samples(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.name: read_jsonl(path) for path in folder.iterdir()}


@pytest.mark.parametrize("bad_rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_groups_of_one_rank_are_all_rejected(run, tmp_path, bad_rank):
    rows, _ = run("run", "--total_training_steps=2", bad_rank=bad_rank)
    # 4 prompts to a batch, 2 of them on each rank: two batches give the 4 groups of a step.
    assert [row["step"] for row in rows] == [1, 2]
    expected = {
        "samples": 8,
        "trained_groups": 4,
        "num_gen_batches": 2,
        "rejected_equal": 4,
        "surplus_groups": 0,
    }
    expected |= {"kept_share": 0.5, "generated_samples": 16}
    for row in rows:
        assert {name: row[f"rollout/{name}"] for name in expected} == expected
        assert row["train/optimizer_steps"] == 2
        assert row["train/actor_grad_norm"] > 0
    trained = [s["index"] for found in samples(tmp_path / "run" / "data").values() for s in found]
    # each prompt once, with its two samples
    assert {trained.count(index) for index in trained} == {2}
    assert len(set(trained)) == 8


def test_resumed_with_a_surplus_on_one_rank(run, tmp_path):
    # 8 accepted groups in one batch of 16: the surplus of 4 waits on rank 1
    flags = ("--gen_batch_size=16", "--save_steps=1")
    straight, _ = run("run", *flags, "--total_training_steps=2", bad_rank=0)
    assert [row["rollout/surplus_groups"] for row in straight] == [4, 0]
    assert [row["rollout/stale_groups"] for row in straight] == [0, 4]
    sampled = samples(tmp_path / "run" / "data")
    forget_checkpoints(tmp_path / "run" / "ckpt", after=1)
    resumed, _ = run("run", *flags, "--total_training_steps=2", bad_rank=0)
    assert resumed == straight
    assert samples(tmp_path / "run" / "data") == sampled


def test_all_ranks_stop_with_the_same_words(run):
    _, output = run(
        "run", "--max_num_gen_batches=1", "--on_exhausted=raise", bad_rank=1, check=False
    )
    found = re.findall(r"step 1: 2 of 4 groups accepted after 1 generation batches", output)
    assert found
