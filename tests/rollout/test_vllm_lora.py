"""The real vLLM with the merged weights of a model with LoRA adapters, on two ranks."""

import importlib.util
import json
from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.tiny import save_causal_lm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WORKER = Path(__file__).with_name("vllm_lora_worker.py")
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}


def test_greedy_tokens_and_log_probs_are_those_of_the_actor_with_its_adapters(tmp_path):
    save_causal_lm(tmp_path / "untied", max_position_embeddings=256, **SHAPE)
    save_causal_lm(tmp_path / "tied", max_position_embeddings=256, tie_word_embeddings=True, **SHAPE)
    cases = [
        {"model": "tied", "zero_stage": 3},
        {"model": "untied", "zero_stage": 2},
        {"model": "tied", "zero_stage": 3, "load_in_4bit": True},
    ]
    run_ranks(WORKER, tmp_path, *map(json.dumps, cases), vllm=True, timeout=500)
    for rank in range(2):
        everything = json.loads((tmp_path / f"lora_rank{rank}.json").read_text())
        assert [seen["in_4bit"] for seen in everything] == [0, 0, 14]
        for seen in everything:
            pushed = [push["vllm"] for push in seen["pushes"]]
            assert pushed == [push["hf"] for push in seen["pushes"]]
            assert pushed[0] != pushed[1] != pushed[2]  # every optimizer step moved the adapters
            assert seen["difference"] < 1e-4
