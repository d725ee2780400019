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
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.vllm import servers as vllm_server
from lightppo.rollout.vllm import weights
from lightppo.trainer.build import build_rollout_engine
from lightppo.user_code import in_daemon_thread

GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=20, temperature=0.7, top_p=0.95, n=2, seed=5)
FULL_WEIGHTS = vllm_server.full_weights
WRONG = "model.layers.0.mlp.of_another_model.weight"


class Case(Trained):
    """With an engine over servers."""

    def __init__(self, folder, urls, zero_stage, adapters=False, **options):
        super().__init__(folder, zero_stage, lr=0.02 if adapters else 0.005, adapters=adapters)
        self.options = {
            "pretrain": folder,
            "rollout_engine": "vllm_server",
            "vllm_server_url": urls,
            "vllm_server_api_key_env": "LIGHTPPO_TEST_KEY",
            "vllm_server_retries": 0,
            "vllm_server_timeout": 200.0,
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
    slow = case.build()
    slow.requests_per_server = 1
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


def adapters_alone(case):
    """A server with two workers that takes adapters; the actor trains one that is a hundredth of it."""
    engine = case.engine
    seen = {"alone": engine.pushes_adapters, "first": engine.last_stats["sync_bytes"]}
    seen["pushes"] = case.pushes()
    seen["sent"] = engine.last_stats["sync_bytes"]
    rollouts = engine.generate(case.share(), SAMPLED)
    seen["difference"] = case.log_prob_difference(rollouts)
    (server,) = engine.servers
    seen["held"] = [server._rpc("lightppo_forget_adapters", [[]]), engine.adapter]
    seen["during"] = push_during_a_request(case)
    seen["held after"] = [server._rpc("lightppo_forget_adapters", [[]]), engine.adapter]

    broadcast = case.build(vllm_server_sync="collective", vllm_lora_push="adapter")
    seen["collective"] = case.pushes(broadcast)
    # a new base came with it: the engine before is told that its adapter is gone
    seen["taken"] = case.error_of(lambda: engine.generate(case.share(), GREEDY))
    merged = case.build(vllm_lora_push="merged")
    seen["merged"] = case.pushes(merged)[:2]
    seen["sent merged"] = merged.last_stats["sync_bytes"]
    engine.sync_weights(case.actor)  # which needs the base once more
    seen["again"] = {"server": facts(engine.generate(case.share(), GREEDY)), "hf": case.greedy_hf()}
    seen["sent again"] = engine.last_stats["sync_bytes"]
    for one in (engine, broadcast, merged):
        one.close()
    return seen


def push_during_a_request(case):
    """A request that waits in the server while another adapter is pushed, and its answer."""
    engine, (server,) = case.engine, case.engine.servers
    prompt, how = case.share()[:1], engine_request(case)
    expected = [one.response_ids for one in case.hf.generate(prompt, GREEDY)]
    server.post("/pause?mode=keep")
    old, version = engine.adapter, engine.version
    answer = in_daemon_thread(server.complete, how, prompt[0].token_ids, 64, version, old)
    wait_for(lambda: server.post(vllm_server.ADAPTERS)["served"] == {old: 1})
    case.train()
    engine.sync_weights(case.actor)
    served = server.post(vllm_server.ADAPTERS)["served"]
    held = server._rpc("lightppo_forget_adapters", [[]])[0]["held"]
    server.post("/resume")
    ids, _, _ = answer.result()
    wait_for(lambda: server.post(vllm_server.ADAPTERS)["served"] == {engine.adapter: 0})
    return {
        "served": served == {old: 1, engine.adapter: 0},
        "held": held == [old, engine.adapter],
        "old": [[ids], expected],
        "new": [facts(engine.generate(prompt, GREEDY)), facts(case.hf.generate(prompt, GREEDY))],
    }


def engine_request(case):
    """How to sample the first prompt greedily."""
    return vllm_server.Requests(case.engine, case.share()[:1], GREEDY).of_sample(0)[1]


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
    config = PPOConfig.from_flat(**options | {"rollout_engine": "vllm", "max_num_seqs": 32})
    inner = build_rollout_engine(config.resolved(), case.strategy, case.actor, case.tokenizer)
    seen["in_process"] = facts(inner.generate(case.share(), SAMPLED))
    inner.close()
    case.engine.close()
    return seen


def main(folder, task, model, urls, others, pids):
    weights.BUCKET_BYTES = 1 << 16  # several, for a tiny model
    sync = {"vllm_server_sync": "collective"} if task == "killed_trainer" else {}
    adapters = {"rank": 1, "layers": ("q_proj", "o_proj")} if task == "adapters" else False
    lora = {"lora_rank": 1} if adapters else {}
    zero_stage = 0 if task in ("one_server", "killed_trainer") else 3
    path = os.path.join(folder, model)
    case = Case(path, urls, zero_stage, adapters=adapters, **sync, **lora)
    if task == "killed_trainer":
        killed_trainer(case)
    if task == "two_servers":
        seen = two_servers(case, others, pids)
    else:
        seen = adapters_alone(case) if adapters else one_server(case)
    with open(os.path.join(folder, f"{task}-rank{case.rank}.json"), "w") as file:
        json.dump(seen, file)
    case.strategy.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    main(words[0], words[1], words[2], *map(json.loads, words[3:6]))
