"""One rank of test_vllm_server_real.py: rolls out by real servers, kills them, and writes what it saw as JSON."""

import json
import os
import random
import signal
import sys
import time

import torch
import torch.distributed as dist
from support.vllm_servers import kill_server
from transformers import AutoTokenizer

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt
from lightppo.errors import RolloutError
from lightppo.models.actor import Actor
from lightppo.rollout import vllm_server, weights
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.trainer.build import build_rollout_engine

GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=20, temperature=0.7, top_p=0.95, n=2, seed=5)
FULL_WEIGHTS = vllm_server.full_weights
WRONG = "model.layers.0.mlp.of_another_model.weight"


def make_prompts(tokenizer, count=8):
    """5 to 82 tokens: up to three blocks of the KV cache."""
    rng = random.Random(0)
    texts = ["".join(rng.choice("0123456789abcdefgh+= ") for _ in range(5 + 11 * i)) for i in range(count)]
    return [Prompt(text, tokenizer.encode(text), index=100 + i) for i, text in enumerate(texts)]


class Case:
    """One actor under one strategy, with an engine over servers and one of transformers."""

    def __init__(self, folder, urls, zero_stage, **options):
        self.strategy = DeepspeedStrategy(zero_stage=zero_stage, micro_train_batch_size=1, train_batch_size=2)
        self.strategy.setup_distributed()
        self.rank, self.world = self.strategy.get_rank(), self.strategy.world_size
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        actor = Actor(folder, temperature=0.7, ds_config=self.strategy.get_ds_train_config(is_actor=True))
        optimizer = self.strategy.create_optimizer(actor, lr=0.005)
        self.actor, self.optimizer, _ = self.strategy.prepare((actor, optimizer, None))
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
        self.prompts = make_prompts(self.tokenizer)
        self.hf = HFRolloutEngine(
            self.actor, self.tokenizer, gather_parameters=lambda: self.strategy.gathered_parameters(self.actor)
        )

    def build(self, **options):
        config = PPOConfig.from_flat(**(self.options | options)).resolved()
        return build_rollout_engine(config, self.strategy, self.actor, self.tokenizer)

    def mine(self):
        return self.prompts[self.rank :: self.world]

    def train(self):
        ids = torch.tensor([self.prompts[5 + self.rank].token_ids[:40]])
        self.strategy.backward(-self.actor(ids, 30).mean(), self.actor, self.optimizer)
        self.strategy.optimizer_step(self.optimizer, self.actor, None)

    def pushes(self, engine=None):
        """Greedy tokens of both engines with the present weights, and after each of two optimizer steps."""
        engine, seen = engine or self.engine, []
        for step in range(3):
            if step:
                self.train()
            engine.sync_weights(self.actor)
            seen.append({"server": facts(engine.generate(self.mine(), GREEDY)), "hf": self.greedy_hf()})
        return seen

    def greedy_hf(self):
        return facts(self.hf.generate(self.mine(), GREEDY))

    def log_prob_difference(self, rollouts):
        """Largest, of this rank; every rank runs one forward per rollout."""
        largest = 0.0
        for rollout in rollouts:
            ids = torch.tensor([rollout.prompt.token_ids + rollout.response_ids])
            with torch.no_grad():
                expected = self.actor(ids, len(rollout.response_ids))[0]
            largest = max(largest, (expected - torch.tensor(rollout.log_probs)).abs().max().item())
        return largest

    def error_of(self, function):
        """What a call says that must fail, and after how many seconds."""
        start = time.monotonic()
        try:
            function()
        except RolloutError as error:
            return str(error), time.monotonic() - start
        return "no error", time.monotonic() - start


def facts(rollouts):
    return [[r.prompt.index, r.sample_index, r.response_ids, r.finish_reason, r.response_text] for r in rollouts]


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
    rollouts = case.engine.generate(case.mine(), SAMPLED)
    seen |= {"sampled": facts(rollouts), "difference": case.log_prob_difference(rollouts)}
    again = case.engine.generate(list(reversed(case.mine())), SAMPLED)
    seen["reversed"] = facts(again)
    alone = case.build(vllm_server_url=case.options["vllm_server_url"][:1])
    seen["one_server"] = facts(alone.generate(case.mine(), SAMPLED))
    seen["taken"] = case.error_of(lambda: case.engine.generate(case.mine(), GREEDY)), case.engine.lost
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
    seen["before"] = facts(collective.generate(case.mine(), SAMPLED))

    def kill(pid):
        """When the first response of rank 0 is there; the others are under way."""
        left = [pid] if case.rank == 0 else []
        return lambda rollouts: kill_server(left.pop()) if left else None

    # One request at a time and server, so that the kill comes in mid-rollout.
    slow = case.build(vllm_server_concurrency=1)
    seen["killed_one"] = facts(slow.generate(case.mine(), SAMPLED, on_finished=kill(pids[1])))
    seen["lost"] = slow.lost
    slow.sync_weights(case.actor)
    seen["after"] = facts(slow.generate(case.mine(), SAMPLED))

    def kill_other(name, i):
        if i == 15 and case.rank == 0:
            kill_server(pids[0])
        return name

    seen["killed_both"] = case.error_of(lambda: push_with(collective, case.actor, kill_other))
    seen["then"] = case.error_of(lambda: slow.generate(case.mine(), SAMPLED))
    seen["initialized"] = dist.get_world_size()  # the default group is what it was
    case.engine.close()
    return seen


def one_server(case):
    """A tied model, and the engine in this process beside it."""
    greedy = case.engine.generate(case.mine(), GREEDY)
    seen = {"greedy": facts(greedy)}
    stop_id, words = greedy[0].response_ids[12], case.tokenizer.decode(greedy[2].response_ids[9:11])
    like = {"stop": SamplingParams(max_new_tokens=20, do_sample=False, stop=(words,), stop_token_ids=(stop_id,))}
    like["minimum"] = SamplingParams(max_new_tokens=20, do_sample=False, min_new_tokens=9, stop_token_ids=(stop_id,))
    like["penalty"] = SamplingParams(max_new_tokens=20, do_sample=False, repetition_penalty=1.3, bad_words=("a", "12"))
    for name, sampling in like.items():
        seen[name] = {"server": facts(case.engine.generate(case.mine(), sampling))}
        seen[name]["hf"] = facts(case.hf.generate(case.mine(), sampling))
    seen["pushes"] = case.pushes()
    seen["sampled"] = facts(case.engine.generate(case.mine(), SAMPLED))
    urls = {name: None for name in case.options if name.startswith("vllm_server")}
    options = {name: value for name, value in case.options.items() if name not in urls}
    config = PPOConfig.from_flat(**options | {"rollout_engine": "vllm", "block_size": 32, "max_num_seqs": 32})
    inner = build_rollout_engine(config.resolved(), case.strategy, case.actor, case.tokenizer)
    seen["in_process"] = facts(inner.generate(case.mine(), SAMPLED))
    inner.close()
    case.engine.close()
    return seen


def main(folder, task, model, urls, others, pids):
    weights.BUCKET_BYTES = 1 << 16  # several, for a tiny model
    sync = {"vllm_server_sync": "collective"} if task == "killed_trainer" else {}
    case = Case(os.path.join(folder, model), urls, zero_stage=3 if task == "two_servers" else 0, **sync)
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
