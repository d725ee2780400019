"""Ranks of test_router_replay.py: experts of whole rows, and of pieces of them. Usage: router_pieces_worker.py FOLDER."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from families.zoo import random_model

from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.models.actor import Actor
from lightppo.models.packing import settle_pieces
from lightppo.models.router_replay import RouterReplay
from lightppo.version import release_of

ACTIONS = 4
# seven tokens, five and four; two ranks do not divide what is left when the first two share their prompt
FAMILIES = ("qwen3_moe", *["deepseek_v3"] * (release_of("transformers") >= (5, 14, 0)))
SEQUENCES = torch.tensor(
    [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 12, 13, 14, 15], [0, 20, 21, 22, 23, 0, 0]]
)


def other_choices(replay: RouterReplay) -> torch.Tensor:
    """Choices at random; a shared prompt's are those of its first sample."""
    generator = torch.Generator().manual_seed(3)
    shape = (*SEQUENCES.shape, len(replay.layers), replay.experts)
    choices = torch.rand(shape, generator=generator).topk(replay.top_k).indices.to(replay.dtype)
    choices[1, :3] = choices[0, :3]
    return choices


def scores_of(family: str, group: Any, divided: bool, checkpoints: bool) -> dict[str, Any]:
    actor = Actor(random_model(family, attention="sdpa"), packing_samples=True)
    if checkpoints:
        actor.gradient_checkpointing_enable()
    actor.router_replay = replay = RouterReplay(actor.hf_model)
    actor.train()
    assert settle_pieces(actor.layout, group) is None
    mask = (SEQUENCES != 0).long()
    with group.together if divided else nullcontext():
        recorded = actor.score_actions(SEQUENCES, ACTIONS, mask, record_experts=True)
        again = actor.score_actions(SEQUENCES, ACTIONS, mask, experts=recorded.experts)
        replayed = actor.score_actions(SEQUENCES, ACTIONS, mask, experts=other_choices(replay))
        replayed.log_probs.sum().backward()
    # of pieces each rank has its own part
    gradients = {}
    for name, weight in actor.hf_model.named_parameters():
        if weight.grad is not None:
            gradients[name] = group.all_reduce(weight.grad, "sum") if divided else weight.grad
    return {
        "experts": recorded.experts,
        "log_probs": replayed.log_probs.detach(),
        "replaced": replayed.replaced_experts,
        "replaced again": again.replaced_experts,
        "gradients": gradients,
    }


def main(folder: Path) -> None:
    strategy = DeepspeedStrategy(sequence_parallel_size=torch.distributed.get_world_size())
    strategy.setup_distributed()
    found = {
        (family, checkpoints): [
            scores_of(family, strategy, divided, checkpoints) for divided in (False, True)
        ]
        for family in FAMILIES
        for checkpoints in (False, True)
    }
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    DeepspeedStrategy().setup_distributed()
    main(Path(sys.argv[-1]))
