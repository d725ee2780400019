"""``--router_replay`` at ZeRO 3 on two ranks: as on one rank, and the same to the last bit after a kill and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families.zoo import random_model
from support.ranks import REPO, run_ranks
from support.tiny import read_jsonl, save_tokenizer, sums, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.long]

REWARD = """
import os, pathlib, signal

calls = 0

def reward_func(queries, prompts, labels):
    global calls
    calls += 1
    order = os.environ.get("KILL")
    if order and os.environ["RANK"] == "1" and calls == int(order):
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(query.count("1") + query.count("2")) for query in queries]
"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """``run(folder, *flags)``: rows of metrics.jsonl."""
    random_model("qwen3_moe").save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", sums(32))

    def start(folder: str, *flags: str, kill: str = "", ranks: int = 2) -> list[dict[str, Any]]:
        path = tmp_path / folder
        result = run_ranks(
            REPO / "examples" / "train_ppo.py",
            *("--pretrain", tmp_path / "model", "--prompt_data", prompts),
            *("--reward_fn", tmp_path / "reward.py"),
            *("--save_path", path / "run", "--ckpt_path", path / "ckpt", "--save_steps=1"),
            *("--zero_stage=3", "--advantage_estimator=grpo", "--n_samples_per_prompt=2"),
            *("--rollout_batch_size=4", "--micro_train_batch_size=2"),
            *("--prompt_max_len=12", "--generate_max_len=6"),
            *("--num_examine=0", "--init_kl_coef=0"),
            *flags,
            env={"KILL": kill},
            world_size=ranks,
            check=not kill,
        )
        assert not kill or result.returncode != 0
        return [
            {
                name: value
                for name, value in row.items()
                if name.startswith(("train/", "rollout/", "step"))
            }
            for row in read_jsonl(path / "run" / "metrics.jsonl")
        ]

    return start


@pytest.mark.parametrize("replayed", ["rollout", "old"])
def test_two_ranks_at_zero_3_killed_and_resumed(run: Any, replayed: str) -> None:
    flags = (f"--router_replay={replayed}", "--gradient_checkpointing", "--benchmark_steps=3")
    # a surplus waits in the checkpoint, with its experts
    flags += ("--gen_batch_size=6", "--train_batch_size=4", "--actor_learning_rate=1e-3")
    straight = run("straight", *flags)
    assert any(row["train/replaced_experts"] > 0 for row in straight)
    run("killed", *flags, kill="2")
    assert run("killed", *flags) == straight


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("replayed", ["rollout", "old"])
def test_two_ranks_at_zero_3_train_as_one(run: Any, replayed: str, size: int) -> None:
    flags = (f"--router_replay={replayed}", "--train_batch_size=8", "--max_epochs=2")
    flags += ("--actor_learning_rate=1e-2", "--benchmark_steps=1")
    (two,) = run("two", *flags, f"--sequence_parallel_size={size}")
    (one,) = run("one", *flags, ranks=1)
    assert two["train/replaced_experts"] > 0
    for name in ("policy_loss", "actor_grad_norm", "replaced_experts"):
        expected = pytest.approx(one[f"train/{name}"], rel=1e-3, abs=1e-5)
        assert two[f"train/{name}"] == expected, name
