"""Real vLLM for CPUs and checkpoints with towers: in process it has the language model alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import READ_BY_VLLM, REPO, run_ranks
from support.tiny import REWARD, read_jsonl, sums, write_jsonl
from support.towers import save_with_tower, sums_of, sums_of_tower

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SCRIPT = REPO / "examples" / "train_ppo.py"
# heads of 32, the smallest that vLLM's attention takes on a CPU
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def flags(whole: str, folder: Path, **options: object) -> list[str]:
    """The command line of two steps."""
    (folder / "reward.py").write_text(REWARD)
    small = {
        "pretrain": whole,
        "prompt_data": write_jsonl(folder / "prompts.jsonl", sums(8)),
        "reward_fn": folder / "reward.py",
        "save_path": folder / "run",
        "ckpt_path": folder / "ckpt",
        "advantage_estimator": "rloo",
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 4,
        "train_batch_size": 8,
        "micro_train_batch_size": 4,
        "prompt_max_len": 12,
        "generate_max_len": 8,
        "max_num_seqs": 16,
        "actor_learning_rate": 1e-2,
        "lr_warmup_ratio": 0,
        "l2": 0.1,
        "zero_stage": 2,
    }
    return [f"--{name}={value}" for name, value in (small | options).items()]


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen3_5"])
def test_in_process(tmp_path, kind):
    whole = save_with_tower(kind, tmp_path / kind, **SHAPE)
    words = flags(whole, tmp_path, rollout_engine="vllm")
    run_ranks(SCRIPT, *words, world_size=1, vllm=True, timeout=400, env=READ_BY_VLLM)
    rows = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "rollout/reward" in r]
    assert len(rows) == 2
    print([{k: v for k, v in row.items() if "diff" in k or "logp" in k} for row in rows])
    before, after = sums_of(whole), sums_of(tmp_path / "run")
    assert before.keys() == after.keys()
    assert before != after
    assert sums_of_tower(whole) == sums_of_tower(tmp_path / "run")
