"""One rank of test_vllm_gpu.py: sleeps, trains and wakes on a GPU, writes what it saw as JSON."""

import json
import os
import random
import sys

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.models.actor import Actor
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.rollout.vllm import colocated
from lightppo.trainer.build import build_rollout_engine

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)


def main(folder: str, level: int) -> None:
    colocated.sleep_level = lambda config: level
    strategy = DeepspeedStrategy(zero_stage=0, micro_train_batch_size=1, train_batch_size=1)
    strategy.setup_distributed()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    actor = Actor(folder, ds_config=strategy.get_ds_train_config(is_actor=True))
    optimizer = strategy.create_optimizer(actor, lr=0.02)
    actor, optimizer, _ = strategy.prepare((actor, optimizer, None))
    options = {
        "prompt_max_len": 64,
        "generate_max_len": 24,
        "gpu_memory_utilization": 0.2,
    }
    config = PPOConfig.from_flat(pretrain=folder, rollout_engine="vllm", **options).resolved()
    engine, hf = (
        build_rollout_engine(config, strategy, actor, tokenizer),
        HFRolloutEngine(actor, tokenizer),
    )
    rng = random.Random(0)
    texts = ["".join(rng.choice("0123456789abcdef+=") for _ in range(5 + 7 * i)) for i in range(8)]
    prompts = [Prompt(text, tokenizer.encode(text), index=i) for i, text in enumerate(texts)]

    def answers(which):
        return [r.response_ids for r in which.generate(prompts, GREEDY)]

    seen = {"before": [answers(engine), answers(hf)], "free": [torch.cuda.mem_get_info()[0]]}
    engine.sleep()
    seen["free"].append(torch.cuda.mem_get_info()[0])
    seen["woken"] = answers(engine)  # without a push in between
    engine.sleep()
    ids = torch.tensor([prompts[5].token_ids], device=strategy.device)
    strategy.backward(-actor(ids, 20).mean(), actor, optimizer)
    strategy.optimizer_step(optimizer, actor, None)
    engine.sync_weights(actor)
    seen["after"] = [answers(engine), answers(hf)]
    engine.close()
    with open(os.path.join(folder, f"level{level}.json"), "w") as file:
        json.dump(seen, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
