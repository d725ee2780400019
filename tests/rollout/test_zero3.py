"""Two gloo ranks under ZeRO-3 with different numbers of prompts, one of them with none."""

import json
from pathlib import Path

from support.ranks import run_ranks

from lightppo.data.records import Prompt
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine

TEXTS = ["abc", "h", "ponmlkj", "a1b2", "deadbeef"]


SPLITS = [4, 5]  # 4 prompts and 1, 5 and none


WORKER = Path(__file__).with_name("zero3_worker.py")


def test_ranks_with_different_numbers_of_prompts(tmp_path, llama, tokenizer, actor_of):
    llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = [Prompt(text, tokenizer.encode(text), index=i) for i, text in enumerate(TEXTS)]
    rollouts = HFRolloutEngine(actor_of(llama), tokenizer).generate(
        prompts, SamplingParams(max_new_tokens=8, n=2, seed=3)
    )
    whole = [r.response_ids for r in rollouts]
    run_ranks(WORKER, tmp_path, json.dumps({"texts": TEXTS, "splits": SPLITS}), timeout=300)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for first, second in zip(ranks[0]["before"], ranks[1]["before"]):
        assert first + second == whole  # the same samples as one process draws
    assert ranks[1]["before"][1] == []
    for rank in ranks:
        assert rank["sharded"]  # the parameters are partitioned again after the rollout
        assert rank["trained"] == rank["expected"]  # on-policy after a training step
        assert rank["trained"] != rank["before"][0]
    assert ranks[0]["loss"] == ranks[1]["loss"]
