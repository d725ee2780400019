"""--fp16 with all that it meets, on two ranks: the runs train, and write finite models in 16 bits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import run_ranks
from support.tiny import read_jsonl, save_causal_lm, save_reward_model, sums, write_jsonl

SCRIPT = Path(__file__).parent / "ranks" / "half.py"
LORA = {"lora_rank": 4, "lora_alpha": 32.0}
QLORA = LORA | {"load_in_4bit": True}
OFFLOADED = {"adam_offload": True}
SCORED = {"reward_pretrain": "reward_model", "critic_pretrain": "model"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo QLoRA ZeRO 3, reward model": ("ppo", {"zero_stage": 3, **SCORED, **QLORA}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo ZeRO 2, EMA": ("ppo", {"enable_ema": True, "value_norm": "exp", **OFFLOADED}),
    "rm LoRA ZeRO 3": ("rm", {"zero_stage": 3, **LORA}),
    "ppo ZeRO 1": ("ppo", {"zero_stage": 1}),
    "ppo ZeRO 3 offloaded, EMA": (
        "ppo",
        {"zero_stage": 3, "param_offload": True, "enable_ema": True, **OFFLOADED},
    ),
    "ppo LoRA ZeRO 2": ("ppo", LORA),
    "ppo, moving reference": ("ppo", {"zero_stage": 3, "ref_ema_eta": 0.5}),
    "ppo, teacher, checkpointing": (
        "ppo",
        {"teacher_pretrain": "model", "distill_coef": 0.1, "gradient_checkpointing": True},
    ),
    "ppo, compiled": ("ppo", {"torch_compile": True}),
    "ppo, reference and reward offloaded": (
        "ppo",
        {"ref_zero_stage": 3, "ref_offload": True, **SCORED},
    ),
    **{
        f"{kind} ZeRO {stage}": (kind, {"zero_stage": stage})
        for kind in ("sft", "rm", "dpo")
        for stage in (1, 2, 3)
    },
    **{f"{kind} QLoRA ZeRO 3": (kind, {"zero_stage": 3, **QLORA}) for kind in ("sft", "rm", "dpo")},
}


def run_all(
    runs: dict[str, tuple[str, dict[str, Any]]], assets: dict[str, str], root: Path
) -> None:
    """Every run on the same two ranks."""
    models = {
        "model": save_causal_lm(root / "model", hidden_size=64, intermediate_size=128),
        "reward_model": save_reward_model(root / "reward_model"),
    }
    pairs = [{"prompt": row["input"], "chosen": row["label"], "rejected": "7"} for row in sums(16)]
    answers = [{"input": row["input"], "output": row["label"]} for row in sums(16)]
    data = {"rm": pairs, "dpo": pairs, "sft": answers}
    ppo = assets | {
        "prompt_max_len": 12,
        "generate_max_len": 5,
        "rollout_batch_size": 4,
        "train_batch_size": 4,
    }
    ppo |= {
        "actor_learning_rate": 1e-3,
        "num_examine": 0,
        "benchmark_steps": 2,
        "lr_warmup_steps": 0,
    }
    found = {}
    for number, (name, (kind, own)) in enumerate(runs.items()):
        options = {
            "save_path": str(root / name),
            "fp16": True,
            "micro_train_batch_size": 2,
            "pretrain": "model",
        }
        if kind == "ppo":
            options |= ppo | {"pretrain": "model", "ckpt_path": str(root / f"ckpt{number}")} | own
            options = {
                key: x
                for key, x in options.items()
                if key != "reward_fn" or "reward_pretrain" not in own
            }
        else:
            file = write_jsonl(root / f"{kind}.jsonl", data[kind])
            options |= {
                "dataset": file,
                "max_len": 16,
                "train_batch_size": 8,
                "max_steps": 2,
                "learning_rate": 1e-3,
            }
            options |= own
        found[name] = (
            kind,
            {key: models.get(x, x) if isinstance(x, str) else x for key, x in options.items()},
        )
    (root / "runs.json").write_text(json.dumps(found))
    run_ranks(SCRIPT, root / "runs.json", timeout=300 + 60 * len(runs))


def check(name: str, folder: Path) -> None:
    """Two steps whose numbers are finite, and whose loss scale halves with each overflow."""
    rows = read_jsonl(folder / "metrics.jsonl")
    losses = (
        {"actor_": "policy_loss", "critic_": "critic_loss"}
        if name.startswith("ppo")
        else {"": "loss"}
    )
    for role, loss in losses.items():
        steps, scale = [row for row in rows if f"train/{role}loss_scale" in row], 2.0**12
        assert len(steps) == 2, (name, role)
        for row in steps:
            scale /= 2 ** row[f"train/{role}overflow"]
            assert (row[f"train/{role}skipped"], row[f"train/{role}loss_scale"]) == (0, scale), (
                name,
                role,
            )
        assert scale > 2.0**8, (name, role)
        assert all(math.isfinite(row[f"train/{loss}"]) for row in steps), (name, role)
    weights = load_file(folder / "model.safetensors").values()
    averaged = name.endswith("EMA")  # a moving average is in float32
    assert {weight.dtype for weight in weights} == {torch.float32 if averaged else torch.float16}, (
        name
    )
    assert all(torch.isfinite(weight).all() for weight in weights), name


@pytest.mark.parametrize(
    "runs", [RUNS, pytest.param(MORE, marks=pytest.mark.long)], ids=["sample", "more"]
)
def test_runs_on_two_ranks(runs, assets, tmp_path):
    run_all(runs, assets, tmp_path)
    for name in runs:
        check(name, tmp_path / name)
