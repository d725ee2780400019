"""AdamW's steps with samples that have no advantage, trained on and left out. Usage: silent_samples.py MODEL OUT.pt

Of four samples two have none, with two ranks those of rank 1; in the second step no sample has any.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.logging.step_metrics import optimizer_status
from lightppo.models.actor import Actor

SPEC = importlib.util.spec_from_file_location("gradients", Path(__file__).with_name("gradients.py"))
gradients = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gradients)

OPTIONS = {"init_kl_coef": 0.0, "micro_train_batch_size": 2, "train_batch_size": 8}


def steps(model_path: str, stage: int, leaves_out: bool) -> dict[str, Any]:
    """Weights behind two optimizer steps, their numbers, and the backward passes of this rank."""
    strategy = DeepspeedStrategy(max_norm=0.5, zero_stage=stage)
    strategy.setup_distributed()
    torch.manual_seed(0)
    actor = Actor(model_path, ds_config=strategy.get_ds_train_config(), packing_samples=True)
    # with so large an eps a step does not enlarge the rounding of a gradient near 0
    optimizer = strategy.create_optimizer(actor, lr=0.1, weight_decay=0.1, eps=0.1)
    parts = strategy.prepare((actor, optimizer, None))
    actor = parts[0]
    trainer = gradients.build_trainer(strategy, parts, (None, None), None, **OPTIONS)
    assert trainer.trains_advantages_alone()
    if not leaves_out:
        trainer.trains_advantages_alone = lambda: False
    rank, world = strategy.get_rank(), strategy.world_size
    numbers, passes = [], []
    backward = strategy.backward
    strategy.backward = lambda loss, *rest: passes.append(1) or backward(loss, *rest)
    for step in range(2):
        mine = gradients.make_samples()[:4][rank::world]
        for number, item in enumerate(mine):
            item.selected = item.loss_weights = None
            if step == 1 or (number % 2 if world == 1 else rank):
                item.advantages = torch.zeros_like(item.advantages)
        trainer.replay_buffer.items = mine
        (minibatch,) = trainer.minibatches(1, step)
        numbers.append(optimizer_status([trainer.train_minibatch(minibatch, 1)], strategy))
    with strategy.gathered_parameters(actor) as module:
        weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return {"weights": weights, "numbers": numbers, "passes": len(passes)}


def main(model_path: str, out: str) -> None:
    found = {
        (stage, leaves_out): steps(model_path, stage, leaves_out)
        for stage in (0, 2, 3)
        for leaves_out in (False, True)
    }
    torch.save(found, f"{out}.{torch.distributed.get_rank()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
