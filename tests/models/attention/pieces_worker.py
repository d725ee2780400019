"""Ranks of test_sequence_parallel.py: log probs, values and gradients of whole rows, and of pieces of them.

Usage: pieces_worker.py FOLDER; the launcher may put --local_rank first.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from families.zoo import random_model
from support.fake_liger import FakeLiger
from support.late_streams import LateStreams

from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.distributed.sequence_parallel import SequenceGroup
from lightppo.errors import UserError
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic, NewRewardModel
from lightppo.models.kernels.liger import put_kernels_in
from lightppo.models.kernels.offload import ActivationOffload, OwnWeights
from lightppo.models.packing import settle_packing

PACKED = SimpleNamespace(training=SimpleNamespace(packing_samples=True))  # of a config
# prompt and response of each row: neither 2 nor 4 divides their sum; row 2 has the prompt of row 0
ROWS = {"several": [(9, 3), (2, 11), (9, 5), (1, 1)], "one": [(13, 2)]}


def batch_of(rows: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(rows))
    prompt_width, actions = (max(column) for column in zip(*rows))
    sequences = torch.zeros(len(rows), prompt_width + actions, dtype=torch.long)
    mask = torch.zeros_like(sequences)
    for row, (prompt, response) in enumerate(rows):
        places = slice(prompt_width - prompt, prompt_width + response)
        mask[row, places] = 1
        sequences[row, places] = torch.randint(4, 40, (prompt + response,), generator=generator)
    if len(rows) > 2:
        sequences[2, :prompt_width] = sequences[0, :prompt_width]
    weights = torch.randn(len(rows), actions + 1, generator=generator)
    return {"sequences": sequences, "mask": mask, "weights": weights}


def outputs_of(model, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What losses are made of, (B, A) or (B,) each."""
    sequences, mask = batch["sequences"], batch["mask"]
    actions = batch["weights"].shape[1] - 1
    if isinstance(model, Actor):
        scores = model.score_actions(sequences, actions, mask, entropy=True, entropy_grad=True)
        with_logits = model.score_actions(sequences, actions, mask, logits=True)
        norms = with_logits.logits.float().square().mean(-1)
        of_logits = torch.zeros_like(scores.log_probs).masked_scatter(with_logits.real, norms)
        return [scores.log_probs, scores.entropy, with_logits.whole(of_logits)]
    if isinstance(getattr(model, "module", model), NewRewardModel):
        return [model(sequences, mask, actions)]
    return [model(sequences, num_actions=actions, attention_mask=mask, include_last=True)]


def offloaded(model) -> LateStreams:
    """Have every activation of its passes with gradients leave, and come back late."""
    streams = LateStreams()
    offload = ActivationOffload(streams, smallest=1, leaving=0, ahead=1 << 12, slab=1 << 16)
    model.around_pass = lambda weights, device: offload.around(OwnWeights(weights))
    return streams


def put_liger_in(model) -> FakeLiger:
    """Have stand-ins for Liger's kernels run it."""
    fake = FakeLiger({})
    sys.modules |= fake.modules()
    put_kernels_in(model)
    return fake


def gradient(model: Path, kind: type, stage: int, options: dict, rows: str, divided: bool) -> dict:
    """What the model gives, and how a step of it changes the weights; without a folder it is of a family's name."""
    strategy = DeepspeedStrategy(
        max_norm=0.0,
        zero_stage=stage,
        sequence_parallel_size=torch.distributed.get_world_size(),
    )
    strategy.setup_distributed()
    torch.manual_seed(0)
    ds_config = strategy.get_ds_train_config() | {"zero_allow_untested_optimizer": True}
    # else nothing so small is sharded
    ds_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    checkpoints = options.pop("checkpointing", False)
    offloads = options.pop("offloading", False)
    has_liger = options.pop("liger", False)
    if kind is Critic:
        options["draws_head"] = True  # else its layers have no gradient in a first step
    if model.exists():
        model = kind(str(model), ds_config=ds_config, packing_samples=True, **options)
    else:
        model = kind(random_model(model.name), **options)
    fake = put_liger_in(model.hf_model) if has_liger else FakeLiger({})
    if checkpoints:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, None))
    wrapper = getattr(model, "module", model)
    settle_packing(PACKED, strategy, [wrapper], options.get("share_prompts", True))
    model.train()
    with strategy.gathered_parameters(model) as module:
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
    batch = batch_of(ROWS[rows])
    streams = offloaded(wrapper) if offloads else nullcontext()
    with strategy.together if divided else nullcontext(), streams:
        outputs = outputs_of(model, batch)
        weights = batch["weights"]
        loss = sum((x.view(len(x), -1) * weights[:, : x[0].numel()]).sum() for x in outputs)
        strategy.backward(loss, model, optimizer)
        assert bool(fake.calls) == has_liger
        if offloads:
            assert streams.finish() == []
            assert streams.counts["back"] > 0
    strategy.optimizer_step(optimizer, model, scheduler)
    with strategy.gathered_parameters(model) as module:
        change = {n: before[n] - p.detach() for n, p in module.named_parameters()}
    return {"outputs": [x.detach() for x in outputs], "change": change}


def main(folder: Path) -> None:
    DeepspeedStrategy().setup_distributed()
    # one group for all cases: each group of gloo has threads that wake up a hundred times a second
    SequenceGroup.of_rank = cache(SequenceGroup.of_rank)
    kinds = {"actor": Actor, "critic": Critic, "reward": NewRewardModel}
    found = {}
    for name, (model, kind, stage, options, rows) in torch.load(folder / "cases.pt").items():
        case = folder / model, kinds[kind], stage
        try:
            found[name] = [
                gradient(*case, dict(options), rows, divided) for divided in (False, True)
            ]
        except UserError as error:
            found[name] = str(error)
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, found)
    if torch.distributed.get_rank() == 0:
        torch.save(every, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
