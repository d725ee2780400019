"""One rank of test_vllm_server_collective.py: pushes by torch.distributed, kills servers or itself in mid-push, and
writes what it saw as JSON."""

import json
import os
import signal
import sys

import torch.distributed as dist
from support.vllm_servers import kill_server
from vllm_server_worker import GREEDY, Case, facts

from lightppo.rollout import vllm_server, weight_buckets

WEIGHTS = vllm_server.full_weights
WRONG = "model.layers.0.mlp.of_another_model.weight"


def push_with(case, change):
    """One push of changed weights; ``change`` gets each name and its number."""

    def weights(*args):
        for i, (name, tensor) in enumerate(WEIGHTS(*args)):
            yield change(name, i), tensor

    vllm_server.full_weights = weights
    try:
        case.engine.sync_weights(case.actor)
    finally:
        vllm_server.full_weights = WEIGHTS


def killed_trainer(case):
    """Ends in the middle of its second push."""

    def change(name, i):
        if i == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return name

    push_with(case, change)


def collective(case, pids):
    """Everything else; the first server is dead at the end."""
    seen = {"pushes": case.pushes()}
    case.train()
    alone = case.build(vllm_server_url=case.options["vllm_server_url"][:1])
    case.train()
    seen["unpushed"] = alone.differing_weights()
    alone.sync_weights(case.actor)
    seen["pushed"] = alone.differing_weights()
    alone.close()

    halves = []

    def misname(name, i):
        """The second half of a layer that vLLM loads in two, so that the error finds it half loaded."""
        if name.startswith("model.layers.0.mlp.") and ("gate" in name or "up" in name):
            halves.append(name)
            return WRONG if len(halves) == 2 else name
        return name

    os.environ["WRONG_KEY"] = "open-barley"
    seen["wrong_key"] = case.error_of(lambda: case.build(vllm_server_api_key_env="WRONG_KEY"))
    seen["wrong_names"] = case.error_of(lambda: push_with(case, misname))
    case.engine.sync_weights(case.actor)
    seen["after_wrong_names"] = both(case)

    def kill(name, i):
        if i == 6 and case.rank == 0:
            kill_server(pids[0])
        return name

    case.train()
    seen["killed"] = case.error_of(lambda: push_with(case, kill))
    seen["lost"] = case.engine.pool.lost
    seen["after_kill"] = both(case)
    case.train()
    case.engine.sync_weights(case.actor)
    seen["after_that"] = both(case)
    seen["initialized"] = dist.get_world_size()  # the default group is what it was
    case.engine.close()
    return seen


def both(case):
    """Greedy tokens of the servers and of transformers."""
    return {"server": facts(case.engine.generate(case.mine(), GREEDY)), "hf": case.greedy_hf()}


def main(folder, task, urls, pids):
    weight_buckets.BUCKET_BYTES = 4096  # many messages, for a tiny model
    stage = 3 if task == "collective" else 0
    case = Case(os.path.join(folder, "untied"), urls, zero_stage=stage, vllm_server_sync="collective")
    seen = collective(case, pids) if task == "collective" else killed_trainer(case)
    with open(os.path.join(folder, f"{task}-rank{case.rank}.json"), "w") as file:
        json.dump(seen, file)
    case.strategy.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    main(words[0], words[1], *map(json.loads, words[2:4]))
