"""One rank of test_vllm.py: builds real engines, one after the other, and writes what it saw as JSON."""

import json
import os
import random
import sys
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from support.conversations import Conversations
from transformers import AutoTokenizer

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.episodes.hf_turns import generate_turns
from lightppo.errors import RolloutMismatchError
from lightppo.experience.rollout_check import RolloutCheck
from lightppo.models.actor import Actor
from lightppo.models.adapters.lora import LoraOptions, add_adapters
from lightppo.models.adapters.quantised import quantised_layers
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.rollout.vllm import colocated as vllm_engine
from lightppo.trainer.build import build_rollout_engine

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=16, temperature=0.7, n=2, seed=5)


def greedy_variants(case):
    """All greedy, so that both engines must agree to the token; what ends a response is taken from one."""
    base = SamplingParams(max_new_tokens=24, temperature=0.0)
    answers = [
        r.response_ids for r in case.hf.generate(case.prompts, replace(base, ignore_eos=True))
    ]
    texts = [case.tokenizer.decode(ids[9:11]) for ids in answers[2:4]]
    ids = (answers[0][14], answers[1][13])
    return {
        "stop ids": replace(base, stop_token_ids=ids),
        "stop strings": replace(base, do_sample=False, temperature=1.0, stop=tuple(texts)),
        "min tokens": replace(base, min_new_tokens=12, stop_token_ids=ids, stop=tuple(texts)),
        "ignore eos": replace(base, ignore_eos=True),
        "penalty": replace(base, repetition_penalty=1.3),
        "penalties of the response": replace(base, presence_penalty=0.7, frequency_penalty=0.4),
        "bad words": replace(base, bad_words=("a", texts[0], "12")),
    }


def make_prompts(tokenizer, count=8):
    """5 to 90 tokens: up to three blocks of the KV cache."""
    rng = random.Random(0)
    texts = [
        "".join(rng.choice("0123456789abcdefgh+= ") for _ in range(5 + 12 * i))
        for i in range(count)
    ]
    return [Prompt(text, tokenizer.encode(text), index=100 + i) for i, text in enumerate(texts)]


def adapt(actor, rank=4, layers=()):
    """Adds adapters whose B is not 0: merged and unmerged weights differ from the start."""
    add_adapters(actor, LoraOptions(rank=rank, target_modules=layers), seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in actor.hf_model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.4 / rank * torch.randn(parameter.shape, generator=generator))


class Trained:
    """One actor under one strategy, and rollouts by transformers."""

    def __init__(self, folder, zero_stage, lr, adapters=False, load_in_4bit=False, bf16=False):
        batch = {"micro_train_batch_size": 1, "train_batch_size": 2}
        self.strategy = DeepspeedStrategy(zero_stage=zero_stage, bf16=bf16, **batch)
        self.strategy.setup_distributed()
        self.rank, self.world = self.strategy.get_rank(), self.strategy.world_size
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts = make_prompts(self.tokenizer)
        how = {"temperature": 0.7, "ds_config": self.strategy.get_ds_train_config(is_actor=True)}
        actor = Actor(folder, **how, load_in_4bit=load_in_4bit, bf16=bf16)
        if adapters:
            adapt(actor, **(adapters if isinstance(adapters, dict) else {}))
        optimizer = self.strategy.create_optimizer(actor, lr=lr)
        self.actor, self.optimizer, _ = self.strategy.prepare((actor, optimizer, None))
        self.hf = HFRolloutEngine(
            self.actor,
            self.tokenizer,
            gather_parameters=lambda: self.strategy.gathered_parameters(self.actor),
        )

    def share(self):
        """The prompts of this rank."""
        return self.prompts[self.rank :: self.world]

    def train(self):
        ids = torch.tensor([self.prompts[5 + self.rank].token_ids[:40]])
        self.strategy.backward(-self.actor(ids, 30).mean(), self.actor, self.optimizer)
        self.strategy.optimizer_step(self.optimizer, self.actor, None)

    def log_prob_difference(self, rollouts):
        """Largest, of this rank; every rank runs one forward per rollout."""
        largest = 0.0
        for rollout in rollouts:
            ids = torch.tensor([rollout.prompt.token_ids + rollout.response_ids])
            with torch.no_grad():
                expected = self.actor(ids, len(rollout.response_ids))[0]
            largest = max(largest, (expected - torch.tensor(rollout.log_probs)).abs().max().item())
        return largest


class Case(Trained):
    """With an engine in this process."""

    def __init__(self, folder, zero_stage, adapters=False, load_in_4bit=False, **options):
        bf16 = options.get("bf16", False)
        super().__init__(folder, zero_stage, 0.02, adapters, load_in_4bit, bf16)
        batch = {"rollout_batch_size": 8, "train_batch_size": 8, "micro_rollout_batch_size": 4}
        lengths = {
            "prompt_max_len": 100,
            "generate_max_len": 24,
            "max_num_seqs": 16,
        }
        lengths["max_num_batched_tokens"] = 128
        self.config = PPOConfig.from_flat(
            pretrain=folder,
            rollout_engine="vllm",
            zero_stage=zero_stage,
            temperature=0.7,
            **({"lora_rank": 4} if adapters else {}) | batch | lengths | options,
        ).resolved()
        before = self.process_state()
        self.engine = build_rollout_engine(self.config, self.strategy, self.actor, self.tokenizer)
        self.undisturbed = before == self.process_state()

    def process_state(self):
        random_numbers = (random.getstate(), torch.get_rng_state().tolist())
        threads = (
            torch.set_num_threads.__name__,
            torch.get_num_threads(),
            sorted(os.sched_getaffinity(0)),
        )
        return (
            random_numbers,
            threads,
            os.environ.get("LOCAL_WORLD_SIZE"),
            torch.get_default_dtype(),
        )

    def close(self):
        self.engine.close()
        self.engine.close()  # once more does nothing
        self.strategy.barrier()  # the process group is the trainer's


def facts(rollouts):
    return [
        [r.prompt.index, r.sample_index, r.response_ids, r.finish_reason, r.response_text]
        for r in rollouts
    ]


def pushes(case):
    """Greedy tokens of both engines with the first weights, and after each of two optimizer steps."""
    seen = []
    for step in range(3):
        if step:
            case.train()
            stale = facts(case.engine.generate(case.share(), GREEDY))
            case.engine.sync_weights(case.actor)
        else:
            stale = None
        mine = case.share()
        seen.append(
            {
                "vllm": facts(case.engine.generate(mine, GREEDY)),
                "hf": facts(case.hf.generate(mine, GREEDY)),
                "stale": stale,
            }
        )
    return seen


def corrupted(case):
    """What the check says when one weight in the engine is another one."""
    right = vllm_engine.full_weights

    def wrong(actor):
        for name, tensor in right(actor):
            if name == "model.layers.1.self_attn.v_proj.weight":
                tensor = tensor.clone()
                tensor[3] += 1.0
            yield name, tensor

    vllm_engine.full_weights = wrong
    case.engine.sync_weights(case.actor)
    vllm_engine.full_weights = right
    rollouts = case.engine.generate(case.share(), SAMPLED)
    try:
        RolloutCheck(case.actor, case.engine, case.strategy, case.config).first(rollouts)
        message = None
    except RolloutMismatchError as error:
        message = str(error)
    case.engine.sync_weights(case.actor)
    check = RolloutCheck(case.actor, case.engine, case.strategy, case.config)
    check.first(case.engine.generate(case.share(), SAMPLED))
    nothing = case.share() if case.rank == 0 else []
    return {"message": message, "mended": check.difference(case.engine.generate(nothing, SAMPLED))}


def adapters_of(case):
    """What a push sends, what vLLM holds after pushes, and what the check says of an adapter that came wrong."""
    engine = case.engine
    seen = {"alone": engine.pushes_adapters, "sent": engine.last_stats["sync_bytes"]}
    if not engine.pushes_adapters:
        return seen
    seen["numbers"] = [list(engine.llm.llm_engine.list_loras()), engine._pushes]
    right = vllm_engine.adapter_weights
    check = RolloutCheck(case.actor, engine, case.strategy, case.config)
    check.first(engine.generate(case.share(), SAMPLED))

    def wrong(actor):
        for name, tensor in right(actor):
            yield name, tensor + ("layers.1.self_attn.v_proj.lora_A" in name)

    vllm_engine.adapter_weights = wrong
    engine.sync_weights(case.actor)
    vllm_engine.adapter_weights = right
    try:
        check.first(engine.generate(case.share(), SAMPLED))
    except RolloutMismatchError as error:
        seen["message"] = str(error)
    engine.sync_weights(case.actor)
    return seen | two_adapters_at_once(case)


def two_adapters_at_once(case):
    """A request that is under way during a push, and one after it in the same batches."""
    engine, inner = case.engine, case.engine.llm.llm_engine
    prompt = [Prompt("", [5, 6, 7])]
    how = vllm_engine.Requests(engine, prompt, GREEDY).of_sample(0)[1]
    names, expected, found = [], [], {}
    for is_new in (False, True):
        if is_new:
            case.train()
            engine.sync_weights(case.actor)
        expected += [one.response_ids for one in case.hf.generate(prompt, GREEDY)]
        names.append(engine._add([5, 6, 7], how))
        inner.step()
    held = len(inner.list_loras())
    while inner.has_unfinished_requests():
        for output in inner.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    engine._remove_unused()
    return {
        "during": held,
        "at once": [[found[name] for name in names], expected],
        "after": [list(inner.list_loras()), engine._pushes],
    }


def refused(case):
    """Messages of calls that cannot work."""
    long = Prompt("x", [5] * 120, index=7)
    calls = {
        "long": ([long], GREEDY),
        "empty": ([Prompt("", [], index=8)], GREEDY),
        "stop id": (case.prompts, SamplingParams(stop_token_ids=(999,), max_new_tokens=4)),
        "first token": (
            case.prompts,
            SamplingParams(first_token_temperature=2.0, max_new_tokens=4),
        ),
    }
    messages = {}
    for name, (prompts, sampling) in calls.items():
        try:
            case.engine.generate(prompts, sampling)
        except ValueError as error:
            messages[name] = str(error)
    return messages


def unseeded(case):
    """One seed for a whole call; the prompts of another call come between."""
    generate = case.engine.generate
    seeds = vllm_engine.VLLMRolloutEngine._seeds_each_response
    vllm_engine.VLLMRolloutEngine._seeds_each_response = False
    state = torch.get_rng_state()
    seen = {
        "first": facts(generate(case.prompts, SAMPLED)),
        "others": facts(generate(case.prompts[:3], SAMPLED)),
    }
    seen["again"] = facts(generate(case.prompts, SAMPLED))
    seen["other seed"] = facts(generate(case.prompts, replace(SAMPLED, seed=6)))
    seen["undisturbed"] = torch.equal(torch.get_rng_state(), state)
    rollouts = generate(case.prompts, SAMPLED)
    seen["difference"] = case.log_prob_difference(rollouts)
    vllm_engine.VLLMRolloutEngine._seeds_each_response = seeds
    return seen


def conversations(case):
    """Turns of both engines, greedy and sampled; they come at once, or late and few at a time."""

    def played(generate, how, **options):
        source = Conversations(case.prompts[:5], turns=3, samples=2, **options)
        generate(source, how)
        return [[*key, ids] for key, ids in source.ids().items()]

    greedy = replace(GREEDY, max_new_tokens=8)
    sampled = replace(SAMPLED, max_new_tokens=8, n=1)
    return {
        "greedy": played(case.engine.generate_turns, greedy),
        "greedy hf": played(partial(generate_turns, case.hf), greedy),
        "sampled": played(case.engine.generate_turns, sampled),
        "late": played(case.engine.generate_turns, sampled, late=True),
        "first turns": facts(case.engine.generate(case.prompts[:5], replace(sampled, n=2))),
        "nothing": played(case.engine.generate_turns, replace(sampled, seed=9))
        != played(case.engine.generate_turns, sampled),
    }


def sampling(case):
    """Seeds, orders, filters; one rank."""
    generate = case.engine.generate
    finished = []
    whole = facts(generate(case.prompts, SAMPLED, on_finished=finished.extend))
    filtered = SamplingParams(
        max_new_tokens=16, temperature=1.3, top_p=0.8, top_k=5, repetition_penalty=1.2, seed=2
    )
    filtered = replace(filtered, presence_penalty=0.5, frequency_penalty=0.3, min_p=0.05)
    case.actor.temperature = 1.3
    filtered_difference = case.log_prob_difference(generate(case.prompts, filtered))
    case.actor.temperature = 0.7
    twice = generate([case.prompts[0], case.prompts[0]], SAMPLED)
    return {
        "whole": whole,
        "finished": len(finished),
        "backwards": facts(generate(case.prompts[::-1], SAMPLED)),
        "alone": facts(generate(case.prompts[3:4], SAMPLED)),
        "other seed": facts(
            generate(case.prompts, SamplingParams(max_new_tokens=16, temperature=0.7, n=2, seed=6))
        ),
        "twice": [r.response_ids for r in twice],
        # more tokens than one forward pass takes (128)
        "crowd": [r.response_ids for r in generate(case.prompts[::-1] * 3, SAMPLED)][:16],
        "filtered difference": filtered_difference,
        "like hf": {
            name: [facts(generate(case.prompts, how)), facts(case.hf.generate(case.prompts, how))]
            for name, how in greedy_variants(case).items()
        },
        "refused": refused(case),
        "unseeded": unseeded(case),
        "conversations": conversations(case),
    }


def main(folder, *cases):
    results = []
    for case_options in map(json.loads, cases):
        extras, brief = case_options.pop("extras", False), case_options.pop("brief", False)
        case = Case(os.path.join(folder, case_options.pop("model")), **case_options)
        seen = {"undisturbed": case.undisturbed, "pushes": pushes(case)}
        if brief:
            if case_options.get("adapters"):
                seen |= adapters_of(case)
            rollouts = case.engine.generate(case.share(), SAMPLED)
            seen |= {
                "difference": case.log_prob_difference(rollouts),
                "weights": case.engine.differing_weights(),
            }
            seen["in_4bit"] = len(quantised_layers(case.actor))
            case.close()
            results.append(seen)
            continue
        seen["corrupted"] = corrupted(case)
        sampled = case.engine.generate(case.share(), SAMPLED)
        seen |= {"sampled": facts(sampled), "difference": case.log_prob_difference(sampled)}
        nothing = case.prompts if case.rank == 0 else []
        seen["one rank alone"] = facts(case.engine.generate(nothing, SAMPLED))
        if extras:
            seen["sampling"] = sampling(case)
        case.close()
        results.append(seen)
    with open(os.path.join(folder, f"rank{os.environ['RANK']}of{case.world}.json"), "w") as file:
        json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
