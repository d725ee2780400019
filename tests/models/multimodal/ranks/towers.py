"""Checks of towers under ZeRO: each stays byte for byte, with and without adapters, also in another process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_checks
from support.rank_checks import halving, make_strategy
from support.towers import KINDS, save_with_tower, sums_of, sums_of_tower
from transformers import AutoModelForImageTextToText
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import LoraOptions, add_adapters

VARIANTS: dict[str, dict[str, Any]] = {
    "gemma3, 0": {"zero_stage": 0},
    "gemma3, 1": {"zero_stage": 1},
    "gemma3, 2, bf16": {"zero_stage": 2, "bf16": True},
    "gemma3, 3": {"zero_stage": 3},
    "gemma3, 3, adapters": {"zero_stage": 3},
    "gemma3, 1, adapters": {"zero_stage": 1},
    "qwen3_5, 0": {"zero_stage": 0},
    "qwen3_5, 2": {"zero_stage": 2},
    "qwen3_5, 3": {"zero_stage": 3},
    "qwen3_5, 2, adapters": {"zero_stage": 2},
    "qwen3_vl, 3": {"zero_stage": 3},
    "qwen2_audio, 3": {"zero_stage": 3},
}
IDS = torch.tensor([[5, 9, 14, 8, 6, 7], [11, 6, 9, 15, 16, 8]])
ACTIONS = 4


def saved(strategy: DeepspeedStrategy, work_dir: Path, kind: str) -> str:
    unset_hf_deepspeed_config()
    folder = work_dir / kind
    if not folder.exists():
        strategy.on_rank_0(lambda: save_with_tower(kind, folder), "save the model")
    strategy.barrier()
    return str(folder)


def trained(role: DeepspeedStrategy, path: str, adapters: bool) -> tuple[Any, Any, Any]:
    """A prepared actor, its optimizer and its scheduler."""
    config = role.get_ds_train_config()
    if role.zero_stage == 3:  # even tiny parameters are sharded
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    actor = Actor(path, ds_config=config, bf16=role.bf16)
    if adapters:
        add_adapters(actor, LoraOptions(2, 8.0), seed=3)
    optimizer = role.create_optimizer(actor, lr=1e-2, weight_decay=0.1)
    return role.prepare((actor, optimizer, halving(optimizer)))


def step(role: DeepspeedStrategy, actor: Any, optimizer: Any, scheduler: Any) -> None:
    actor.train()
    ids = IDS.chunk(role.world_size)[role.get_rank()]
    role.backward(-actor(ids, ACTIONS).mean(), actor, optimizer)
    role.optimizer_step(optimizer, actor, scheduler, name="actor")


def scores(role: DeepspeedStrategy, actor: Any) -> torch.Tensor:
    """(B, A)."""
    actor.eval()
    with torch.no_grad():
        return actor(IDS, ACTIONS)


def check_exports(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """After two steps with weight decay; then the checkpoint of the first one, and the second once more."""
    for variant, options in VARIANTS.items():
        kind = variant.partition(",")[0]
        path = saved(strategy, work_dir, kind)
        role = make_strategy(**options)
        parts = trained(role, path, "adapters" in variant)
        step(role, *parts)
        role.save_ckpt(parts[0], work_dir / f"ckpt {variant}", tag="first")
        step(role, *parts)
        expected = scores(role, parts[0])
        out = work_dir / f"out {variant}"
        role.save_model(parts[0], None, out)
        if role.is_rank_0():
            check_whole(Path(path), out, variant, expected)
        role.barrier()


def check_whole(path: Path, out: Path, variant: str, expected: torch.Tensor) -> None:
    before, after, tower = sums_of(path), sums_of(out), sums_of_tower(path)
    assert before.keys() == after.keys(), variant
    assert tower == sums_of_tower(out), variant
    moved = {name for name in before if before[name] != after[name]}
    assert len(moved) > 10, variant
    assert not moved & tower.keys(), variant
    if "audio" in variant:
        return
    unset_hf_deepspeed_config()
    model = AutoModelForImageTextToText.from_pretrained(out)
    told = json.loads((path / "config.json").read_text())
    assert [type(model).__name__] == told["architectures"], variant
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits[:, -ACTIONS - 1 : -1].float()
    got = logits.log_softmax(-1).gather(-1, IDS[:, -ACTIONS:, None])[..., 0]
    limit = 5e-2 if "bf16" in variant else 1e-4
    assert got.numpy() == pytest.approx(expected.numpy(), abs=limit), variant


def check_resume(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """Another process goes on from the first step; its export is the same to the bit."""
    for variant, options in VARIANTS.items():
        role = make_strategy(**options)
        path = saved(strategy, work_dir, variant.partition(",")[0])
        parts = trained(role, path, "adapters" in variant)
        role.load_ckpt(parts[0], work_dir / f"ckpt {variant}")
        step(role, *parts)
        again = work_dir / f"again {variant}"
        role.save_model(parts[0], None, again)
        if role.is_rank_0():
            assert sums_of(again) == sums_of(work_dir / f"out {variant}"), variant
        role.barrier()


def check_convert(strategy: DeepspeedStrategy, work_dir: Path) -> None:
    """The checkpoint of the first step, on rank 0 alone."""
    from lightppo.cli.convert import convert

    def write() -> None:
        for variant in VARIANTS:
            if "adapters" in variant:  # its options are in the state of a run; test_tower_runs.py
                continue
            path = work_dir / variant.partition(",")[0]
            out = work_dir / f"converted {variant}"
            folder = work_dir / f"ckpt {variant}" / "first"
            convert([str(folder), str(out), "--base", str(path)])
            assert sums_of(out).keys() == sums_of(path).keys(), variant
            assert sums_of(out) != sums_of(path), variant
            assert sums_of_tower(out) == sums_of_tower(path), variant

    unset_hf_deepspeed_config()
    strategy.on_rank_0(write, "convert")


assert set(KINDS) > {variant.partition(",")[0] for variant in VARIANTS}

if __name__ == "__main__":
    rank_checks.run([check_exports, check_resume, check_convert])
