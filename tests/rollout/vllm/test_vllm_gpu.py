"""vLLM on a GPU: what it frees while it sleeps, and that it wakes with the right weights."""

import json
import os
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import save_causal_lm

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

WORKER = Path(__file__).with_name("vllm_gpu_worker.py")


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(tmp_path, level):
    shape = {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
    }
    save_causal_lm(tmp_path, max_position_embeddings=256, **shape)
    env = {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        "DS_ACCELERATOR": "cuda",
    }
    run_ranks(WORKER, tmp_path, str(level), launcher="python", world_size=1, timeout=500, env=env)
    seen = json.loads((tmp_path / f"level{level}.json").read_text())
    awake, asleep = seen["free"]
    assert asleep > awake + 0.1 * torch.cuda.get_device_properties(0).total_memory
    assert seen["before"][0] == seen["before"][1] == seen["woken"]
    assert seen["after"][0] == seen["after"][1] != seen["before"][0]
