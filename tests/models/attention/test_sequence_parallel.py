"""Rows that several ranks hold together give the numbers and gradients of whole rows (``--sequence_parallel_size``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks import WITH_SUPPORT, run_ranks
from support.tiny import save_causal_lm

WORKER = Path(__file__).with_name("pieces_worker.py")
SHARED = {"share_prompts": True}
ALONE = {"share_prompts": False}
CHECKPOINTED = SHARED | {"checkpointing": True}
# what only a GPU has: stand-ins
LIGER = SHARED | {"liger": True}
OFFLOADED = CHECKPOINTED | {"offloading": True}
OF_GPUS = (LIGER, OFFLOADED, SHARED | {"offloading": True})
# name → model, kind, ZeRO stage, options of its constructor, rows
USUAL = {
    "one head of keys": ("kv1", "actor", 0, SHARED, "several"),
    "a piece without actions": ("kv2", "actor", 2, ALONE, "one"),
    "ZeRO 3": ("kv2", "actor", 3, CHECKPOINTED, "several"),
    "offloaded activations, Liger": ("kv2", "actor", 3, OFFLOADED | LIGER, "several"),
    "critic": ("kv2", "critic", 0, SHARED, "several"),
    "reward model": ("kv1", "reward", 0, SHARED, "several"),
}
ALL = {
    f"{kind}, {model}, ZeRO {stage}, {rows}, {options}": (model, kind, stage, options, rows)
    for model in ("kv1", "kv2", "kv4")
    for kind in ("actor", "critic", "reward")
    for stage in (0, 2, 3)
    for options in (SHARED, ALONE, CHECKPOINTED, *(OF_GPUS if model == "kv2" else []))
    for rows in ("several", "one")
}


def check(folder: Path, cases: dict, world_size: int) -> None:
    for heads in (1, 2, 4):
        save_causal_lm(folder / f"kv{heads}", num_key_value_heads=heads)
    torch.save(cases, folder / "cases.pt")
    run_ranks(WORKER, folder, world_size=world_size, timeout=1200, env=WITH_SUPPORT)
    ranks = torch.load(folder / "found.pt")
    for name in cases:
        for found in ranks:
            whole, divided = found[name]
            for expected, output in zip(whole["outputs"], divided["outputs"]):
                torch.testing.assert_close(output, expected, rtol=0, atol=2e-6, msg=name)
            assert max(x.abs().max() for x in whole["change"].values()) > 1e-2
            for parameter, expected in whole["change"].items():
                difference = (divided["change"][parameter] - expected).abs().max()
                assert difference < 1e-6 * max(1.0, float(expected.abs().max())), (name, parameter)


@pytest.mark.slow
def test_pieces_give_the_gradient_of_whole_rows(tmp_path):
    check(tmp_path, USUAL, 2)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_pieces_give_the_gradient_of_whole_rows_everywhere(tmp_path, world_size):
    check(tmp_path, ALL, world_size)
