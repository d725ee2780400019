"""Ranks of test_actor.py: one step of SGD per model and ZeRO stage; the change of the weights is the gradient.

Usage: scoring_head_worker.py FOLDER; the launcher may put --local_rank first.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.models.actor import Actor

# qwen2 has tied embeddings; gemma2 changes the logits, so that its first forward is run again
CASES = [
    ("llama", 0),
    ("llama", 1),
    ("llama", 2),
    ("llama", 3),
    ("qwen2", 1),
    ("qwen2", 3),
    ("gemma2", 3),
]


def loss_of(
    actor: Actor, batch: dict[str, torch.Tensor], num_actions: int, packed: bool
) -> torch.Tensor:
    actor.layout.packs = packed
    scores = actor.score_actions(
        batch["sequences"], num_actions, batch["mask"], entropy=True, entropy_grad=True
    )
    return ((scores.log_probs + 2 * scores.entropy) * batch["weights"]).sum()


def gradient(
    folder: Path, name: str, stage: int, batch: dict[str, torch.Tensor], num_actions: int
) -> dict:
    strategy = DeepspeedStrategy(max_norm=0.0, zero_stage=stage)
    strategy.setup_distributed()
    ds_config = strategy.get_ds_train_config() | {"zero_allow_untested_optimizer": True}
    # else nothing so small is sharded
    ds_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    actor = Actor(str(folder / name), temperature=0.7, valid_vocab_size=40, ds_config=ds_config)
    optimizer = torch.optim.SGD(actor.parameters(), lr=1.0)
    actor, optimizer, scheduler = strategy.prepare((actor, optimizer, None))
    rank, world = strategy.get_rank(), strategy.world_size
    batch = {key: value[rank::world] for key, value in batch.items()}
    with strategy.gathered_parameters(actor) as module:
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
    for part in (slice(0, 1), slice(1, None)):  # two micro batches, one of them packed
        loss = loss_of(
            actor, {k: v[part] for k, v in batch.items()}, num_actions, packed=part.start == 0
        )
        strategy.backward(loss * world, actor, optimizer)  # ranks are averaged
    strategy.optimizer_step(optimizer, actor, scheduler)
    with strategy.gathered_parameters(actor) as module:
        return {n: before[n] - p.detach() for n, p in module.named_parameters()}


def main(folder: Path) -> None:
    saved = torch.load(folder / "batch.pt")
    found = {case: gradient(folder, *case, saved["batch"], saved["num_actions"]) for case in CASES}
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
