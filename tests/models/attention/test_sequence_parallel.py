"""Rows that several ranks hold together give the numbers and gradients of whole rows (``--sequence_parallel_size``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from families.zoo import families_here
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


# model → why its rows cannot be in pieces
REFUSED = {
    "three heads": "2 ranks cannot share out the 3 attention heads",
    "gpt_oss": "attends by code of its own",
    "lfm2": "(has recurrent layers or convolutions|code is not known before transformers 5.16)",
    "bloom": "needs packed rows: .* alibi",
}
REFUSED_FAMILIES = {
    *("bloom", "falcon (alibi)", "mpt"),  # alibi
    *(
        "doge",
        "doge (experts)",
        "falcon",
        "gpt_neo",
        "gptj",
        "gpt_oss",
        "llama4_text",
        "phimoe",
    ),  # attention
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "olmo_hybrid", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba2"),  # a state goes along the row
    *("falcon_mamba", "mamba", "mamba2", "minimax", "rwkv"),
}


def outcomes(folder: Path, cases: dict, world_size: int) -> list[dict]:
    """What the cases came to, of each rank."""
    for heads in (1, 2, 4):
        save_causal_lm(folder / f"kv{heads}", num_key_value_heads=heads)
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    save_causal_lm(folder / "three heads", **odd)
    torch.save(cases, folder / "cases.pt")
    run_ranks(WORKER, folder, world_size=world_size, timeout=1200, env=WITH_SUPPORT)
    return torch.load(folder / "found.pt")


def check(found: dict, name: str, bound: float = 2e-6) -> None:
    whole, divided = found[name]
    for expected, output in zip(whole["outputs"], divided["outputs"]):
        torch.testing.assert_close(output, expected, rtol=0, atol=2e-6, msg=name)
    assert max(x.abs().max() for x in whole["change"].values()) > 1e-2
    for parameter, expected in whole["change"].items():
        difference = (divided["change"][parameter] - expected).abs().max()
        assert difference < bound * max(1.0, float(expected.abs().max())), (name, parameter)


@pytest.mark.slow
def test_pieces_give_the_gradient_of_whole_rows(tmp_path):
    refused = {model: (model, "actor", 0, SHARED, "several") for model in REFUSED}
    for found in outcomes(tmp_path, USUAL | refused, 2):
        for name in USUAL:
            check(found, name)
        for model, reason in REFUSED.items():
            assert re.search(f"^--sequence_parallel_size.*{reason}.*$", found[model])


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_pieces_give_the_gradient_of_whole_rows_everywhere(tmp_path, world_size):
    for found in outcomes(tmp_path, ALL, world_size):
        for name in ALL:
            check(found, name)


@pytest.mark.long
def test_every_family_gives_the_gradient_of_whole_rows_or_is_refused(tmp_path):
    cases = {family: (family, "actor", 0, SHARED, "several") for family in families_here()}
    for found in outcomes(tmp_path, cases, 2):
        refused = {family for family in cases if isinstance(found[family], str)}
        assert refused == REFUSED_FAMILIES & cases.keys()
        for family in cases.keys() - refused:
            check(found, family, bound=3e-6)  # experts add in another order
        for family in refused:
            assert re.search("^--sequence_parallel_size.*$", found[family])
