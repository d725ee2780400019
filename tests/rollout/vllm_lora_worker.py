"""One rank of test_vllm_lora.py: the cases of vllm_worker.py with an actor that has adapters."""

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
import vllm_worker

from lightppo.models.actor import Actor
from lightppo.models.lora import LoraOptions, add_adapters
from lightppo.models.quantised import quantised_layers


def adapted_actor(*args, **options):
    """B is not 0: merged and unmerged weights differ from the start."""
    actor = Actor(*args, **options)
    add_adapters(actor, LoraOptions(rank=4), seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in actor.hf_model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return actor


def main(folder, *cases):
    results = []
    for options in map(json.loads, cases):
        # What Case makes its actor of.
        vllm_worker.Actor = partial(adapted_actor, load_in_4bit=options.pop("load_in_4bit", False))
        case = vllm_worker.Case(os.path.join(folder, options.pop("model")), options)
        seen = {"pushes": vllm_worker.pushes(case), "in_4bit": len(quantised_layers(case.actor))}
        seen["difference"] = case.log_prob_difference(case.engine.generate(case.share(), vllm_worker.SAMPLED))
        case.close()
        results.append(seen)
    with open(os.path.join(folder, f"lora_rank{os.environ['RANK']}.json"), "w") as file:
        json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
