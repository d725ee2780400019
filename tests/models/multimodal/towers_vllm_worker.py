"""An engine in this process with a whole checkpoint (--load_format auto): writes what it saw as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.models.actor import Actor
from lightppo.rollout.engine import SamplingParams
from lightppo.trainer.build import build_rollout_engine

SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.0, n=2, seed=5)


def tower_of(engine) -> dict[str, str]:
    """SHA-256 of each weight of the engine's tower."""
    model = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    weights = {n: p for n, p in model.named_parameters() if not n.startswith("language_model.")}
    return {
        name: hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()
        for name, weight in weights.items()
    }


def difference(actor, rollouts) -> float:
    """The largest one of log probs."""
    largest = 0.0
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt.token_ids + rollout.response_ids])
        with torch.no_grad():
            expected = actor(ids, len(rollout.response_ids))[0]
        largest = max(largest, (expected - torch.tensor(rollout.log_probs)).abs().max().item())
    return largest


def main(whole: str, target: str) -> None:
    strategy = DeepspeedStrategy(zero_stage=2, micro_train_batch_size=1, train_batch_size=1)
    strategy.setup_distributed()
    tokenizer = AutoTokenizer.from_pretrained(whole)
    actor = Actor(whole, ds_config=strategy.get_ds_train_config())
    optimizer = strategy.create_optimizer(actor, lr=2e-2, weight_decay=0.1)
    actor, optimizer, _ = strategy.prepare((actor, optimizer, None))
    texts = ["1+2=", "abc", "what is 7+8="]
    prompts = [Prompt(text, tokenizer.encode(text), index=i) for i, text in enumerate(texts)]
    config = PPOConfig.from_flat(
        pretrain=whole,
        rollout_engine="vllm",
        load_format="auto",
        prompt_max_len=16,
        generate_max_len=16,
        rollout_batch_size=4,
        train_batch_size=4,
        max_num_seqs=16,
    ).resolved()
    engine = build_rollout_engine(config, strategy, actor, tokenizer)
    seen = {"towers": [tower_of(engine)], "differences": [], "weights": []}
    for _ in range(2):
        ids = torch.tensor([prompts[2].token_ids])
        strategy.backward(-actor(ids, 6).mean(), actor, optimizer)
        strategy.optimizer_step(optimizer, actor, None)
        stale = engine.generate(prompts, SAMPLED)
        seen["stale"] = difference(actor, stale)
        engine.sync_weights(actor)
        seen["differences"].append(difference(actor, engine.generate(prompts, SAMPLED)))
        seen["weights"].append(engine.differing_weights())
        seen["towers"].append(tower_of(engine))
    engine.close()
    Path(target).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
