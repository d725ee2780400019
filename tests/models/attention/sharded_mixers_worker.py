"""Ranks of test_recurrent.py: one step of SGD per family under ZeRO-3; the change of the weights is the gradient.

Usage: sharded_mixers_worker.py FOLDER; the launcher may put --local_rank first.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.models.actor import Actor


def gradient(folder: Path, batch: dict[str, torch.Tensor], num_actions: int) -> dict:
    strategy = DeepspeedStrategy(max_norm=0.0, zero_stage=3)
    strategy.setup_distributed()
    ds_config = strategy.get_ds_train_config() | {"zero_allow_untested_optimizer": True}
    # else nothing so small is sharded
    ds_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    actor = Actor(str(folder), ds_config=ds_config, packing_samples=True)
    optimizer = torch.optim.SGD(actor.parameters(), lr=1.0)
    actor, optimizer, scheduler = strategy.prepare((actor, optimizer, None))
    rank, world = strategy.get_rank(), strategy.world_size
    # the first rank has a prompt for all its rows, the second one rows of other lengths
    batch = {key: value.chunk(world)[rank] for key, value in batch.items()}
    with strategy.gathered_parameters(actor) as module:
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
    log_probs = actor(batch["sequences"], num_actions, batch["mask"])
    loss = (log_probs * batch["weights"]).sum()
    strategy.backward(loss * world, actor, optimizer)  # ranks are averaged
    strategy.optimizer_step(optimizer, actor, scheduler)
    with strategy.gathered_parameters(actor) as module:
        return {n: before[n] - p.detach() for n, p in module.named_parameters()}


def main(folder: Path) -> None:
    saved = torch.load(folder / "batch.pt")
    batch, num_actions = saved["batch"], saved["num_actions"]
    found = {name: gradient(folder / name, batch, num_actions) for name in saved["names"]}
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
