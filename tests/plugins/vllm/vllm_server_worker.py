"""One rank of test_vllm_server_real.py: rolls out by real servers, kills them, and writes what it saw as JSON."""

import json
import os
import signal
import sys
import time

import torch.distributed as dist
from support.vllm_servers import kill_server
from vllm_worker import Trained, facts

from lightppo.config import PPOConfig
from lightppo.errors import RolloutError
from lightppo.plugins.vllm import servers as vllm_server
from lightppo.plugins.vllm import weights
from lightppo.rollout.engine import SamplingParams
from lightppo.trainer.build import build_rollout_engine

GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=20, temperature=0.7, top_p=0.95, n=2, seed=5)
FULL_WEIGHTS = vllm_server.full_weights
WRONG = "model.layers.0.mlp.of_another_model.weight"


class Case(Trained):
    """With an engine over servers."""

    def __init__(self, folder, urls, zero_stage, **options):
        super().__init__(folder, zero_stage, lr=0.005)
        self.options = {
            "pretrain": folder,
            "rollout_engine": "vllm_server",
            "vllm_server_url": urls,
            "vllm_server_api_key_env": "LIGHTPPO_TEST_KEY",
            "vllm_server_retries": 0,
            "vllm_server_timeout": 200.0,
            "vllm_server_start_timeout": 120.0,
            "prompt_max_len": 90,
            "generate_max_len": 20,
            "temperature": 0.7,
            **options,
        }
        self.engine = self.build()

    def build(self, **options):
        config = PPOConfig.from_flat(**(self.options | options)).resolved()
        return build_rollout_engine(config, self.strategy, self.actor, self.tokenizer)

    def pushes(self, engine=None):
        """Greedy tokens of both engines with the present weights, and after each of two optimizer steps."""
        engine, seen = engine or self.engine, []
        for step in range(3):
            if step:
                self.train()
            engine.sync_weights(self.actor)
            seen.append(
                {"server": facts(engine.generate(self.share(), GREEDY)), "hf": self.greedy_hf()}
            )
        return seen

    def greedy_hf(self):
        return facts(self.hf.generate(self.share(), GREEDY))

    def error_of(self, function):
        """What a call says that must fail, and after how many seconds."""
        start = time.monotonic()
        try:
            function()
        except RolloutError as error:
            return str(error), time.monotonic() - start
        return "no error", time.monotonic() - start


def push_with(engine, actor, change):
    """One push of changed weights; ``change`` gets each name and its number."""

    def changed(*args):
        for i, (name, tensor) in enumerate(FULL_WEIGHTS(*args)):
            yield change(name, i), tensor

    vllm_server.full_weights = changed
    try:
        engine.sync_weights(actor)
    finally:
        vllm_server.full_weights = FULL_WEIGHTS


def killed_trainer(case):
    """Ends in the middle of its second push."""

    def change(name, i):
        if i == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        return name

    push_with(case.engine, case.actor, change)


def two_servers(case, others, pids):
    """Everything that needs two servers of one model; both are dead at the end."""
    seen = {"pushes": case.pushes()}
    rollouts = case.engine.generate(case.share(), SAMPLED)
    seen |= {"sampled": facts(rollouts), "difference": case.log_prob_difference(rollouts)}
    again = case.engine.generate(list(reversed(case.share())), SAMPLED)
    seen["reversed"] = facts(again)
    alone = case.build(vllm_server_url=case.options["vllm_server_url"][:1])
    seen["one_server"] = facts(alone.generate(case.share(), SAMPLED))
    seen["taken"] = (
        case.error_of(lambda: case.engine.generate(case.share(), GREEDY)),
        case.engine.lost,
    )
    case.train()
    seen["unpushed"] = alone.differing_weights()
    alone.sync_weights(case.actor)
    seen["pushed"] = alone.differing_weights()
    alone.close()

    os.environ["WRONG_KEY"] = "open-barley"
    seen["wrong_key"] = case.error_of(lambda: case.build(vllm_server_api_key_env="WRONG_KEY"))
    seen["other_model"] = case.error_of(lambda: case.build(vllm_server_url=others))

    collective = case.build(vllm_server_sync="collective")
    seen["collective"] = case.pushes(collective)
    halves = []

    def misname(name, i):
        """The second half of a layer that vLLM loads in two, so that the error finds it half loaded."""
        if name.startswith("model.layers.0.mlp.") and ("gate" in name or "up" in name):
            halves.append(name)
            return WRONG if len(halves) == 2 else name
        return name

    seen["wrong_names"] = case.error_of(lambda: push_with(collective, case.actor, misname))
    collective.sync_weights(case.actor)
    seen["after_wrong_names"] = case.pushes(collective)[:1]
    seen["before"] = facts(collective.generate(case.share(), SAMPLED))

    def kill(pid):
        """When the first response of rank 0 is there; the others are under way."""
        left = [pid] if case.rank == 0 else []
        return lambda rollouts: kill_server(left.pop()) if left else None

    # One request at a time and server, so that the kill comes in mid-rollout.
    slow = case.build(vllm_server_concurrency=1)
    seen["killed_one"] = facts(slow.generate(case.share(), SAMPLED, on_finished=kill(pids[1])))
    seen["lost"] = slow.lost
    slow.sync_weights(case.actor)
    seen["after"] = facts(slow.generate(case.share(), SAMPLED))

    def kill_other(name, i):
        if i == 15 and case.rank == 0:
            kill_server(pids[0])
        return name

    seen["killed_both"] = case.error_of(lambda: push_with(collective, case.actor, kill_other))
    seen["then"] = case.error_of(lambda: slow.generate(case.share(), SAMPLED))
    seen["initialized"] = dist.get_world_size()  # the default group is what it was
    case.engine.close()
    return seen


def one_server(case):
    """A tied model, and the engine in this process beside it."""
    greedy = case.engine.generate(case.share(), GREEDY)
    seen = {"greedy": facts(greedy)}
    stop_id, words = greedy[0].response_ids[12], case.tokenizer.decode(greedy[2].response_ids[9:11])
    like = {
        "stop": SamplingParams(
            max_new_tokens=20, do_sample=False, stop=(words,), stop_token_ids=(stop_id,)
        )
    }
    like["minimum"] = SamplingParams(
        max_new_tokens=20, do_sample=False, min_new_tokens=9, stop_token_ids=(stop_id,)
    )
    like["penalty"] = SamplingParams(
        max_new_tokens=20, do_sample=False, repetition_penalty=1.3, bad_words=("a", "12")
    )
    for name, sampling in like.items():
        seen[name] = {"server": facts(case.engine.generate(case.share(), sampling))}
        seen[name]["hf"] = facts(case.hf.generate(case.share(), sampling))
    seen["pushes"] = case.pushes()
    seen["sampled"] = facts(case.engine.generate(case.share(), SAMPLED))
    urls = {name: None for name in case.options if name.startswith("vllm_server")}
    options = {name: value for name, value in case.options.items() if name not in urls}
    config = PPOConfig.from_flat(
        **options | {"rollout_engine": "vllm", "block_size": 32, "max_num_seqs": 32}
    )
    inner = build_rollout_engine(config.resolved(), case.strategy, case.actor, case.tokenizer)
    seen["in_process"] = facts(inner.generate(case.share(), SAMPLED))
    inner.close()
    case.engine.close()
    return seen


def main(folder, task, model, urls, others, pids):
    weights.BUCKET_BYTES = 1 << 16  # several, for a tiny model
    sync = {"vllm_server_sync": "collective"} if task == "killed_trainer" else {}
    case = Case(
        os.path.join(folder, model), urls, zero_stage=3 if task == "two_servers" else 0, **sync
    )
    if task == "killed_trainer":
        killed_trainer(case)
    seen = two_servers(case, others, pids) if task == "two_servers" else one_server(case)
    with open(os.path.join(folder, f"{task}-rank{case.rank}.json"), "w") as file:
        json.dump(seen, file)
    case.strategy.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    main(words[0], words[1], words[2], *map(json.loads, words[3:6]))
