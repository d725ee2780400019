"""One rank of test_zero3.py: rolls out under ZeRO-3 before and after a training step, writes what it saw as JSON."""

import json
import os
import sys
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightppo.data.records import Prompt
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine


def main(folder: str, texts: list[str], splits: list[int]) -> None:
    strategy = DeepspeedStrategy(
        zero_stage=3, micro_train_batch_size=1, train_batch_size=2, max_norm=0.0
    )
    strategy.setup_distributed()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine, optimizer, _ = strategy.prepare(
        (model, strategy.create_optimizer(model, lr=5e-2), None)
    )
    rollouts = HFRolloutEngine(
        SimpleNamespace(model=engine),
        tokenizer,
        micro_rollout_batch_size=2,
        gather_parameters=lambda: strategy.gathered_parameters(engine),
    )
    rank = strategy.get_rank()
    prompts = [Prompt(text, tokenizer.encode(text), index=i) for i, text in enumerate(texts)]
    sampling = SamplingParams(max_new_tokens=8, n=2, seed=3)

    def sample(split: int, sampler: HFRolloutEngine = rollouts) -> list[list[int]]:
        mine = prompts[:split] if rank == 0 else prompts[split:]
        return [r.response_ids for r in sampler.generate(mine, sampling)]

    before = [sample(split) for split in splits]
    sharded = [p.numel() for p in engine.module.parameters()] == [0] * len(
        list(engine.module.parameters())
    )
    ids = torch.tensor([tokenizer.encode("abcdef")])
    loss = engine(input_ids=ids, labels=ids).loss
    strategy.backward(loss, engine, optimizer)
    strategy.optimizer_step(optimizer, engine, None)
    trained = sample(splits[0])
    with strategy.gathered_parameters(engine) as module:
        plain = AutoModelForCausalLM.from_config(model.config)
        plain.load_state_dict(module.state_dict())
    alone = HFRolloutEngine(SimpleNamespace(model=plain), tokenizer)
    expected = sample(splits[0], alone)
    seen = {
        "before": before,
        "trained": trained,
        "expected": expected,
        "loss": loss.item(),
        "sharded": sharded,
    }
    with open(os.path.join(folder, f"rank{rank}.json"), "w") as file:
        json.dump(seen, file)
    strategy.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
