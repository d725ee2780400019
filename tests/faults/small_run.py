"""The small run of the fault tests: its inputs, its flags, and what it must come to whatever happens on the way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from support.tiny import save_causal_lm, sums, write_jsonl

STEPS = 4
REWARD = """
def reward_func(queries, prompts, labels):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return [sum(c.isdigit() for c in a) / max(1, len(a)) for a in answers]
"""


def write_inputs(folder: Path, **model: Any) -> dict[str, str]:
    """The options that name model, prompts and reward, written into a folder; ``model``: what changes in its config."""
    (folder / "reward.py").write_text(REWARD)
    return {
        "pretrain": save_causal_lm(folder / "model", **model),
        "prompt_data": write_jsonl(folder / "prompts.jsonl", sums(4 * STEPS)),
        "reward_fn": str(folder / "reward.py"),
    }


def flags(inputs: dict[str, str], out: Path, **options: Any) -> list[str]:
    """The words of a command line; a value of None leaves an option out."""
    small = {
        "zero_stage": 2,
        "rollout_batch_size": 4,
        "train_batch_size": 4,
        "micro_train_batch_size": 1,
        "prompt_max_len": 12,
        "generate_max_len": 5,
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "num_examine": 0,
        "save_steps": 1,
        "max_ckpt_num": 2,
        "save_path": out / "run",
        "ckpt_path": out / "ckpt",
    }
    chosen = {
        name: value for name, value in (inputs | small | options).items() if value is not None
    }
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in chosen.items()]


def metric_rows(out: Path) -> list[dict[str, Any]]:
    """Every number of every step, without what depends on the clock, which some rows hold alone."""
    found = (json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines())
    rows = [
        {k: v for k, v in row.items() if k != "time" and not k.startswith("perf/")} for row in found
    ]
    return [row for row in rows if len(row) > 1]


def outcome(out: Path) -> tuple[str, list[dict[str, Any]]]:
    """SHA-256 of the final weights, and the metrics."""
    weights = (out / "run" / "model.safetensors").read_bytes()
    return hashlib.sha256(weights).hexdigest(), metric_rows(out)
