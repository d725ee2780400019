"""One rank of test_model.py: scores its share under ZeRO-3 with two reward models, writes what it got as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from lightppo.data.records import Prompt, Rollout
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.models.critic import RewardModel
from lightppo.rewards import RewardModelSource
from lightppo.rewards.reward_model import Retemplated, SameIds


def main(folder: Path, plain: str, judge: str, splits: list[int]) -> None:
    strategy = DeepspeedStrategy(zero_stage=3, micro_train_batch_size=1, train_batch_size=2)
    strategy.setup_distributed()
    config = strategy.get_ds_eval_config(zero_stage=3)
    # even tiny parameters are sharded
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    models = strategy.prepare(*(RewardModel(path, ds_config=config) for path in (plain, judge)))
    source = RewardModelSource(
        models,
        lambda scores: scores[0] - 2 * scores[1],
        device=strategy.device,
        micro_batch_size=2,
        ranks=strategy,
        inputs=[SameIds(0), Retemplated(AutoTokenizer.from_pretrained(judge))],
    )
    rollouts = [
        Rollout(
            Prompt(row["text"], row["ids"], messages=row["messages"]),
            0,
            row["response_ids"],
            row["response"],
            row["finish_reason"],
        )
        for row in json.loads((folder / "rows.json").read_text())
    ]
    outputs = []
    for split in splits:
        output = source.score(rollouts[:split] if strategy.get_rank() == 0 else rollouts[split:])
        parts = [output.metrics.get(f"reward_model_{i}", []) for i in range(2)]
        outputs.append({"scores": output.scores, "plain": parts[0], "judge": parts[1]})
    sharded = all(p.numel() == 0 for model in models for p in model.parameters())
    (folder / f"rank{strategy.get_rank()}.json").write_text(
        json.dumps({"outputs": outputs, "sharded": sharded})
    )
    strategy.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
