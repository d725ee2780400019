"""Two gloo ranks under ZeRO-3 with different numbers of prompts, one of them with none."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from lightppo.data.records import Prompt
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine

ROOT = Path(__file__).parents[2]
TEXTS = ["abc", "h", "ponmlkj", "a1b2", "deadbeef"]


SPLITS = [4, 5]  # 4 prompts and 1, 5 and none


def run_ranks(folder: Path) -> list[dict]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [
        sys.executable,
        str(Path(__file__).with_name("zero3_worker.py")),
        str(folder),
        json.dumps({"texts": TEXTS, "splits": SPLITS}),
    ]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **world, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_ranks_with_different_numbers_of_prompts(tmp_path, llama, tokenizer, actor_of):
    llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = [Prompt(text, tokenizer.encode(text), index=i) for i, text in enumerate(TEXTS)]
    rollouts = HFRolloutEngine(actor_of(llama), tokenizer).generate(
        prompts, SamplingParams(max_new_tokens=8, n=2, seed=3)
    )
    whole = [r.response_ids for r in rollouts]
    ranks = run_ranks(tmp_path)
    for first, second in zip(ranks[0]["before"], ranks[1]["before"]):
        assert first + second == whole  # the same samples as one process draws
    assert ranks[1]["before"][1] == []
    for rank in ranks:
        assert rank["sharded"]  # the parameters are partitioned again after the rollout
        assert rank["trained"] == rank["expected"]  # on-policy after a training step
        assert rank["trained"] != rank["before"][0]
    assert ranks[0]["loss"] == ranks[1]["loss"]
